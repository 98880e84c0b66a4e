"""Figures over trainings: every training, means of arms with intervals over trainings, and where needles are lost."""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

import numpy as np

from ..analysis.contrasts import contrast, pooled
from ..analysis.names import NEEDLES, TITLES, length_title, name_of
from ..analysis.results import Run
from ..analysis.selection import needle_lengths
from ..analysis.stats import Interval
from ..analysis.trainings import Study, rate
from .charts import Axis, Chart, Charts, Heat, Panel, Series, lengths_axis, median_tokens, palette, per_cent, tokens

MAPPED = ("niah_single_1", "niah_single_2", "pairs")  # tasks whose accuracy is shown by where the needle lies
DEPTHS = 10  # bins of the needle's depth
FEWEST = 5  # prompts per training in a bin that is shown


def all_figures(runs: list[Run]) -> Charts:
    """Every figure that there are results for."""
    charts: Charts = {f"trainings_{task}": by_length(runs, task) for task in NEEDLES if needle_lengths(runs, task)}
    if any(Study(runs).groups("L50").values()):
        charts["trainings_half"] = half_lengths(runs)
    mapped = [task for task in MAPPED if _has_depths(runs, task)]
    charts |= {f"depth_{task}": depth_map(runs, task) for task in mapped}
    by_distance = distance(runs, mapped)
    if any(isinstance(panel, Panel) and panel.series for panel in by_distance.panels):
        charts["distance"] = by_distance
    if any(last_strengths(run) for run in runs):
        charts["strength_by_head"] = strength_by_head(runs)
    return charts


def _interval(groups: dict[str, list[float]], arm: str) -> Interval | None:
    """The interval of an arm's mean over trainings; None where they do not tell it."""
    return contrast(groups, {arm: 1.0}).interval() if pooled(groups)[1] else None


def by_length(runs: list[Run], task: str) -> Chart:
    """Accuracy on a needle task by length: thin lines for trainings, thick ones for means of arms."""
    study = Study(runs)
    names = [f"{task}-{n}" for n in needle_lengths(runs, task)]
    groups = {
        name: {
            arm: [x for run in some if name in run.results and (x := rate([run.results[name]])) is not None]
            for arm, some in study.arms.items()
        }
        for name in names
    }
    medians = {name: next(median_tokens(run.results[name]) for run in runs if name in run.results) for name in names}
    series = []
    for i, (arm, some) in enumerate(study.arms.items()):
        colour = palette(runs, arm)
        for run in some:
            own = {n: y for n in names if n in run.results and (y := rate([run.results[n]])) is not None}
            title = f"{name_of(arm)}, seed {run.seed}"
            places = [float(medians[n]) for n in own]
            series.append(
                Series(
                    name=title, colour=colour, x=places, y=list(own.values()), faint=True, marked=False, listed=False
                )
            )
        whole = [name for name in names if groups[name][arm]]
        means = [float(np.mean(groups[name][arm])) for name in whole]
        ends = [_interval(groups[name], arm) or Interval(m, m) for name, m in zip(whole, means, strict=True)]
        series.append(
            Series(
                name=f"{name_of(arm)} ({len(some)})",
                colour=colour,
                x=[medians[name] * 2 ** (0.04 * (i - (len(study.arms) - 1) / 2)) for name in whole],
                y=means,
                low=[min(m, max(0.0, e.low)) for m, e in zip(means, ends, strict=True)],
                high=[max(m, min(100.0, e.high)) for m, e in zip(means, ends, strict=True)],
            )
        )
    octaves = [math.log2(x) for x in medians.values()]
    panel = Panel(
        x=lengths_axis(
            "prompt (tokens, median)", [2**i for i in range(math.floor(min(octaves)), math.ceil(max(octaves)) + 1)]
        ),
        y=Axis(label=f"{TITLES[task]}, per cent right", ends=(-2, 104), shown=per_cent),
        series=series,
        lines={runs[0].train_length: "training length"},
    )
    title = f"{TITLES[task]}: every training, and means of arms with 95 % intervals over trainings"
    caption = "Thin lines are trainings. Thick lines are means of arms, with intervals that cover other trainings."
    return Chart(title=title, caption=caption, panels=[panel], width=7.5, height=4.4, key="arm (trainings)")


def half_lengths(runs: list[Run]) -> Chart:
    """The length at which accuracy crosses one half: a dot per training, and means of arms."""
    study = Study(runs)
    groups = {arm: values for arm, values in study.groups("L50").items() if values}
    series = []
    for i, (arm, values) in enumerate(groups.items()):
        spread = np.linspace(-0.18, 0.18, len(values)).tolist() if len(values) > 1 else [0.0]
        interval, mean, colour = _interval(groups, arm), float(np.mean(values)), palette(runs, arm)
        dots, ends = [i + x for x in spread], interval or Interval(mean, mean)
        series += [
            Series(name="a training", colour=colour, x=dots, y=values, line=False, faint=True, listed=False),
            Series(
                name=f"mean of {len(values)}",
                colour=colour,
                x=[i + 0.3],
                y=[mean],
                low=[ends.low],
                high=[ends.high],
                line=False,
                listed=False,
            ),
        ]
    every, names = list(chain(*groups.values())), [name_of(arm) for arm in groups]
    ticks = range(math.floor(min(every)), math.ceil(max(every)) + 1)
    panel = Panel(
        x=Axis(
            label="",
            ticks={float(i): name for i, name in enumerate(names)},
            ends=(-0.5, len(names) - 0.5),
            shown=lambda x: names[round(x)],
        ),
        y=Axis(
            label=f"tokens at which {TITLES[study.main]} crosses one half",
            ticks={float(i): length_title(2**i) for i in ticks},
            shown=lambda octave: tokens(2**octave),
        ),
        series=series,
    )
    title = "The length at which accuracy crosses one half"
    caption = "Pale dots are trainings, and the dots with intervals are means of arms. Higher is better."
    return Chart(title=title, caption=caption, panels=[panel], width=1.6 + 1.2 * len(groups), height=4)


def _has_depths(runs: list[Run], task: str) -> bool:
    """Whether results tell where needles lie."""
    names = [f"{task}-{n}" for n in needle_lengths(runs, task)]
    return any(_rows_with_depth([run], name) for run in runs for name in names)


def _rows_with_depth(some: list[Run], name: str) -> list[dict[str, Any]]:
    rows = (row for run in some if name in run.results for row in run.results[name].rows)
    return [row for row in rows if isinstance(row.get("depth"), int | float)]


def depth_map(runs: list[Run], task: str) -> Chart:
    """Accuracy as a colour, by length and depth of the needle, one panel per arm."""
    lengths, panels = needle_lengths(runs, task), []
    bins = [f"{100 * i // DEPTHS}–{100 * (i + 1) // DEPTHS}" for i in range(DEPTHS)]
    for arm, some in Study(runs).arms.items():
        values: list[list[float | None]] = [[None] * len(lengths) for _ in bins]
        said = [["no prompt has its needle here"] * len(lengths) for _ in bins]
        for i, n in enumerate(lengths):
            rows = _rows_with_depth(some, f"{task}-{n}")
            places = np.minimum((np.array([row["depth"] for row in rows]) / 100 * DEPTHS).astype(int), DEPTHS - 1)
            asked = np.bincount(places, minlength=DEPTHS)
            right = np.bincount(places, weights=[row["correct"] for row in rows], minlength=DEPTHS)
            for j in np.flatnonzero(asked):
                values[j][i] = 100 * right[j] / asked[j]
                where = f"{name_of(arm)}, {length_title(n)}, depth {bins[j]} %"
                said[j][i] = f"{where}: {right[j]:.0f} of {asked[j]} right"
        panels.append(
            Heat(
                title=f"{name_of(arm)} ({len(some)})",
                columns=[length_title(n) for n in lengths],
                rows=bins,
                values=values,
                said=said,
                column_label="nominal length",
                row_label="depth of the needle, per cent",
                value_label=f"{TITLES[task]}, per cent right",
                most=100,
            )
        )
    title = f"{TITLES[task]} accuracy by depth of the needle and length, over all trainings of an arm"
    caption = (
        "Per cent right. At a depth of 0 % the needle is at the beginning of the prompt, and at 100 % at its end. "
    )
    caption += "The number of trainings is in brackets."
    return Chart(title=title, caption=caption, panels=list(panels), width=2.9, height=3.6, in_a_row=len(panels))


def _distance(row: dict[str, Any]) -> float:
    """Tokens from the needle to the end of the prompt; older results have only its depth."""
    count = row.get("distance")
    return float(count if isinstance(count, int | float) else row["tokens"] * (1 - row["depth"] / 100))


def distance(runs: list[Run], tasks: list[str]) -> Chart:
    """Accuracy by distance of the needle, with a line for every length.

    Where the lines lie on each other, only the text after the needle counts.
    """
    arms, panels = Study(runs).arms, []
    lengths = sorted({n for task in tasks for n in needle_lengths(runs, task)})
    for task in tasks:
        for arm, some in arms.items():
            series = []
            for place, n in enumerate(lengths):
                bins: dict[int, list[int]] = {}
                for row in _rows_with_depth(some, f"{task}-{n}"):
                    bins.setdefault(int(math.log2(max(1.0, _distance(row)))), []).append(row["correct"])
                shown = {i: x for i, x in sorted(bins.items()) if len(x) >= FEWEST * len(some)}
                if not shown:
                    continue
                series.append(
                    Series(
                        name=length_title(n),
                        colour=place / max(1, len(lengths) - 1),
                        x=[2 ** (i + 0.5) for i in shown],
                        y=[100 * float(np.mean(x)) for x in shown.values()],
                    )
                )
            panels.append(
                Panel(
                    title=f"{TITLES[task]}: {name_of(arm)} ({len(some)})",
                    x=Axis(
                        label="tokens from needle to end",
                        scale="log2",
                        ticks={2**i: length_title(2**i) for i in range(4, 17, 3)},
                        shown=lambda x: f"around {x:,.0f} tokens from the end",
                    ),
                    y=Axis(label="per cent right", ends=(-2, 104), shown=per_cent),
                    series=series,
                )
            )
    caption = (
        "A line for every nominal length. Where the lines lie on each other, only the text after the needle counts."
    )
    return Chart(
        title="Accuracy by distance of the needle from the end of the prompt",
        caption=caption,
        panels=list(panels),
        width=2.8,
        height=2.6,
        in_a_row=len(arms),
        key="nominal length",
    )


def last_strengths(run: Run) -> dict[str, list[float]]:
    """λ of the heads of each layer when the run was last validated; empty where it was not logged."""
    rows = [row["strength_by_head"] for row in run.metrics if row.get("strength_by_head")]
    return {layer: heads for layer, heads in rows[-1].items() if layer.isdigit() and _numbers(heads)} if rows else {}


def layer_means(run: Run) -> dict[str, list[float]]:
    """The mean λ of each layer at the last step that logged it, each as a list of one; empty where none did."""
    rows = [row["strength"] for row in run.metrics if row.get("strength")]
    return {layer: [mean] for layer, mean in rows[-1].items() if layer.isdigit() and _numbers([mean])} if rows else {}


def _numbers(heads: Any) -> bool:
    return isinstance(heads, list) and bool(heads) and all(isinstance(x, int | float) for x in heads)


def strength_by_head(runs: list[Run]) -> Chart:
    """λ by layer at the end of training, one panel per arm: a dot per head and training, and their mean."""
    panels = []
    for arm, some in Study(runs).arms.items():
        logged = [(run, x) for run in some if (x := last_strengths(run))]
        if not logged:
            continue
        layers, colour = sorted({int(layer) for _, x in logged for layer in x}), palette(runs, arm)
        series = [
            Series(
                name=f"seed {run.seed}, head {head}",
                colour=colour,
                x=[float(layer) for layer in layers if head < len(x.get(str(layer), []))],
                y=[x[str(layer)][head] for layer in layers if head < len(x.get(str(layer), []))],
                line=False,
                faint=True,
                listed=False,
            )
            for run, x in logged
            for head in range(max(map(len, x.values())))
        ]
        means = [float(np.mean([v for _, x in logged for v in x.get(str(layer), [])])) for layer in layers]
        places = [float(layer) for layer in layers]
        series.append(Series(name="mean", colour=colour, x=places, y=means, marked=False, listed=False))
        panels.append(
            Panel(
                title=f"{name_of(arm)} ({len(logged)})",
                x=Axis(
                    label="layer",
                    ticks={float(layer): str(layer) for layer in layers[:: -(-len(layers) // 8)]},
                    shown=lambda layer: f"layer {layer:.0f}",
                ),
                y=Axis(label="λ: a dot per head and training, and means", shown=lambda y: f"λ = {y:.4f}"),
                series=series,
            )
        )
    caption = "A head with λ = 0 erases along its key alone, as GDN-2 does."
    title = "λ of every head at the end of training"
    return Chart(title=title, caption=caption, panels=list(panels), width=3.9, height=3.4)


def strength_maps(runs: list[Run]) -> Chart | None:
    """λ as a colour, by layer and head, one panel per training; None where no training logged it.

    Where only the means of layers were logged, these are shown.
    """
    logged = [(run, x) for run in runs if (x := last_strengths(run) or layer_means(run))]
    most = max((x for _, layers in logged for some in layers.values() for x in some), default=0.0)
    panels: list[Panel | Heat] = []
    for run, by_layer in logged:
        layers = sorted(by_layer, key=int)
        count = max(map(len, by_layer.values()))
        cells = [[*by_layer[layer], *[None] * (count - len(by_layer[layer]))] for layer in layers]
        heads = [f"head {i}" for i in range(count)] if last_strengths(run) else ["mean of its heads"]
        panels.append(
            Heat(
                title=f"{name_of(run.arm)}, seed {run.seed}",
                columns=[name.removeprefix("head ") for name in heads],
                rows=layers,
                values=[list(row) for row in cells],
                said=[
                    [
                        f"layer {layer}, {name}: " + ("no such head" if x is None else f"λ = {x:.5f}")
                        for name, x in zip(heads, row, strict=True)
                    ]
                    for layer, row in zip(layers, cells, strict=True)
                ],
                column_label="head",
                row_label="layer",
                value_label="λ",
                most=most or 1.0,
                digits=3,
            )
        )
    caption = "Heads have no order that two trainings would share, so that each training has a map of its own."
    return Chart(title="λ by layer and head at the end of training", caption=caption, panels=panels) if panels else None
