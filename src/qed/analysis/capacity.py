"""How many pairs a state holds: the load at which 90 % of all questions are still answered, against the state's size.

Answers are counted in bins of the pairs told so far, up to 4, 8, 16 and so on. The load is read off between the middles
of the two bins where accuracy crosses 90 % for the first time, linearly in log₂ of the pairs; at the ends of the range
where it does not cross. A line through log₂ capacity against log₂ of the state's
numbers, over trainings, says how capacity grows: a slope of 1 is a constant number of floats a pair.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import t as student

from ..model.config import QEDConfig
from ..recipes.generated import LOADS
from .contrasts import Estimate, contrast
from .names import name_of
from .registered import LEVEL, verdict
from .results import Run
from .settings import Settings
from .stats import Interval, holm

HELD = 0.9  # share of questions that must be answered
SEEDS = 3  # of every arm, with every width: the registered tests are taken once, when these are there
ENDPOINT = "L50"  # the registered endpoint that is in octaves too, whose margin of equivalence holds here


class Capacity(NamedTuple):
    """Pairs that are held, in octaves (log₂), and where the range of loads cut it off: −1 below, 1 above, 0 nowhere."""

    octaves: float
    cut: int

    @property
    def shown(self) -> str:
        """The number of pairs in words."""
        return {-1: "under ", 0: "", 1: "at least "}[self.cut] + f"{2**self.octaves:.1f}"


def capacity(run: Run) -> Capacity | None:
    """The capacity of a training; None without a result."""
    for name, result in run.results.items():
        if name.startswith("recall_load"):
            loads = [
                (math.log2((x["from"] + 1 + x["to"]) / 2), x["right"] / x["asked"]) for x in result.result["loads"]
            ]
            return crossing(loads)
    return None


def crossing(loads: Sequence[tuple[float, float]]) -> Capacity:
    """Where the shares of right answers, given with log₂ of the pairs, first fall below 90 %."""
    before: tuple[float, float] | None = None
    for octaves, share in loads:
        if share < HELD:
            if before is None:
                return Capacity(octaves, -1)
            return Capacity(before[0] + (octaves - before[0]) * (before[1] - HELD) / (before[1] - share), 0)
        before = octaves, share
    return Capacity(loads[-1][0], 1)


def state_numbers(run: Run) -> int:
    """The numbers in a model's recurrent state: of all layers and heads."""
    config = QEDConfig(**run.config["model"])
    return config.num_hidden_layers * config.num_heads * config.head_dim * config.value_head_dim


class Line(NamedTuple):
    """A line through log₂ capacity against log₂ of the state's numbers: its slope, and the interval of that."""

    slope: float
    interval: Interval
    trainings: int


def line(runs: Sequence[Run]) -> Line | None:
    """The least-squares line over these trainings; None where fewer than two sizes of state are among them."""
    points = [(math.log2(state_numbers(run)), x.octaves) for run in runs if (x := capacity(run)) is not None]
    sizes, held = (np.array(x) for x in zip(*points, strict=True)) if points else (np.zeros(0), np.zeros(0))
    if len(set(sizes.tolist())) < 2:
        return None
    spread = float(((sizes - sizes.mean()) ** 2).sum())
    slope = float(((sizes - sizes.mean()) * held).sum()) / spread
    residuals = held - held.mean() - slope * (sizes - sizes.mean())
    freedom = len(points) - 2
    if freedom < 1:
        return Line(slope, Interval(-math.inf, math.inf), len(points))
    error = math.sqrt(float((residuals**2).sum()) / freedom / spread)
    half = float(student.ppf(0.975, freedom)) * error
    return Line(slope, Interval(slope - half, slope + half), len(points))


def by_arm(settings: Settings) -> dict[str, dict[int, float]]:
    """For each arm, the mean of log₂ capacity over all widths by seed, of the seeds that have every width."""
    found: dict[str, dict[int, list[float]]] = {}
    for runs in settings.values():
        for run in runs:
            if (x := capacity(run)) is not None:
                found.setdefault(run.arm, {}).setdefault(run.seed, []).append(x.octaves)
    return {
        arm: {seed: float(np.mean(x)) for seed, x in seeds.items() if len(x) == len(settings)}
        for arm, seeds in found.items()
    }


class Answer(NamedTuple):
    """A test of the registered family, over trainings."""

    name: str
    estimate: Estimate
    p_holm: float
    verdict: str


TESTS: Mapping[str, tuple[str, str]] = {
    "QED − GDN-2": ("qed", "gdn2"),
    "QED − QED-rand": ("qed", "qed-rand"),
    "QED with λ_max 0.5 − QED": ("qed@0.5", "qed"),
    "QED with λ_max 1 − QED": ("qed@1", "qed"),
}
TESTED = tuple(dict.fromkeys(arm for pair in TESTS.values() for arm in pair))


def missing(settings: Settings) -> list[str]:
    """What the registered tests wait for, in words: seeds of their arms that have been trained at every width."""
    widths = list(map(str, LOADS))
    complete = by_arm({width: settings.get(width, []) for width in widths})
    found = {arm: len(complete.get(arm, {})) for arm in TESTED}
    names = f"{', '.join(widths[:-1])} and {widths[-1]}"
    return [
        f"{arm}: {count} of {SEEDS} seeds are trained at all of {names} channels"
        for arm, count in found.items()
        if count < SEEDS
    ]


def not_learned(settings: Settings) -> list[str]:
    """The widths that no training of an arm of the tests has learned, in words: even of the questions after the fewest
    pairs, every training answers less than 90 %. They stay in the means."""
    found = []
    for width in sorted(settings, key=int):
        for arm in TESTED:
            held = [x for run in settings[width] if run.arm == arm and (x := capacity(run)) is not None]
            if held and all(x.cut == -1 for x in held):
                found.append(f"{name_of(arm)} with {width} channels")
    return found


def answers(settings: Settings) -> list[Answer]:
    """The registered tests for which there are trainings of both arms: differences of mean log₂ capacity, in octaves,
    with the variance pooled over all arms of the family and Holm's correction."""
    means = by_arm(settings)
    groups = {arm: list(means.get(arm, {}).values()) for arm in TESTED}
    asked = {name: pair for name, pair in TESTS.items() if all(groups[arm] for arm in pair)}
    estimates = [contrast(groups, {first: 1.0, second: -1.0}) for first, second in asked.values()]
    adjusted = holm([x.p for x in estimates])
    return [
        Answer(name, x, p, verdict(x, p, LEVEL, ENDPOINT))
        for name, x, p in zip(asked, estimates, adjusted, strict=True)
    ]
