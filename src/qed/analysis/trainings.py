"""Endpoints of one training: retrieval past the training length, the length at which it falls to one half, the loss.

    R1, R2, RM    per cent right on S-NIAH-1, S-NIAH-2 and multi-key-1, all cells past the training length together
    L50           where accuracy on S-NIAH-1 crosses one half, in octaves: log2 of prompt tokens
    loss          validation loss in nats

A cell is a task at a nominal length. It is past the training length if even its shortest prompt has more tokens than a
row of training. Every endpoint but the loss can also be computed with λ scaled at inference, and from first answers
instead of RULER's scoring, which credits later guesses too.
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
from .contrasts import Estimate
from .results import Result, Run
from .selection import arms_of, distinct, main_task, needle_lengths
from .stats import Interval


class Endpoint(NamedTuple):
    """What is measured of a training, and how its values are written."""

    task: str  # "main" is S-NIAH-1, or for the smallest models the task that they have instead
    unit: str
    margin: float  # two arms that differ by less are equivalent
    digits: int  # after the decimal point

    def shown(self, value: float, sign: bool = True) -> str:
        """A value with the endpoint's digits."""
        return f"{value:{'+' if sign else ''}.{self.digits}f}"

    def shown_interval(self, interval: Interval) -> str:
        """Both ends of an interval in brackets."""
        return f"[{self.shown(interval.low)}, {self.shown(interval.high)}]"

    def shown_estimate(self, estimate: Estimate) -> str:
        """A value with its 95 % interval over trainings, or without one where they do not tell it."""
        interval = estimate.interval()
        finite = math.isfinite(interval.low) and math.isfinite(interval.high)
        return f"{self.shown(estimate.value)} {self.shown_interval(interval) if finite else '[no interval]'}"


ENDPOINTS = {
    "R1": Endpoint("main", "points", 3.0, 1),
    "R2": Endpoint("niah_single_2", "points", 3.0, 1),
    "RM": Endpoint("niah_multikey_1", "points", 3.0, 1),
    "L50": Endpoint("main", "octaves", 0.25, 2),
    "loss": Endpoint("", "nats", 0.01, 4),
}


def rate(results: Iterable[Result], first: bool = False) -> float | None:
    """Per cent right of all examples together, each counted once; None where there are no examples.

    Args:
        results: of one task; those of two lengths may be of the same examples.
        first: count first answers alone, and return None where predictions were not kept.
    """
    once = [result for (result,) in distinct((result,) for result in results)]
    answers = [result.first_right if first else result.right for result in once]
    known = [right for right in answers if right is not None]
    if not known or len(known) < len(answers):
        return None
    return 100 * sum(sum(right.values()) for right in known) / sum(map(len, known))


def half(points: Sequence[tuple[float, float]]) -> float:
    """Where a share crosses one half for the last time, in whatever direction, on straight lines between (x, share).

    A share that stays at or above one half gives the last x, one that stays below it the first.
    """
    if not points:
        raise ValueError("points: expected one or more, got none")
    for (a, above), (b, below) in reversed(list(pairwise(points))):
        if (above >= 0.5) != (below >= 0.5):
            return a + (b - a) * (above - 0.5) / (above - below)
    return points[-1][0] if points[-1][1] >= 0.5 else points[0][0]


def half_length(results: Iterable[Result], first: bool = False) -> float | None:
    """The length at which accuracy crosses one half, in octaves of the cells' median tokens."""
    points = []
    for result in results:
        right = result.first_right if first else result.right
        if right is None:
            return None
        points.append((math.log2(result.tokens[len(result.tokens) // 2]), sum(right.values()) / len(right)))
    return half(sorted(points)) if points else None


@dataclass(frozen=True)
class Study:
    """Trainings that are compared with each other, and their endpoints."""

    runs: list[Run]
    _known: dict[tuple[str, str, bool], float | None] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def main(self) -> str:
        """The needle task that these trainings are judged by."""
        return main_task(self.runs)

    def has_first_answers(self, endpoint: str) -> bool:
        """Whether what is asked for is such that the first answer can be told."""
        task = of_kind(NeedleTask).get(self.task(endpoint))
        return task is not None and task.first_correct is not None

    def task(self, endpoint: str) -> str:
        """The task that an endpoint is computed from."""
        task = ENDPOINTS[endpoint].task
        return self.main if task == "main" else task

    @cached_property
    def arms(self) -> dict[str, list[Run]]:
        """The trainings of each arm."""
        return {arm: [run for run in self.runs if run.arm == arm] for arm in arms_of(self.runs)}

    def cells(self, endpoint: str, run: Run) -> dict[str, Result]:
        """The results of a run that an endpoint is computed from, by name."""
        task = self.task(endpoint)
        of_task = {name: run.results[name] for name in (f"{task}-{n}" for n in needle_lengths([run], task))}
        return {name: x for name, x in of_task.items() if endpoint == "L50" or run.is_past_training(x)}

    def value(self, endpoint: str, run: Run, first: bool = False) -> float | None:
        """An endpoint of one training; None where it has no results for it.

        Args:
            endpoint: a key of ENDPOINTS.
            run: the training.
            first: count first answers alone.
        """
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
        """The values of all trainings that have one, by arm."""
        values = {arm: [self.value(endpoint, run, first) for run in runs] for arm, runs in self.arms.items()}
        return {arm: [x for x in some if x is not None] for arm, some in values.items()}

    def scaled_cells(self, endpoint: str, scale: float = 0.0, arm: str = "qed") -> list[str]:
        """Names of the cells that all of an arm's trainings with λ scaled have, on the same prompts as with s = 1.

        Args:
            endpoint: a key of ENDPOINTS.
            scale: the factor s of λ at inference.
            arm: whose trainings.
        """
        names: list[set[str]] = []
        for run in self.arms.get(arm, []):
            on, off, usual = run.strengths.get(1.0, {}), run.strengths.get(scale, {}), self.cells(endpoint, run)
            both = {n: usual[n] for n in usual if n in on and n in off}
            there = {n for n, x in both.items() if _asked(x) == _asked(on[n]) == _asked(off[n])}
            names += [there] if there else []
        shared = set.intersection(*names) if names else set()
        return sorted(shared, key=lambda name: int(name.rsplit("-", 1)[1]))

    def scaled_value(self, endpoint: str, run: Run, scale: float = 0.0) -> float | None:
        """An endpoint of one training with λ scaled; None unless all cells that it is computed from were evaluated.

        Args:
            endpoint: a key of ENDPOINTS.
            run: the training.
            scale: the factor s of λ at inference.
        """
        alone, results = Study([run]), run.strengths.get(scale, {})
        names = alone.scaled_cells(endpoint, scale, run.arm)
        if not names or set(names) != self.cells(endpoint, run).keys():
            return None
        return (half_length if endpoint == "L50" else rate)(results[name] for name in names)

    def switched(
        self, endpoint: str, first: bool = False, scale: float = 0.0, arm: str = "qed"
    ) -> list[tuple[float, float]]:
        """Per cent right of each of an arm's trainings, as trained (s = 1) and with λ scaled, on `scaled_cells`.

        Args:
            endpoint: a key of ENDPOINTS.
            first: count first answers alone.
            scale: the factor s of λ at inference.
            arm: whose trainings.
        """
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
        """The same study without some of its trainings."""
        gone = {run.path for run in left_out}
        return Study([run for run in self.runs if run.path not in gone])


def _asked(result: Result) -> object:
    return result.about.get("prompts")


def at_training_length(run: Run, task: str) -> float | None:
    """Per cent right at the nominal length that is the training length, or the longest below it."""
    lengths = [n for n in needle_lengths([run], task) if n <= run.train_length]
    return rate([run.results[f"{task}-{lengths[-1]}"]]) if lengths else None
