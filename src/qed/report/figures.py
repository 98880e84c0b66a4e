"""The paper's figures from our results, seed by seed. This module needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import ceil, log2
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from ..analysis.breakdown import contrasts
from ..analysis.names import NEEDLES, TITLES, name_of, recall_title
from ..analysis.results import Run
from ..analysis.selection import arms_of, by_arm_and_seed, main_task, needle_lengths, recall_names, results_of, seeds_of
from ..analysis.stats import clopper_pearson, wilson
from .drawing import COLOURS, GREY, MARKERS, Drawings, length_axis, line, mark_training_length, median_tokens, style

PANELS_IN_A_ROW = 4


def accuracy(runs: list[Run], task: str) -> Figure:
    """Figure 1: accuracy on a needle task against the tokens of the prompts, one panel per seed."""
    seeds, known = seeds_of(runs), by_arm_and_seed(runs)
    lengths = needle_lengths(runs, task)
    medians = {x.path: median_tokens(x) for n in lengths for x in results_of(runs, f"{task}-{n}")}
    ticks = [2**i for i in range(int(log2(min(medians.values()))), ceil(log2(max(medians.values()))) + 1)]
    wide, high = min(len(seeds), PANELS_IN_A_ROW), ceil(len(seeds) / PANELS_IN_A_ROW)
    figure, axes = plt.subplots(high, wide, figsize=(1.5 + 4.2 * wide, 3.8 * high), sharey=True, squeeze=False)
    for panel in axes.flat[len(seeds) :]:
        panel.set_axis_off()
    for panel, seed in zip(axes.flat, seeds, strict=False):
        for arm in arms_of(runs):
            results = known[arm, seed].results if (arm, seed) in known else {}
            points = [results[f"{task}-{n}"] for n in lengths if f"{task}-{n}" in results]
            if not points:
                continue
            x = [medians[r.path] for r in points]
            share = [r.result["correct"] / r.result["samples"] for r in points]
            ends = [wilson(r.result["correct"], r.result["samples"]) for r in points]
            bars = [
                [y - e.low for y, e in zip(share, ends, strict=True)],
                [e.high - y for y, e in zip(share, ends, strict=True)],
            ]
            panel.errorbar(
                x, share, yerr=bars, label=name_of(arm), capsize=2, markersize=4, linewidth=1.3, **style(runs, arm)
            )
        mark_training_length(panel, runs[0].train_length, 0.02)
        length_axis(panel, ticks)
        panel.set_ylim(-0.02, 1.04)
        panel.set_xlabel("prompt (tokens, median)")
        panel.set_title(f"seed {seed}", fontsize=10)
    for left in axes[:, 0]:
        left.set_ylabel(f"{TITLES[task]} accuracy")
    most_arms = max(axes.flat, key=lambda panel: len(panel.get_legend_handles_labels()[0]))  # a seed may lack arms
    most_arms.legend(fontsize=8)
    figure.tight_layout()
    return figure


def contrast(runs: list[Run]) -> Figure:
    """Figure 2: the paper's contrasts with their intervals, at every seed."""
    known, seeds = [x for x in contrasts(runs, main_task(runs)) if x.seeds], seeds_of(runs)
    figure, panel = plt.subplots(figsize=(6, 0.8 + max(0.75, 0.2 * len(seeds)) * len(known)))
    step = min(0.18, 0.8 / len(seeds))
    for row, x in enumerate(known):
        for i, seed in enumerate(seeds):
            if seed in x.seeds:
                difference, (low, high), _ = x.seeds[seed]
                y, bars = row + step * (i - (len(seeds) - 1) / 2), [[difference - low], [high - difference]]
                label, colour = f"seed {seed}" if row == 0 else None, COLOURS[i % len(COLOURS)]
                marker = MARKERS[i % len(MARKERS)]
                panel.errorbar([difference], [y], xerr=bars, fmt=marker, color=colour, capsize=3, label=label)
    panel.axvline(0, color=GREY, linewidth=1)
    labels = [f"{x.name}\n{name_of(x.first)} − {name_of(x.second)}" for x in known]
    panel.set_yticks(range(len(known)), labels, fontsize=8)
    panel.set_ylim(len(known) - 0.5, -0.5)
    panel.set_xlabel(f"points of {TITLES[main_task(runs)]} accuracy past the training length")
    if panel.get_legend_handles_labels()[0]:
        panel.legend(fontsize=8)
    figure.tight_layout()
    return figure


def recall(runs: list[Run]) -> Figure:
    """Figure 3: accuracy on the recall tasks with exact intervals."""
    names, known = recall_names(runs), by_arm_and_seed(runs)
    figure, panel = plt.subplots(figsize=(1.8 + 2.4 * len(names), 3.4))
    arms, seeds = arms_of(runs), seeds_of(runs)
    for i, arm in enumerate(arms):
        first = True
        for j, seed in enumerate(seeds):
            results = known[arm, seed].results if (arm, seed) in known else {}
            for place, name in enumerate(names):
                if name not in results:
                    continue
                r = results[name].result
                low, high = clopper_pearson(r["correct"], r["samples"])
                x = place + 0.8 * ((i + min(0.35, 0.8 / len(seeds)) * j) / max(1, len(arms)) - 0.5)
                bars = [[r["accuracy"] - low], [high - r["accuracy"]]]
                label = name_of(arm) if first else None
                panel.errorbar(
                    [x],
                    [r["accuracy"]],
                    yerr=bars,
                    capsize=2,
                    linestyle="",
                    markersize=4,
                    label=label,
                    **style(runs, arm),
                )
                first = False
    panel.set_xticks(range(len(names)), [recall_title(name, results_of(runs, name)) for name in names], fontsize=8)
    panel.set_ylabel("accuracy")
    panel.legend(fontsize=8)
    figure.tight_layout()
    return figure


def positions(runs: list[Run]) -> Figure:
    """The loss of every run by position in the row."""
    figure, panel = plt.subplots(figsize=(6, 3.6))
    for run in runs:
        for name, result in run.results.items():
            if name.startswith("positions-"):
                bins = result.result["bins"]
                middle = [(x["from"] + x["to"]) / 2 for x in bins]
                panel.plot(middle, [x["loss"] for x in bins], marker=".", linewidth=1.2, **line(runs, run))
    panel.axvline(runs[0].train_length, linestyle="--", linewidth=1, color=GREY)
    panel.set_xscale("log", base=2)
    panel.set_xlabel("position (tokens)")
    panel.set_ylabel("loss (nats)")
    panel.legend(fontsize=7)
    figure.tight_layout()
    return figure


def eigenvalues(runs: list[Run]) -> Figure:
    """How often each eigenvalue occurs, over all tokens, heads and layers of a run."""
    figure, panel = plt.subplots(figsize=(6, 3.4))
    for run in runs:
        if run.eigenvalues is not None:
            histogram = run.eigenvalues["eigenvalue_histogram"]
            counts = [sum(x) for x in zip(*histogram["counts"].values(), strict=True)]
            share = [x / max(1, sum(counts)) for x in counts]
            panel.stairs(share, histogram["edges"], **line(runs, run))
    for edge in (0, 1):
        panel.axvline(edge, color=GREY, linewidth=0.8)
    panel.set_yscale("log")
    panel.set_xlabel("e = 1 − aᵀk")
    panel.set_ylabel("share of tokens and heads")
    panel.legend(fontsize=7)
    figure.tight_layout()
    return figure


def mean_strength(row: dict[str, Any]) -> float | None:
    """The mean λ over layers in one row of metrics; None where λ was not logged."""
    strengths = list((row.get("strength") or {}).values())
    return sum(strengths) / len(strengths) if strengths else None


def over_training(runs: list[Run], value: Callable[[dict[str, Any]], float | None], label: str) -> Figure:
    """A value from the metrics against the tokens trained on.

    Args:
        runs: one line each.
        value: takes it from a row of metrics, or gives None where the row has none.
        label: of the vertical axis.
    """
    figure, panel = plt.subplots(figsize=(6, 3.2))
    for run in runs:
        points = [(row["tokens"], y) for row in run.metrics if (y := value(row)) is not None]
        if points:
            panel.plot([x for x, _ in points], [y for _, y in points], linewidth=1.2, **line(runs, run))
    panel.set_xlabel("training tokens")
    panel.set_ylabel(label)
    panel.legend(fontsize=7)
    figure.tight_layout()
    return figure


def all_figures(runs: list[Run]) -> Drawings:
    """Every figure that there are results for."""
    drawings: Drawings = {}
    for task in NEEDLES:
        if needle_lengths(runs, task):
            title = f"{TITLES[task]} accuracy against context length"
            drawings[f"figure1_{task}"] = (title, partial(accuracy, runs, task))
    if any(x.seeds for x in contrasts(runs, main_task(runs))):
        drawings["figure2_contrasts"] = ("The paper's contrasts, with 95 % intervals", lambda: contrast(runs))
    if recall_names(runs):
        drawings["figure3_recall"] = ("Accuracy on recall tasks, with 95 % intervals", lambda: recall(runs))
    if any(name.startswith("positions-") for run in runs for name in run.results):
        drawings["loss_by_position"] = ("Loss by position in the row", lambda: positions(runs))
    if any(run.eigenvalues is not None for run in runs):
        drawings["eigenvalues"] = ("Eigenvalues over held-out text", lambda: eigenvalues(runs))
    rows = [row for run in runs for row in run.metrics]
    if any(row.get("strength") for row in rows):
        draw = partial(over_training, runs, mean_strength, "mean λ")
        drawings["strength_over_training"] = ("Mean λ over the course of training", draw)
    if any("retrieval" in row for row in rows):
        draw = partial(over_training, runs, lambda row: row.get("retrieval"), "answers found")
        drawings["retrieval_over_training"] = ("Retrieval at the training length over the course of training", draw)
    return drawings
