"""Endpoints of one training: retrieval past the training length, the length at which it falls to one half, the loss.

    R1, R2, RM    per cent right on S-NIAH-1, S-NIAH-2 and multi-key-1, all cells past the training length together
    L50           where accuracy on S-NIAH-1 crosses one half, in octaves: log2 of prompt tokens
    loss          validation loss, nats

A cell is a task at a nominal length. It is past the training length if even its shortest prompt has more tokens than a
row of training. All but the loss can be had with λ scaled at inference, and from first answers instead of RULER's
scoring, which credits later guesses too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from ..eval.task import NeedleTask
from ..eval.tasks import of_kind
from .results import Result, Run
from .tables import arms_of, distinct, main_task, needle_lengths


class Endpoint(NamedTuple):
    task: str  # "main": the runs' own, which is S-NIAH-1 but for the smallest
    unit: str
    margin: float  # two arms that differ by less are equivalent
    digits: int

    def shown(self, value: float, sign: bool = True) -> str:
        return f"{value:{'+' if sign else ''}.{self.digits}f}"


ENDPOINTS = {
    "R1": Endpoint("main", "points", 3.0, 1),
    "R2": Endpoint("niah_single_2", "points", 3.0, 1),
    "RM": Endpoint("niah_multikey_1", "points", 3.0, 1),
    "L50": Endpoint("main", "octaves", 0.25, 2),
    "loss": Endpoint("", "nats", 0.01, 4),
}


def rate(results: Iterable[Result], first: bool = False) -> float | None:
    """Per cent right of all examples together, each once; None where there are none, or no first answers."""
    once = [x for (x,) in distinct((x,) for x in results)]
    found = [x.first_right if first else x.right for x in once]
    whole = [x for x in found if x is not None]
    if not whole or len(whole) < len(found):
        return None
    return 100 * sum(sum(x.values()) for x in whole) / sum(map(len, whole))


def half(points: Sequence[tuple[float, float]]) -> float:
    """Where a share crosses one half for the last time, in whatever direction, on straight lines between (x, share);
    the first or the last x where it lies on one side throughout."""
    if not points:
        raise ValueError("points: expected one or more, got none")
    for (a, above), (b, below) in reversed(list(pairwise(points))):
        if (above >= 0.5) != (below >= 0.5):
            return a + (b - a) * (above - 0.5) / (above - below)
    return points[-1][0] if points[-1][1] >= 0.5 else points[0][0]


def half_length(results: Iterable[Result], first: bool = False) -> float | None:
    """In octaves of the cells' median tokens."""
    points = []
    for result in results:
        found = result.first_right if first else result.right
        if found is None:
            return None
        points.append((math.log2(result.tokens[len(result.tokens) // 2]), sum(found.values()) / len(found)))
    return half(sorted(points)) if points else None


@dataclass(frozen=True)
class Study:
    """Trainings that are compared with each other."""

    runs: list[Run]
    _known: dict[tuple[str, str, bool], float | None] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def main(self) -> str:
        return main_task(self.runs)

    def has_first_answers(self, endpoint: str) -> bool:
        """Whether what is asked for is such that the first answer can be told."""
        task = of_kind(NeedleTask).get(self.task(endpoint))
        return task is not None and task.first_correct is not None

    def task(self, endpoint: str) -> str:
        task = ENDPOINTS[endpoint].task
        return self.main if task == "main" else task

    @cached_property
    def arms(self) -> dict[str, list[Run]]:
        return {arm: [run for run in self.runs if run.arm == arm] for arm in arms_of(self.runs)}

    def cells(self, endpoint: str, run: Run) -> dict[str, Result]:
        """Of a run, what an endpoint is made of, by name."""
        task = self.task(endpoint)
        found = {name: run.results[name] for name in (f"{task}-{n}" for n in needle_lengths([run], task))}
        return {name: x for name, x in found.items() if endpoint == "L50" or run.is_past_training(x)}

    def value(self, endpoint: str, run: Run, first: bool = False) -> float | None:
        key = (endpoint, str(run.path), first)
        if key not in self._known:
            if endpoint == "loss":
                self._known[key] = run.validation_loss
            elif first and not self.has_first_answers(endpoint):
                self._known[key] = None
            else:
                cells = self.cells(endpoint, run).values()
                self._known[key] = half_length(cells, first) if endpoint == "L50" else rate(cells, first)
        return self._known[key]

    def groups(self, endpoint: str, first: bool = False) -> dict[str, list[float]]:
        """Values of all trainings that have one, by arm."""
        found = {arm: [self.value(endpoint, run, first) for run in runs] for arm, runs in self.arms.items()}
        return {arm: [x for x in values if x is not None] for arm, values in found.items()}

    def scaled_cells(self, endpoint: str, scale: float = 0.0, arm: str = "qed") -> list[str]:
        """Cells of a task that all of an arm's trainings with λ scaled have, on the same prompts as with s = 1."""
        names: list[set[str]] = []
        for run in self.arms.get(arm, []):
            on, off, usual = run.strengths.get(1.0, {}), run.strengths.get(scale, {}), self.cells(endpoint, run)
            both = {n: usual[n] for n in usual if n in on and n in off}
            there = {n for n, x in both.items() if _asked(x) == _asked(on[n]) == _asked(off[n])}
            names += [there] if there else []
        shared = set.intersection(*names) if names else set()
        return sorted(shared, key=lambda name: int(name.rsplit("-", 1)[1]))

    def scaled_value(self, endpoint: str, run: Run, scale: float = 0.0) -> float | None:
        """An endpoint of one training with λ scaled; None unless all cells that it is made of were asked."""
        alone, results = Study([run]), run.strengths.get(scale, {})
        names = alone.scaled_cells(endpoint, scale, run.arm)
        if not names or set(names) != self.cells(endpoint, run).keys():
            return None
        return (half_length if endpoint == "L50" else rate)(results[name] for name in names)

    def switched(
        self, endpoint: str, first: bool = False, scale: float = 0.0, arm: str = "qed"
    ) -> list[tuple[float, float]]:
        """Per cent right of each of an arm's trainings, as it was trained (s = 1) and with λ scaled, on those cells."""
        names, pairs = self.scaled_cells(endpoint, scale, arm), []
        if first and not self.has_first_answers(endpoint):
            return []
        for run in self.arms.get(arm, []):
            on, off = run.strengths.get(1.0, {}), run.strengths.get(scale, {})
            if names and all(n in on and n in off for n in names):
                both = rate((on[n] for n in names), first), rate((off[n] for n in names), first)
                pairs += [(both[0], both[1])] if both[0] is not None and both[1] is not None else []
        return pairs

    def without(self, left_out: Iterable[Run]) -> Study:
        gone = {run.path for run in left_out}
        return Study([run for run in self.runs if run.path not in gone])


def _asked(result: Result) -> object:
    return result.about.get("prompts")


def at_training_length(run: Run, task: str) -> float | None:
    """Per cent right at the nominal length that is the training length, or the longest below it."""
    lengths = [n for n in needle_lengths([run], task) if n <= run.train_length]
    return rate([run.results[f"{task}-{lengths[-1]}"]]) if lengths else None
