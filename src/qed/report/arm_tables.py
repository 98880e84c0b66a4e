"""Tables with a row for every arm: what it follows (tracking), what it holds (recall), and both beside a mini run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from ..analysis.capacity import HELD, answers, by_arm, capacity, line, not_learned, state_numbers
from ..analysis.names import name_of
from ..analysis.results import Run
from ..analysis.selection import arms_of, past_training
from ..analysis.settings import Settings
from ..analysis.stats import Interval, across_seeds
from ..analysis.tracking import SOLVED, farthest, forbidden, reach
from ..analysis.trainings import rate
from ..data.groups import GROUPS
from .markup import Table

FORBIDDEN = "theory"  # what a cell says where theory forbids an arm to follow a group


def all_runs(settings: Settings) -> list[Run]:
    """The runs of all settings."""
    return [run for runs in settings.values() for run in runs]


def groups_of(settings: Settings) -> list[str]:
    """The groups that were trained on, in the order of their table."""
    return [group for group in GROUPS if group in settings]


def widths_of(settings: Settings) -> list[str]:
    """The widths that were trained, the narrowest first."""
    return sorted(settings, key=int)


def of_arm(runs: Sequence[Run], arm: str) -> list[Run]:
    """The runs of one arm, by seed."""
    return sorted((run for run in runs if run.arm == arm), key=lambda run: run.seed)


def followed(runs: Sequence[Run]) -> str | None:
    """The mean share of right products in the last bin of places, and in how many trainings it is 90 % or more."""
    shares = [x.value for run in runs if (x := farthest(run)) is not None]
    if not shares:
        return None
    return f"{100 * float(np.mean(shares)):.1f} ({sum(x >= SOLVED for x in shares)}/{len(shares)})"


def _each_arm(
    settings: Settings, chosen: Sequence[str], cell: Callable[[list[Run], str], str | None]
) -> list[list[str | None]]:
    """One row an arm, one column for each of the chosen settings."""
    return [[name_of(arm), *(cell(of_arm(settings[x], arm), x) for x in chosen)] for arm in arms_of(all_runs(settings))]


def tracking_table(settings: Settings) -> Table:
    """One row an arm, one column a group: how much is right farthest past training."""
    groups = groups_of(settings)
    rows = _each_arm(settings, groups, lambda runs, group: followed(runs))
    return Table(
        name="tracking",
        title="Running products followed (%), by arm and group, at the last places of the words",
        columns=["arm", *(GROUPS[group].title for group in groups)],
        rows=rows,
        absent="not trained",
        note=_places(settings) + " In brackets is in how many trainings 90 % or more are right there. Chance is one in "
        "the number of elements: 2, 3, 5, 6, 24, 60 and 120 for Z2, Z3, Z5, S3, S4, A5 and S5.",
    )


def _places(settings: Settings) -> str:
    runs = [run for run in all_runs(settings) if farthest(run) is not None]
    if not runs:
        return "There is no result."
    bins = [x for name, y in runs[0].results.items() if name.startswith("tracking_") for x in y.result["bins"]]
    return (
        f"Trained on words of {runs[0].train_length} letters; counted are letters {bins[-1]['from'] + 1} to "
        f"{bins[-1]['to']}, the mean over trainings."
    )


def reach_table(settings: Settings) -> Table:
    """Up to which letter each training follows each group, seed by seed, and what theory says."""
    groups = groups_of(settings)

    def reached(runs: list[Run], group: str) -> str | None:
        letters = [str(reach(run)) for run in runs if farthest(run) is not None]
        mark = f" ({FORBIDDEN}: no)" if letters and forbidden(runs[0].arm, group) else ""
        return ", ".join(letters) + mark or None

    return Table(
        name="tracking_reach",
        title="The letter up to which 90 % are right, in every training",
        columns=["arm", *(GROUPS[group].title for group in groups)],
        rows=_each_arm(settings, groups, reached),
        absent="not trained",
        note='"theory: no" stands where theory says that one layer of the rule cannot follow the group in words of any '
        "length, because its transitions have no negative eigenvalue or real ones alone. It does not say how far a "
        "training gets.",
    )


def capacity_table(settings: Settings) -> Table:
    """One row an arm: pairs held at each width, the mean over trainings with its interval, and how it grows."""
    widths = widths_of(settings)

    def held(runs: list[Run], width: str) -> str | None:
        found = [x for run in runs if (x := capacity(run)) is not None]
        return _held([x.octaves for x in found], {x.cut for x in found}) if found else None

    rows = _each_arm(settings, widths, held)
    for row, arm in zip(rows, arms_of(all_runs(settings)), strict=True):
        fitted = line(of_arm(all_runs(settings), arm))
        row.append(None if fitted is None else f"{fitted.slope:.2f} {_brackets(fitted.interval, 2)}")
    sizes = {width: state_numbers(settings[width][0]) for width in widths}
    return Table(
        name="recall_capacity",
        title=f"Pairs held: the load up to which {HELD:.0%} of all questions are answered",
        columns=["arm", *(f"{width} channels, {sizes[width]:,} numbers" for width in widths), "growth"],
        rows=rows,
        absent="not trained",
        note="In brackets are Student's 95 % intervals over trainings, taken in log₂. ≥ and < say that in some "
        "training the capacity lies beyond the loads that were asked. Growth is the slope of log₂ pairs against log₂ "
        "of the numbers in the state: with 1, twice the state holds twice the pairs. What is said of single widths, "
        "and growth, is exploratory.",
    )


def held_table(settings: Settings) -> Table:
    """One row an arm: pairs held in every training, by seed."""

    def held(runs: list[Run], _: str) -> str | None:
        found = [capacity(run) for run in sorted(runs, key=lambda run: run.seed)]
        return ", ".join("missing" if x is None else x.shown for x in found) or None

    widths = widths_of(settings)
    return Table(
        name="recall_trainings",
        title="Pairs held in every training, in the order of seeds",
        columns=["arm", *(f"{width} channels" for width in widths)],
        rows=_each_arm(settings, widths, held),
        absent="not trained",
        note=f'"Under" stands before a training that answers less than {HELD:.0%} of the questions already after the '
        'fewest pairs, whatever it does later, and "at least" before one that still answers as many after the most '
        "pairs. In means they count with the number that is given.",
    )


def _held(octaves: list[float], cuts: set[int]) -> str:
    mean, interval = across_seeds(octaves)
    mark = ("≥ " if 1 in cuts else "") + ("< " if -1 in cuts else "")
    if not math.isfinite(interval.low):
        return f"{mark}{2**mean:.1f}"
    return f"{mark}{2**mean:.1f} [{2**interval.low:.1f}, {2**interval.high:.1f}]"


def _brackets(interval: Interval, digits: int) -> str:
    if not math.isfinite(interval.low):
        return ""
    return f"[{interval.low:.{digits}f}, {interval.high:.{digits}f}]"


def loads_table(settings: Settings) -> Table:
    """The per cent of questions answered at each number of pairs, the mean over trainings."""
    shares: dict[tuple[str, str], dict[tuple[int, int], list[float]]] = {}
    for width in widths_of(settings):
        for run in sorted(settings[width], key=lambda run: arms_of(settings[width]).index(run.arm)):
            own = shares.setdefault((width, run.arm), {})
            for x in [x for n, y in run.results.items() if n.startswith("recall_load") for x in y.result["loads"]]:
                own.setdefault((x["from"] + 1, x["to"]), []).append(100 * x["right"] / x["asked"])
    loads = sorted({n for own in shares.values() for n in own})
    rows: list[list[str | None]] = [
        [width, name_of(arm), *(f"{float(np.mean(own[n])):.1f}" if n in own else None for n in loads)]
        for (width, arm), own in shares.items()
    ]
    return Table(
        name="recall_loads",
        title="Questions answered (%) by the number of pairs told before, mean over trainings",
        columns=["channels", "arm", *(f"{a}–{b} pairs" for a, b in loads)],
        rows=rows,
        absent="not asked",
    )


def capacity_tests(settings: Settings, registered: bool) -> Table:
    """The tests of the plan's addition: differences in mean log₂ capacity between arms, over trainings."""
    trained, unlearned = {arm: len(seeds) for arm, seeds in by_arm(settings).items()}, ", ".join(not_learned(settings))
    rows: list[list[str | None]] = [
        [
            x.name,
            x.verdict,
            f"{x.estimate.value:+.2f} {_brackets(x.estimate.interval(), 2)}".strip(),
            f"{x.estimate.p:.2g}",
            f"{x.p_holm:.2g}",
        ]
        for x in answers(settings)
    ]
    return Table(
        name="recall_tests",
        title=f"{'Registered' if registered else 'Exploratory'}: differences in capacity over trainings",
        columns=["difference", "answer", "octaves [95 %]", "p", "p (Holm)"],
        rows=rows,
        answers=1,
        note="A training's capacity is the mean of log₂ pairs over all widths. Variances are pooled over the arms of "
        f"the family; trainings: {', '.join(f'{n} of {name_of(arm)}' for arm, n in trained.items()) or 'none'}."
        + (f" Not learned by any training, and in the means all the same: {unlearned}." if unlearned else ""),
    )


def one_table(tracking: Settings, recall: Settings, mini: list[Run]) -> Table:
    """One row an arm, with everything that was measured of it at any of the scales.

    Args:
        tracking: runs by group.
        recall: runs by width.
        mini: runs of the scale mini.
    """
    groups, widths = groups_of(tracking), widths_of(recall)
    everyone = [*all_runs(tracking), *all_runs(recall), *mini]
    rows: list[list[str | None]] = []
    for arm in arms_of(everyone):
        row: list[str | None] = [name_of(arm)]
        row += [followed(of_arm(tracking[group], arm)) for group in groups]
        for width in widths:
            found = [x for run in of_arm(recall[width], arm) if (x := capacity(run)) is not None]
            row.append(_held([x.octaves for x in found], {x.cut for x in found}) if found else None)
        row += [_past(of_arm(mini, arm))] if mini else []
        rows.append(row)
    columns = ["arm", *(f"follows {GROUPS[group].title}" for group in groups)]
    columns += [f"pairs held by {width} channels" for width in widths]
    columns += ["Pairs past training (mini)"] if mini else []
    return Table(
        name="arms",
        title="Every arm, at every scale",
        columns=columns,
        rows=rows,
        absent="not measured",
        note="Groups: per cent of products right at the last places, and in how many trainings 90 % or more are. "
        f"Pairs: the load up to which {HELD:.0%} of all questions are answered, with the interval over trainings.",
    )


def _past(runs: list[Run]) -> str | None:
    """The per cent of pairs found past the training length by mini models, the mean over trainings."""
    rates = [rate([run.results[f"pairs-{n}"] for n in past_training([run], "pairs")]) for run in runs]
    known = [x for x in rates if x is not None]
    return f"{float(np.mean(known)):.1f}" if known else None
