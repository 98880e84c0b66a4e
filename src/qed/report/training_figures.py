"""Figures over trainings: every training, means of arms with intervals over trainings, and where needles are lost.

This module needs matplotlib.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from ..analysis.contrasts import contrast, pooled
from ..analysis.names import NEEDLES, TITLES, length_title, name_of
from ..analysis.results import Run
from ..analysis.selection import needle_lengths
from ..analysis.stats import Interval
from ..analysis.trainings import Study, rate
from .drawing import Drawings, length_axis, mark_training_length, median_tokens, style

MAPPED = ("niah_single_1", "niah_single_2")  # tasks whose accuracy is shown by where the needle lies
DEPTHS = 10  # bins of the needle's depth
FEWEST = 5  # prompts per training in a bin that is shown


def all_figures(runs: list[Run]) -> Drawings:
    """Every figure that there are results for."""
    drawings: Drawings = {}
    for task in NEEDLES:
        if needle_lengths(runs, task):
            title = f"{TITLES[task]}: every training, and means of arms with 95 % intervals over trainings"
            drawings[f"trainings_{task}"] = (title, partial(by_length, runs, task))
    if any(Study(runs).groups("L50").values()):
        drawings["trainings_half"] = ("The length at which accuracy crosses one half", lambda: half_lengths(runs))
    mapped = [task for task in MAPPED if _has_depths(runs, task)]
    for task in mapped:
        title = f"{TITLES[task]} accuracy by depth of the needle and length, over all trainings of an arm"
        drawings[f"depth_{task}"] = (title, partial(depth_map, runs, task))
    if mapped:
        title = "Accuracy by distance of the needle from the end of the prompt"
        drawings["distance"] = (title, lambda: distance(runs, mapped))
    if any(last_strengths(run) for run in runs):
        drawings["strength_by_head"] = ("λ of every head at the end of training", lambda: strength_by_head(runs))
    return drawings


def _interval(groups: dict[str, list[float]], arm: str) -> Interval | None:
    """The interval of an arm's mean over trainings; None where they do not tell it."""
    return contrast(groups, {arm: 1.0}).interval() if pooled(groups)[1] else None


def by_length(runs: list[Run], task: str) -> Figure:
    """Accuracy on a needle task by length: thin lines for trainings, thick ones for means of arms."""
    study, lengths = Study(runs), needle_lengths(runs, task)
    figure, panel = plt.subplots(figsize=(7.5, 4.4))
    names = [f"{task}-{n}" for n in lengths]
    groups = {
        name: {
            arm: [x for run in some if name in run.results and (x := rate([run.results[name]])) is not None]
            for arm, some in study.arms.items()
        }
        for name in names
    }
    medians = {name: next(median_tokens(run.results[name]) for run in runs if name in run.results) for name in names}
    for i, (arm, some) in enumerate(study.arms.items()):
        colour = style(runs, arm)["color"]
        for run in some:
            own = [name for name in names if name in run.results]
            shares = [rate([run.results[name]]) for name in own]
            panel.plot([medians[n] for n in own], shares, color=colour, linewidth=0.6, alpha=0.35)
        whole = [name for name in names if groups[name][arm]]
        places = [medians[name] * 2 ** (0.04 * (i - (len(study.arms) - 1) / 2)) for name in whole]
        means = [float(np.mean(groups[name][arm])) for name in whole]
        ends = [_interval(groups[name], arm) or Interval(m, m) for name, m in zip(whole, means, strict=True)]
        bars = [[m - max(0.0, e.low) for m, e in zip(means, ends, strict=True)]]
        bars += [[min(100.0, e.high) - m for m, e in zip(means, ends, strict=True)]]
        label = f"{name_of(arm)} ({len(some)})"
        panel.errorbar(
            places, means, yerr=np.maximum(bars, 0), label=label, capsize=3, markersize=5, **style(runs, arm)
        )
    mark_training_length(panel, runs[0].train_length, 2)
    octaves = [math.log2(tokens) for tokens in medians.values()]
    length_axis(panel, [2**i for i in range(math.floor(min(octaves)), math.ceil(max(octaves)) + 1)])
    panel.set_ylim(-2, 104)
    panel.set_xlabel("prompt (tokens, median)")
    panel.set_ylabel(f"{TITLES[task]}, per cent right")
    panel.legend(fontsize=8, title="arm (trainings)", title_fontsize=8)
    figure.tight_layout()
    return figure


def half_lengths(runs: list[Run]) -> Figure:
    """The length at which accuracy crosses one half: a dot per training, and means of arms."""
    study = Study(runs)
    groups = {arm: values for arm, values in study.groups("L50").items() if values}
    figure, panel = plt.subplots(figsize=(1.6 + 1.2 * len(groups), 4))
    for i, (arm, values) in enumerate(groups.items()):
        spread = np.linspace(-0.18, 0.18, len(values)) if len(values) > 1 else [0.0]
        colour = style(runs, arm)["color"]
        panel.scatter([i + x for x in spread], values, s=18, alpha=0.6, color=colour, linewidths=0)
        interval, mean = _interval(groups, arm), float(np.mean(values))
        bars = None if interval is None else [[mean - interval.low], [interval.high - mean]]
        panel.errorbar([i + 0.3], [mean], yerr=bars, capsize=4, **style(runs, arm))
    every = list(chain(*groups.values()))
    ticks = range(math.floor(min(every)), math.ceil(max(every)) + 1)
    panel.set_yticks(list(ticks), [length_title(2**i) for i in ticks])
    panel.set_xticks(range(len(groups)), [name_of(arm) for arm in groups], fontsize=8)
    panel.set_ylabel(f"tokens at which {TITLES[study.main]} crosses one half")
    panel.grid(axis="y", linewidth=0.4, alpha=0.5)
    figure.tight_layout()
    return figure


def _has_depths(runs: list[Run], task: str) -> bool:
    """Whether results tell where needles lie."""
    names = [f"{task}-{n}" for n in needle_lengths(runs, task)]
    return any(_rows_with_depth([run], name) for run in runs for name in names)


def _rows_with_depth(some: list[Run], name: str) -> list[dict[str, Any]]:
    rows = (row for run in some if name in run.results for row in run.results[name].rows)
    return [row for row in rows if isinstance(row.get("depth"), int | float)]


def depth_map(runs: list[Run], task: str) -> Figure:
    """Accuracy as a colour, by length and depth of the needle, one panel per arm."""
    arms, lengths = Study(runs).arms, needle_lengths(runs, task)
    figure, axes = plt.subplots(
        1, len(arms), figsize=(1.4 + 2.6 * len(arms), 3.6), sharey=True, squeeze=False, layout="constrained"
    )
    edges = np.linspace(0, 100, DEPTHS + 1)
    for panel, (arm, some) in zip(axes[0], arms.items(), strict=True):
        shares = np.full((DEPTHS, len(lengths)), np.nan)
        for i, n in enumerate(lengths):
            rows = _rows_with_depth(some, f"{task}-{n}")
            places = np.minimum((np.array([row["depth"] for row in rows]) / 100 * DEPTHS).astype(int), DEPTHS - 1)
            asked = np.bincount(places, minlength=DEPTHS)
            right = np.bincount(places, weights=[row["correct"] for row in rows], minlength=DEPTHS)
            shares[asked > 0, i] = 100 * right[asked > 0] / asked[asked > 0]
        image = panel.pcolormesh(np.arange(len(lengths) + 1), edges, shares, cmap="viridis", vmin=0, vmax=100)
        panel.set_xticks(np.arange(len(lengths)) + 0.5, [length_title(n) for n in lengths], fontsize=7)
        panel.set_title(f"{name_of(arm)} ({len(some)})", fontsize=9)
        panel.set_xlabel("nominal length", fontsize=8)
    axes[0][0].set_ylabel("depth of the needle, per cent")
    axes[0][0].invert_yaxis()
    figure.colorbar(image, ax=axes[0].tolist(), label=f"{TITLES[task]}, per cent right", shrink=0.9)
    return figure


def _distance(row: dict[str, Any]) -> float:
    """Tokens from the needle to the end of the prompt; older results have only its depth."""
    tokens = row.get("distance")
    return float(tokens if isinstance(tokens, int | float) else row["tokens"] * (1 - row["depth"] / 100))


def distance(runs: list[Run], tasks: list[str]) -> Figure:
    """Accuracy by distance of the needle, with a line for every length.

    Where the lines lie on each other, only the text after the needle counts.
    """
    arms = Study(runs).arms
    size = (1.6 + 2.6 * len(arms), 0.6 + 2.5 * len(tasks))
    figure, axes = plt.subplots(
        len(tasks), len(arms), figsize=size, sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    lengths = sorted({n for task in tasks for n in needle_lengths(runs, task)})
    shades = plt.get_cmap("viridis")(np.linspace(0.05, 0.9, len(lengths)))
    for line, task in zip(axes, tasks, strict=True):
        for panel, (arm, some) in zip(line, arms.items(), strict=True):
            for n, shade in zip(lengths, shades, strict=True):
                bins: dict[int, list[int]] = {}
                for row in _rows_with_depth(some, f"{task}-{n}"):
                    bins.setdefault(int(math.log2(max(1.0, _distance(row)))), []).append(row["correct"])
                shown = {i: x for i, x in sorted(bins.items()) if len(x) >= FEWEST * len(some)}
                shares = [100 * float(np.mean(x)) for x in shown.values()]
                label = length_title(n)
                panel.plot([2 ** (i + 0.5) for i in shown], shares, color=shade, marker=".", linewidth=1.1, label=label)
            length_axis(panel, [2**i for i in range(4, 17, 3)])
            panel.tick_params(axis="x", labelsize=8)
            panel.set_ylim(-2, 104)
            if task == tasks[0]:
                panel.set_title(f"{name_of(arm)} ({len(some)})", fontsize=9)
            if task == tasks[-1]:
                panel.set_xlabel("tokens from needle to end", fontsize=8)
        line[0].set_ylabel(f"{TITLES[task]}, per cent", fontsize=8)
    axes[0][-1].legend(fontsize=6, title="nominal length", title_fontsize=6)
    return figure


def last_strengths(run: Run) -> dict[str, list[float]]:
    """λ of the heads of each layer when the run was last validated; empty where it was not logged."""
    rows = [row["strength_by_head"] for row in run.metrics if row.get("strength_by_head")]
    return {layer: heads for layer, heads in rows[-1].items() if layer.isdigit() and _numbers(heads)} if rows else {}


def _numbers(heads: Any) -> bool:
    return isinstance(heads, list) and bool(heads) and all(isinstance(x, int | float) for x in heads)


def strength_by_head(runs: list[Run]) -> Figure:
    """λ by layer at the end of training, one panel per arm: a dot per head and training, and their mean."""
    by_arm = {arm: [x for run in some if (x := last_strengths(run))] for arm, some in Study(runs).arms.items()}
    arms = {arm: some for arm, some in by_arm.items() if some}
    figure, axes = plt.subplots(
        1, len(arms), figsize=(1.2 + 3.6 * len(arms), 3.4), sharey=True, squeeze=False, layout="constrained"
    )
    for panel, (arm, some) in zip(axes[0], arms.items(), strict=True):
        layers = sorted({int(layer) for x in some for layer in x})
        points = [(layer, value) for x in some for layer in layers for value in x.get(str(layer), [])]
        colour = style(runs, arm)["color"]
        panel.scatter(*zip(*points, strict=True), s=9, alpha=0.4, color=colour, linewidths=0)
        means = [float(np.mean([value for at, value in points if at == layer])) for layer in layers]
        panel.plot(layers, means, color=colour, linewidth=1.5)
        panel.set_title(f"{name_of(arm)} ({len(some)})", fontsize=9)
        panel.set_xlabel("layer")
    axes[0][0].set_ylabel("λ: a dot per head and training, and means")
    return figure
