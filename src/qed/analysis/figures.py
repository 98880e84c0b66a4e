"""The paper's figures from our results, each in a light and a dark version. Needs matplotlib."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from functools import partial
from math import ceil, log2
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from .results import Run
from .stats import clopper_pearson, wilson
from .tables import (
    NEEDLES,
    TITLES,
    arms_of,
    by_arm_and_seed,
    contrasts,
    length_title,
    main_task,
    name_of,
    needle_lengths,
    recall_names,
    recall_title,
    results_of,
    seeds_of,
)

# Told apart by people who see colours differently (Okabe and Ito).
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999"]
MARKERS = "os^Dv<>"
MOST_LABELS = 12  # runs that a legend names one by one
IN_A_ROW = 4  # panels
LIGHT: dict[str, Any] = {"svg.hashsalt": "qed", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
INK = "#e6e6e6"
DARK: dict[str, Any] = LIGHT | {
    **{"figure.facecolor": "#16181c", "axes.facecolor": "#16181c", "savefig.facecolor": "#16181c", "text.color": INK},
    **{
        "axes.edgecolor": INK,
        "axes.labelcolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "legend.facecolor": "#16181c",
    },
}


def style(runs: list[Run], arm: str) -> dict[str, Any]:
    i = arms_of(runs).index(arm)
    return {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}


def line(runs: list[Run], run: Run) -> dict[str, Any]:
    """Of one run among others: its arm's colour, its seed's dashes; of many, only arms are told apart."""
    colour = style(runs, run.arm)["color"]
    if len(runs) > MOST_LABELS:
        first = next(x for x in runs if x.arm == run.arm) is run
        return {"color": colour, "alpha": 0.5, "label": name_of(run.arm) if first else None}
    dashes = ["-", "--", ":", "-."][run.seed % 4]
    return {"color": colour, "linestyle": dashes, "label": f"{name_of(run.arm)}, seed {run.seed}"}


def accuracy(runs: list[Run], task: str) -> Figure:
    """Figure 1: accuracy against the tokens of the prompts, as the training length is in tokens; one panel a seed."""
    seeds, known = seeds_of(runs), by_arm_and_seed(runs)
    lengths = needle_lengths(runs, task)
    medians = {x.path: x.tokens[len(x.tokens) // 2] for n in lengths for x in results_of(runs, f"{task}-{n}")}
    ticks = [2**i for i in range(int(log2(min(medians.values()))), ceil(log2(max(medians.values()))) + 1)]
    wide, high = min(len(seeds), IN_A_ROW), ceil(len(seeds) / IN_A_ROW)
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
        trained = runs[0].train_length
        panel.axvline(trained, linestyle="--", linewidth=1, color="#888888")
        panel.annotate("training length", (trained, 0.02), rotation=90, fontsize=7, ha="right", color="#888888")
        panel.set_xscale("log", base=2)
        panel.set_xticks(ticks, [length_title(n) for n in ticks])
        panel.minorticks_off()
        panel.set_ylim(-0.02, 1.04)
        panel.set_xlabel("prompt (tokens, median)")
        panel.set_title(f"seed {seed}", fontsize=10)
    for left in axes[:, 0]:
        left.set_ylabel(f"{TITLES[task]} accuracy")
    max(axes.flat, key=lambda panel: len(panel.get_legend_handles_labels()[0])).legend(
        fontsize=8
    )  # a seed may lack arms
    figure.tight_layout()
    return figure


def contrast(runs: list[Run]) -> Figure:
    """Figure 2."""
    found, seeds = [x for x in contrasts(runs, main_task(runs)) if x.seeds], seeds_of(runs)
    figure, panel = plt.subplots(figsize=(6, 0.8 + max(0.75, 0.2 * len(seeds)) * len(found)))
    step = min(0.18, 0.8 / len(seeds))
    for row, x in enumerate(found):
        for i, seed in enumerate(seeds):
            if seed in x.seeds:
                difference, (low, high), _ = x.seeds[seed]
                y, bars = row + step * (i - (len(seeds) - 1) / 2), [[difference - low], [high - difference]]
                label, colour = f"seed {seed}" if row == 0 else None, COLOURS[i % len(COLOURS)]
                marker = MARKERS[i % len(MARKERS)]
                panel.errorbar([difference], [y], xerr=bars, fmt=marker, color=colour, capsize=3, label=label)
    panel.axvline(0, color="#888888", linewidth=1)
    panel.set_yticks(
        range(len(found)), [f"{x.name}\n{name_of(x.first)} − {name_of(x.second)}" for x in found], fontsize=8
    )
    panel.set_ylim(len(found) - 0.5, -0.5)
    panel.set_xlabel(f"points of {TITLES[main_task(runs)]} accuracy past the training length")
    if panel.get_legend_handles_labels()[0]:
        panel.legend(fontsize=8)
    figure.tight_layout()
    return figure


def recall(runs: list[Run]) -> Figure:
    """Figure 3."""
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
    figure, panel = plt.subplots(figsize=(6, 3.6))
    for run in runs:
        for name, result in run.results.items():
            if name.startswith("positions-"):
                bins = result.result["bins"]
                middle = [(x["from"] + x["to"]) / 2 for x in bins]
                panel.plot(middle, [x["loss"] for x in bins], marker=".", linewidth=1.2, **line(runs, run))
    panel.axvline(runs[0].train_length, linestyle="--", linewidth=1, color="#888888")
    panel.set_xscale("log", base=2)
    panel.set_xlabel("position (tokens)")
    panel.set_ylabel("loss (nats)")
    panel.legend(fontsize=7)
    figure.tight_layout()
    return figure


def eigenvalues(runs: list[Run]) -> Figure:
    figure, panel = plt.subplots(figsize=(6, 3.4))
    for run in runs:
        if run.eigenvalues is not None:
            histogram = run.eigenvalues["eigenvalue_histogram"]
            counts = [sum(x) for x in zip(*histogram["counts"].values(), strict=True)]
            share = [x / max(1, sum(counts)) for x in counts]
            panel.stairs(share, histogram["edges"], **line(runs, run))
    for edge in (0, 1):
        panel.axvline(edge, color="#888888", linewidth=0.8)
    panel.set_yscale("log")
    panel.set_xlabel("e = 1 − aᵀk")
    panel.set_ylabel("share of tokens and heads")
    panel.legend(fontsize=7)
    figure.tight_layout()
    return figure


def mean_strength(row: dict[str, Any]) -> float | None:
    """Of one step, over layers."""
    found = list((row.get("strength") or {}).values())
    return sum(found) / len(found) if found else None


def over_training(runs: list[Run], value: Callable[[dict[str, Any]], float | None], label: str) -> Figure:
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


def all_figures(runs: list[Run]) -> dict[str, tuple[str, Callable[[], Figure]]]:
    """By file name: a title and how to draw it, for what there are results of."""
    found: dict[str, tuple[str, Callable[[], Figure]]] = {}
    for task in NEEDLES:
        if needle_lengths(runs, task):
            title = f"{TITLES[task]} accuracy against context length"
            found[f"figure1_{task}"] = (title, partial(accuracy, runs, task))
    if any(x.seeds for x in contrasts(runs, main_task(runs))):
        found["figure2_contrasts"] = ("Four contrasts, 95 % intervals", lambda: contrast(runs))
    if recall_names(runs):
        found["figure3_recall"] = ("Recall, 95 % intervals", lambda: recall(runs))
    if any(name.startswith("positions-") for run in runs for name in run.results):
        found["loss_by_position"] = ("Loss by position", lambda: positions(runs))
    if any(run.eigenvalues is not None for run in runs):
        found["eigenvalues"] = ("Eigenvalues over held-out text", lambda: eigenvalues(runs))
    rows = [row for run in runs for row in run.metrics]
    if any(row.get("strength") for row in rows):
        found["strength_over_training"] = ("λ over training", lambda: over_training(runs, mean_strength, "mean λ"))
    if any("retrieval" in row for row in rows):
        label = "answers found"
        draw = partial(over_training, runs, lambda row: row.get("retrieval"), label)
        found["retrieval_over_training"] = ("Retrieval at the training length, over training", draw)
    return found


def drawn(draw: Callable[[], Figure], kinds: Iterable[str], dark: bool = False) -> dict[str, bytes]:
    """A figure as files of these kinds, drawn once."""
    found = {}
    with mpl.rc_context(DARK if dark else LIGHT):
        figure = draw()
        for kind in kinds:
            file = io.BytesIO()
            metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
            figure.savefig(file, format=kind, dpi=150, metadata=metadata)
            found[kind] = file.getvalue()
        plt.close(figure)
    return found
