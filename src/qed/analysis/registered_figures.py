"""Figures over trainings: every training as a thin line or a dot, means of arms with intervals over trainings, and
where in a prompt a needle is lost. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from .contrasts import contrast, pooled
from .figures import style
from .results import Result, Run
from .stats import Interval
from .tables import NEEDLES, TITLES, length_title, name_of, needle_lengths
from .trainings import Study, rate

MAPPED = ("niah_single_1", "niah_single_2")  # whose needles are looked at by where they lie
DEPTHS = 10  # bins
FEWEST = 5  # prompts of a bin that is shown


def all_figures(runs: list[Run]) -> dict[str, tuple[str, Callable[[], Figure]]]:
    """By file name: a title and how to draw it, for what there are results of."""
    found: dict[str, tuple[str, Callable[[], Figure]]] = {}
    for task in NEEDLES:
        if needle_lengths(runs, task):
            title = f"{TITLES[task]}: every training, and means of arms with 95 % intervals over trainings"
            found[f"trainings_{task}"] = (title, partial(by_length, runs, task))
    if any(Study(runs).groups("L50").values()):
        found["trainings_half"] = ("The length at which accuracy crosses one half", lambda: half_lengths(runs))
    for task in MAPPED:
        if _placed(runs, task):
            title = f"{TITLES[task]} by depth of the needle and length, trainings of an arm together"
            found[f"depth_{task}"] = (title, partial(depth_map, runs, task))
    mapped = [task for task in MAPPED if _placed(runs, task)]
    if mapped:
        found["distance"] = ("Accuracy by distance of the needle from the end", lambda: distance(runs, mapped))
    if any(last_strengths(run) for run in runs):
        found["strength_by_head"] = ("λ of every head at the end of training", lambda: strength_by_head(runs))
    return found


def _interval(groups: dict[str, list[float]], arm: str) -> Interval | None:
    """Of an arm's mean over trainings; None where they do not tell it."""
    return contrast(groups, {arm: 1.0}).interval() if pooled(groups)[1] else None


def _length_axis(panel: Any, octaves: list[float]) -> None:
    """Ticks at whole octaves of tokens."""
    ticks = [2**i for i in range(math.floor(min(octaves)), math.ceil(max(octaves)) + 1)]
    panel.set_xscale("log", base=2)
    panel.set_xticks(ticks, [length_title(n) for n in ticks])
    panel.minorticks_off()


def _median(result: Result) -> int:
    return result.tokens[len(result.tokens) // 2]


def by_length(runs: list[Run], task: str) -> Figure:
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
    middles = {name: next(_median(run.results[name]) for run in runs if name in run.results) for name in names}
    for i, (arm, some) in enumerate(study.arms.items()):
        colour = style(runs, arm)["color"]
        for run in some:
            there = [name for name in names if name in run.results]
            shares = [rate([run.results[name]]) for name in there]
            panel.plot([middles[n] for n in there], shares, color=colour, linewidth=0.6, alpha=0.35)
        whole = [name for name in names if groups[name][arm]]
        places = [middles[name] * 2 ** (0.04 * (i - (len(study.arms) - 1) / 2)) for name in whole]
        means = [float(np.mean(groups[name][arm])) for name in whole]
        ends = [_interval(groups[name], arm) or Interval(m, m) for name, m in zip(whole, means, strict=True)]
        bars = [[m - max(0.0, e.low) for m, e in zip(means, ends, strict=True)]]
        bars += [[min(100.0, e.high) - m for m, e in zip(means, ends, strict=True)]]
        label = f"{name_of(arm)} ({len(some)})"
        panel.errorbar(
            places, means, yerr=np.maximum(bars, 0), label=label, capsize=3, markersize=5, **style(runs, arm)
        )
    trained = runs[0].train_length
    panel.axvline(trained, linestyle="--", linewidth=1, color="#888888")
    panel.annotate("training length", (trained, 2), rotation=90, fontsize=7, ha="right", color="#888888")
    _length_axis(panel, [math.log2(x) for x in middles.values()])
    panel.set_ylim(-2, 104)
    panel.set_xlabel("prompt (tokens, median)")
    panel.set_ylabel(f"{TITLES[task]}, per cent right")
    panel.legend(fontsize=8, title="arm (trainings)", title_fontsize=8)
    figure.tight_layout()
    return figure


def half_lengths(runs: list[Run]) -> Figure:
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


def _placed(runs: list[Run], task: str) -> bool:
    """Whether lines tell where needles lie."""
    names = [f"{task}-{n}" for n in needle_lengths(runs, task)]
    return any(_rows([run], name) for run in runs for name in names)


def _rows(some: list[Run], name: str) -> list[dict[str, Any]]:
    rows = (row for run in some if name in run.results for row in run.results[name].rows)
    return [row for row in rows if isinstance(row.get("depth"), int | float)]


def depth_map(runs: list[Run], task: str) -> Figure:
    arms, lengths = Study(runs).arms, needle_lengths(runs, task)
    figure, axes = plt.subplots(
        1, len(arms), figsize=(1.4 + 2.6 * len(arms), 3.6), sharey=True, squeeze=False, layout="constrained"
    )
    edges = np.linspace(0, 100, DEPTHS + 1)
    for panel, (arm, some) in zip(axes[0], arms.items(), strict=True):
        shares = np.full((DEPTHS, len(lengths)), np.nan)
        for i, n in enumerate(lengths):
            rows = _rows(some, f"{task}-{n}")
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
    """Tokens from the needle to the end; older results have its depth alone."""
    found = row.get("distance")
    return float(found if isinstance(found, int | float) else row["tokens"] * (1 - row["depth"] / 100))


def distance(runs: list[Run], tasks: list[str]) -> Figure:
    """A line for every length: where they lie on each other, only the text after the needle counts."""
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
                rows = _rows(some, f"{task}-{n}")
                bins: dict[int, list[int]] = {}
                for row in rows:
                    bins.setdefault(int(math.log2(max(1.0, _distance(row)))), []).append(row["correct"])
                shown = {i: x for i, x in sorted(bins.items()) if len(x) >= FEWEST * len(some)}
                shares = [100 * float(np.mean(x)) for x in shown.values()]
                label = length_title(n)
                panel.plot([2 ** (i + 0.5) for i in shown], shares, color=shade, marker=".", linewidth=1.1, label=label)
            panel.set_xscale("log", base=2)
            ticks = [2**i for i in range(4, 17, 3)]
            panel.set_xticks(ticks, [length_title(n) for n in ticks], fontsize=8)
            panel.minorticks_off()
            panel.set_ylim(-2, 104)
            if task == tasks[0]:
                panel.set_title(f"{name_of(arm)} ({len(some)})", fontsize=9)
            if task == tasks[-1]:
                panel.set_xlabel("tokens from needle to end", fontsize=8)
        line[0].set_ylabel(f"{TITLES[task]}, per cent", fontsize=8)
    axes[0][-1].legend(fontsize=6, title="nominal length", title_fontsize=6)
    return figure


def last_strengths(run: Run) -> dict[str, list[float]]:
    """λ of the heads of each layer when the run was last validated."""
    rows = [row["strength_by_head"] for row in run.metrics if row.get("strength_by_head")]
    return {layer: heads for layer, heads in rows[-1].items() if layer.isdigit() and _numbers(heads)} if rows else {}


def _numbers(found: Any) -> bool:
    return isinstance(found, list) and bool(found) and all(isinstance(x, int | float) for x in found)


def strength_by_head(runs: list[Run]) -> Figure:
    found = {arm: [x for run in some if (x := last_strengths(run))] for arm, some in Study(runs).arms.items()}
    arms = {arm: some for arm, some in found.items() if some}
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
    axes[0][0].set_ylabel("λ: a dot a head and training, and means")
    return figure
