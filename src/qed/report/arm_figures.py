"""Figures of what arms follow and hold."""

from __future__ import annotations

from math import log2

import numpy as np

from ..analysis.capacity import capacity, state_numbers
from ..analysis.names import name_of
from ..analysis.results import Run
from ..analysis.selection import arms_of
from ..analysis.settings import Settings
from ..analysis.stats import across_seeds
from ..analysis.tracking import by_place, farthest
from ..data.groups import GROUPS
from ..recipes.arms import Arm
from ..recipes.generated import LOADS
from ..rules import RULES
from .arm_tables import all_runs, groups_of, of_arm, widths_of
from .charts import Axis, Chart, Charts, Heat, Panel, Series, lengths_axis, per_cent

BASELINE = "gdn2"  # what QED is without its second direction
BESIDE = 0.12  # octaves between points of one size


def look(arm: str) -> tuple[int, int]:
    """An arm's place in the palette, which is its rule's, or one behind those of all rules for each bound on λ; and its
    dashes: those of a wider erase gate are broken, those of a bound dotted."""
    parsed = Arm.parse(arm)
    before = 0 if parsed.bound is None else 1 + round(10 * parsed.bound)
    place = len(RULES) * before + list(RULES).index(parsed.rule)
    return place, int(parsed.erase is not None) + 2 * int(parsed.bound is not None)


def places(settings: Settings) -> Chart:
    """The share of right products by place in the word: a panel a group, a line an arm, the mean over trainings."""
    panels = []
    for group in groups_of(settings):
        series = []
        for arm in arms_of(settings[group]):
            found = [by_place(run) for run in of_arm(settings[group], arm) if by_place(run)]
            if found:
                colour, dashes = look(arm)
                ends = list(found[0])
                y = [100 * float(np.mean([x[end].value for x in found])) for end in ends]
                x = [float(end[1]) for end in ends]
                series.append(Series(name=name_of(arm), colour=colour, x=x, y=y, dashes=dashes))
        length = settings[group][0].train_length
        ticks = sorted({int(x) for one in series for x in one.x})
        panels.append(
            Panel(
                title=GROUPS[group].title,
                x=lengths_axis("letters up to", ticks),
                y=Axis(label="per cent right", ends=(-2, 104), shown=per_cent),
                series=series,
                lines={length: "training length"},
            )
        )
    return Chart(
        title="Running products by place in the word",
        caption="Each point is the mean over trainings of one arm in a stretch of places that ends there. Broken lines "
        "are arms whose erase gate is in (0, 2).",
        panels=list(panels),
        width=4.0,
        height=3.2,
        in_a_row=3,
    )


def heat(settings: Settings) -> Chart:
    """The share of right products at the last places: a row an arm, a column a group."""
    groups, arms = groups_of(settings), arms_of(all_runs(settings))

    def shares(arm: str, group: str) -> list[float]:
        found = [farthest(run) for run in of_arm(settings[group], arm)]
        return [100 * x.value for x in found if x is not None]

    values = [[float(np.mean(x)) if (x := shares(arm, group)) else None for group in groups] for arm in arms]
    said = [
        [
            f"{name_of(arm)}, {GROUPS[group].title}: {', '.join(f'{x:.1f} %' for x in shares(arm, group)) or 'none'}"
            for group in groups
        ]
        for arm in arms
    ]
    panel = Heat(
        title="",
        columns=[GROUPS[group].title for group in groups],
        rows=[name_of(arm) for arm in arms],
        values=values,
        said=said,
        column_label="group",
        row_label="arm",
        value_label="per cent right, farthest past training",
        most=100.0,
    )
    caption = "The mean over trainings of the per cent of right products at the last places of the words."
    height = 1.2 + 0.28 * len(arms)
    return Chart(title="Which arm follows which group", caption=caption, panels=[panel], width=7.0, height=height)


def capacities(settings: Settings) -> Chart:
    """Pairs held against the numbers in the state: a line an arm, with intervals over trainings. Arms with QED's
    correction have a panel of their own, and GDN-2, which is QED without it, is in both."""
    arms = arms_of([run for run in all_runs(settings) if capacity(run) is not None])
    corrected = [arm for arm in arms if RULES[Arm.parse(arm).rule].strength]
    others = [arm for arm in arms if arm not in corrected]
    parts = {"": arms}
    if corrected and others:
        parts = {"rules with a correction": corrected, "rules without one": others}
        if BASELINE in others:
            parts = {"GDN-2, and rules with a correction": [BASELINE, *corrected], "rules without one": others}
    sizes = {size: f"{size:,.0f}" for size in sorted({_state_size(settings, width) for width in widths_of(settings)})}

    def size_of(place: float) -> str:
        return f"{sizes[min(sizes, key=lambda size: abs(log2(size / place)))]} numbers"

    most = max(LOADS[int(width)][0] for width in widths_of(settings))
    loads = {float(2**i): str(2**i) for i in range(most.bit_length())}
    x = Axis(label="numbers in the state", scale="log2", ticks=sizes, shown=size_of)
    y = Axis(
        label="pairs held at 90 %", scale="log2", ticks=loads, ends=(1, most), shown=lambda held: f"{held:.1f} pairs"
    )
    panels = [
        Panel(
            title=title,
            x=x,
            y=y,
            series=[_capacities_of(settings, arm, i - (len(own) - 1) / 2) for i, arm in enumerate(own)],
        )
        for title, own in parts.items()
    ]
    caption = (
        "Each point is the mean over trainings in log₂, with Student's 95 % interval where there are three or more. "
        "Points of one size stand side by side. The axis ends at the least and at the most pairs that a row can tell; "
        "intervals may not. The correction is the one of strength λ; GDN-2 is QED without it."
    )
    width = 6.0 if len(panels) == 1 else 4.6
    title = "Pairs held against the size of the state"
    return Chart(title=title, caption=caption, panels=list(panels), width=width, height=4.2, in_a_row=2)


def _capacities_of(settings: Settings, arm: str, place: float) -> Series:
    """An arm's line, whose points stand so many places beside their sizes."""
    points = []
    for width in widths_of(settings):
        octaves = [x.octaves for run in of_arm(settings[width], arm) if (x := capacity(run)) is not None]
        if octaves:
            mean, (low, high) = across_seeds(octaves)
            ends = (2**low, 2**high) if len(octaves) > 2 else (2**mean, 2**mean)
            points.append((_state_size(settings, width) * 2 ** (BESIDE * place), 2**mean, *ends))
    sizes, held, low_ends, high_ends = (list(values) for values in zip(*points, strict=True))
    colour, dashes = look(arm)
    return Series(name=name_of(arm), colour=colour, dashes=dashes, x=sizes, y=held, low=low_ends, high=high_ends)


def _state_size(settings: Settings, width: str) -> float:
    return float(state_numbers(settings[width][0]))


def tracking_figures(settings: Settings) -> Charts:
    """The figures of tracking, if there are results."""
    some = {group: [run for run in runs if farthest(run) is not None] for group, runs in settings.items()}
    there: dict[str, list[Run]] = {group: runs for group, runs in some.items() if runs}
    return {"tracking_heat": heat(there), "tracking_places": places(there)} if there else {}


def recall_figures(settings: Settings) -> Charts:
    """The figure of recall, if there are results."""
    there = any(capacity(run) is not None for run in all_runs(settings))
    return {"recall_capacity": capacities(settings)} if there else {}
