"""The paper's figures from our results, seed by seed."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, log2
from typing import Any

from ..analysis.breakdown import contrasts
from ..analysis.names import NEEDLES, TITLES, name_of, recall_title
from ..analysis.results import Result, Run
from ..analysis.selection import arms_of, by_arm_and_seed, main_task, needle_lengths, recall_names, results_of, seeds_of
from ..analysis.stats import Interval, clopper_pearson, wilson
from .charts import Axis, Chart, Charts, Panel, Series, lengths_axis, line_of, median_tokens, palette, per_cent, tokens

POINTS = "Each point is one training with its 95 % interval over examples, which does not cover other trainings."


def share_of(result: Result, interval: Callable[[int, int], Interval]) -> tuple[float, float, float]:
    """Per cent right of a result, and the ends of its interval."""
    right, asked = result.result["correct"], result.result["samples"]
    low, high = interval(right, asked)
    return 100 * right / asked, 100 * low, 100 * high


def accuracy(runs: list[Run], task: str) -> Chart:
    """Figure 1: accuracy on a needle task against the tokens of the prompts, one panel per seed."""
    known, lengths = by_arm_and_seed(runs), needle_lengths(runs, task)
    medians = [median_tokens(x) for n in lengths for x in results_of(runs, f"{task}-{n}")]
    ticks = [2**i for i in range(int(log2(min(medians))), ceil(log2(max(medians))) + 1)]
    panels = []
    for seed in seeds_of(runs):
        series = []
        for arm in arms_of(runs):
            results = known[arm, seed].results if (arm, seed) in known else {}
            points = [results[f"{task}-{n}"] for n in lengths if f"{task}-{n}" in results]
            if points:
                y, low, high = (list(x) for x in zip(*(share_of(r, wilson) for r in points), strict=True))
                x = [float(median_tokens(r)) for r in points]
                series.append(Series(name=name_of(arm), colour=palette(runs, arm), x=x, y=y, low=low, high=high))
        panels.append(
            Panel(
                title=f"seed {seed}",
                x=lengths_axis("prompt (tokens, median)", ticks),
                y=Axis(label=f"{TITLES[task]}, per cent right", ends=(-2, 104), shown=per_cent),
                series=series,
                lines={runs[0].train_length: "training length"},
            )
        )
    caption = f"{POINTS} Right of the dashed line prompts are longer than any text of the training."
    title = f"{TITLES[task]} accuracy against context length"
    return Chart(title=title, caption=caption, panels=list(panels), width=4.2, height=3.8)


def contrast(runs: list[Run]) -> Chart:
    """Figure 2: the paper's contrasts with their intervals, at every seed."""
    known, seeds = [x for x in contrasts(runs, main_task(runs)) if x.seeds], seeds_of(runs)
    step, series = min(0.18, 0.8 / len(seeds)), []
    for i, seed in enumerate(seeds):
        rows = [(row, x.seeds[seed]) for row, x in enumerate(known) if seed in x.seeds]
        series.append(
            Series(
                name=f"seed {seed}",
                colour=i,
                x=[difference for _, (difference, _, _) in rows],
                y=[row + step * (i - (len(seeds) - 1) / 2) for row, _ in rows],
                low=[interval.low for _, (_, interval, _) in rows],
                high=[interval.high for _, (_, interval, _) in rows],
                across=True,
                line=False,
            )
        )
    labels = {float(i): f"{x.name}\n{name_of(x.first)} − {name_of(x.second)}" for i, x in enumerate(known)}
    names = {i: text.replace("\n", ": ") for i, text in labels.items()}
    panel = Panel(
        x=Axis(
            label=f"points of {TITLES[main_task(runs)]} accuracy past the training length",
            shown=lambda x: f"{x:+.1f} points",
        ),
        y=Axis(
            label="", ticks=labels, ends=(-0.5, len(known) - 0.5), flipped=True, shown=lambda y: names[float(round(y))]
        ),
        series=[x for x in series if x.x],
        lines={0: ""},
    )
    caption = (
        "Each point is the difference between two arms of one seed on the same examples, with Tango's paired 95 % "
    )
    caption += "interval. Right of zero the first arm is better."
    height = 0.8 + max(0.75, 0.2 * len(seeds)) * len(known)
    return Chart(title="The paper's contrasts, with 95 % intervals", caption=caption, panels=[panel], height=height)


def recall(runs: list[Run]) -> Chart:
    """Figure 3: accuracy on the recall tasks with exact intervals."""
    names, known, arms, seeds = recall_names(runs), by_arm_and_seed(runs), arms_of(runs), seeds_of(runs)
    titles = [recall_title(name, results_of(runs, name)) for name in names]
    series = []
    for i, arm in enumerate(arms):
        points = []
        for j, seed in enumerate(seeds):
            results = known[arm, seed].results if (arm, seed) in known else {}
            move = 0.8 * ((i + min(0.35, 0.8 / len(seeds)) * j) / max(1, len(arms)) - 0.5)
            points += [
                (place + move, *share_of(results[n], clopper_pearson)) for place, n in enumerate(names) if n in results
            ]
        if points:
            x, y, low, high = (list(values) for values in zip(*points, strict=True))
            series.append(Series(name=name_of(arm), colour=i, x=x, y=y, low=low, high=high, line=False))
    panel = Panel(
        x=Axis(
            label="",
            ticks={float(i): title for i, title in enumerate(titles)},
            ends=(-0.5, len(names) - 0.5),
            shown=lambda x: titles[min(max(round(x + 0.1), 0), len(titles) - 1)],
        ),
        y=Axis(label="per cent right", shown=per_cent),
        series=series,
    )
    title = "Accuracy on recall tasks, with 95 % intervals"
    return Chart(title=title, caption=POINTS, panels=[panel], width=1.8 + 2.4 * len(names))


def positions(runs: list[Run]) -> Chart:
    """The loss of every run by position in the row."""
    series = []
    for run in runs:
        for name, result in run.results.items():
            if name.startswith("positions-") and result.about.get("max_length") is None:
                bins = result.result["bins"]
                middle = [(x["from"] + x["to"]) / 2 for x in bins]
                series.append(line_of(runs, run, middle, [x["loss"] for x in bins]))
    panel = Panel(
        x=Axis(label="position (tokens)", scale="log2", shown=lambda x: f"around token {x:,.0f}"),
        y=Axis(label="loss (nats)", shown=lambda y: f"{y:.4f} nats"),
        series=series,
        lines={runs[0].train_length: "training length"},
    )
    caption = "Lower is better. A model that uses what lies further back has a loss that goes on falling."
    return Chart(title="Loss by position in the row", caption=caption, panels=[panel], height=3.6)


def eigenvalues(runs: list[Run]) -> Chart:
    """How often each eigenvalue occurs, over all tokens, heads and layers of a run."""
    series = []
    for run in runs:
        if run.eigenvalues is not None:
            histogram = run.eigenvalues["eigenvalue_histogram"]
            counts = [sum(x) for x in zip(*histogram["counts"].values(), strict=True)]
            share = [x / max(1, sum(counts)) for x in counts]
            series.append(line_of(runs, run, list(histogram["edges"]), share, steps=True, marked=False))
    panel = Panel(
        x=Axis(label="e = 1 − aᵀk", shown=lambda x: f"e = {x:.3f}"),
        y=Axis(label="share of tokens and heads", scale="log10", shown=lambda y: f"{100 * y:.2g} % of them"),
        series=series,
        lines={0: "", 1: ""},
    )
    caption = "An eigenvalue of 1 leaves what was stored along the key as it is, one of 0 erases it, and one below 0 "
    caption += "or above 1 turns it round or makes it grow."
    return Chart(title="Eigenvalues over held-out text", caption=caption, panels=[panel])


def mean_strength(row: dict[str, Any]) -> float | None:
    """The mean λ over layers in one row of metrics; None where λ was not logged."""
    strengths = list((row.get("strength") or {}).values())
    return sum(strengths) / len(strengths) if strengths else None


def over_training(runs: list[Run], value: Callable[[dict[str, Any]], float | None], label: str, title: str) -> Chart:
    """A value from the metrics against the tokens trained on.

    Args:
        runs: one line each.
        value: takes it from a row of metrics, or gives None where the row has none.
        label: of the vertical axis.
        title: of the figure.
    """
    series = []
    for run in runs:
        points = [(float(row["tokens"]), y) for row in run.metrics if (y := value(row)) is not None]
        if points:
            series.append(line_of(runs, run, [x for x, _ in points], [y for _, y in points], marked=False))
    panel = Panel(
        x=Axis(label="training tokens", shown=tokens), y=Axis(label=label, shown=lambda y: f"{y:.3f}"), series=series
    )
    return Chart(title=title, caption="Each line is one training.", panels=[panel], height=3.2)


def all_figures(runs: list[Run]) -> Charts:
    """Every figure that there are results for."""
    charts: Charts = {f"figure1_{task}": accuracy(runs, task) for task in NEEDLES if needle_lengths(runs, task)}
    if any(x.seeds for x in contrasts(runs, main_task(runs))):
        charts["figure2_contrasts"] = contrast(runs)
    if recall_names(runs):
        charts["figure3_recall"] = recall(runs)
    if any(name.startswith("positions-") for run in runs for name in run.results):
        charts["loss_by_position"] = positions(runs)
    if any(run.eigenvalues is not None for run in runs):
        charts["eigenvalues"] = eigenvalues(runs)
    rows = [row for run in runs for row in run.metrics]
    if any(row.get("strength") for row in rows):
        title = "Mean λ over the course of training"
        charts["strength_over_training"] = over_training(runs, mean_strength, "mean λ", title)
    if any("retrieval" in row for row in rows):
        title = "Retrieval at the training length over the course of training"
        draw = over_training(runs, lambda row: row.get("retrieval"), "share of answers found", title)
        charts["retrieval_over_training"] = draw
    return charts
