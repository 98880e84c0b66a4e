"""Differences between arms over trainings, where a training is the unit: estimates, tests, and detectable effects.

A contrast is a weighted sum of arms' means. Its variance comes from the variances within arms, pooled over all of them:
with few trainings per arm, most of what is known about how much trainings differ comes from the other arms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
from scipy.optimize import brentq
from scipy.stats import chi2, norm
from scipy.stats import t as student

from .stats import Interval

DRAWS = 100_000  # random arrangements of a permutation test, where there are more than these in all


class Estimate(NamedTuple):
    """A value, its standard error, and the degrees of freedom of that error: 0 where trainings do not tell it."""

    value: float
    error: float
    freedom: float

    def interval(self, level: float = 0.95) -> Interval:
        """Student's interval, unbounded where the standard error is not known."""
        if self.freedom <= 0:
            return Interval(-math.inf, math.inf)
        half = float(student.ppf((1 + level) / 2, self.freedom)) * self.error
        return Interval(self.value - half, self.value + half)

    @property
    def p(self) -> float:
        """The two-sided p-value of the hypothesis that the true value is 0."""
        if self.freedom <= 0 or self.value == 0:
            return 1.0
        return 0.0 if self.error == 0 else 2 * float(student.sf(abs(self.value) / self.error, self.freedom))

    def within(self, margin: float) -> bool:
        """Whether the 90 % interval lies within ±margin: two one-sided tests at .05."""
        low, high = self.interval(0.9)
        return -margin < low and high < margin


def pooled(groups: Mapping[str, Sequence[float]]) -> tuple[float, int]:
    """The standard deviation within arms and its degrees of freedom; nan and 0 if every arm has one training."""
    freedom = sum(len(x) - 1 for x in groups.values() if x)
    squares = sum(float(np.var(x)) * len(x) for x in groups.values() if len(x) > 1)
    return (math.sqrt(squares / freedom) if freedom else math.nan), freedom


def contrast(groups: Mapping[str, Sequence[float]], weights: Mapping[str, float]) -> Estimate:
    """The weighted sum of means. Its variance is pooled over all groups, also over those without a weight."""
    value, scale = _weighted(groups, weights)
    deviation, freedom = pooled(groups)
    return Estimate(value, deviation * math.sqrt(scale) if freedom else math.inf, freedom)


def welch(groups: Mapping[str, Sequence[float]], weights: Mapping[str, float]) -> Estimate:
    """The same sum with each arm's own variance and Satterthwaite's degrees of freedom."""
    value, _ = _weighted(groups, weights)
    used = {arm: weight for arm, weight in weights.items() if weight}
    if any(len(groups[arm]) < 2 for arm in used):
        return Estimate(value, math.inf, 0)
    variances = {arm: w * w * float(np.var(groups[arm], ddof=1)) / len(groups[arm]) for arm, w in used.items()}
    variance = sum(variances.values())
    below = sum(x * x / (len(groups[arm]) - 1) for arm, x in variances.items())
    freedom = variance * variance / below if below else float(min(len(groups[arm]) - 1 for arm in used))
    return Estimate(value, math.sqrt(variance), freedom)


def mean_of(differences: Sequence[float]) -> Estimate:
    """The mean of differences within trainings, one per training, with Student's t over them."""
    if not differences:
        raise ValueError("differences: expected one per training, got none")
    return contrast({"": differences}, {"": 1.0})


def _weighted(groups: Mapping[str, Sequence[float]], weights: Mapping[str, float]) -> tuple[float, float]:
    """The value of a contrast, and its variance if trainings had a variance of 1."""
    empty = [arm for arm, weight in weights.items() if weight and not groups.get(arm)]
    if empty:
        raise ValueError(f"groups: expected trainings of every arm of the contrast, got none of {empty[0]}")
    used = {arm: weight for arm, weight in weights.items() if weight}
    value = sum(w * float(np.mean(groups[arm])) for arm, w in used.items())
    return value, sum(w * w / len(groups[arm]) for arm, w in used.items())


class Permutation(NamedTuple):
    """The p-value of a permutation test, and whether all arrangements were looked at."""

    p: float
    exact: bool


def permutation(groups: Mapping[str, Sequence[float]], weights: Mapping[str, float]) -> Permutation:
    """How often the contrast is at least as far from 0 when the labels of these arms' trainings are dealt out anew.

    All arrangements are looked at, or 100,000 random ones and the observed one where there are more.
    """
    sizes = [len(groups[arm]) for arm in weights]
    values = np.concatenate([np.asarray(groups[arm], float) for arm in weights])
    shares = np.repeat([w / n if n else 0.0 for w, n in zip(weights.values(), sizes, strict=True)], sizes)
    least = abs(float(shares @ values)) - 1e-9
    count = math.factorial(len(values))
    for size in sizes:
        count //= math.factorial(size)
    if count <= DRAWS:
        orders = np.array([np.concatenate(x) for x in _arrangements(sizes, tuple(range(len(values))))], dtype=int)
        return Permutation(float((np.abs(values[orders] @ shares) >= least).mean()), True)
    drawn = np.random.default_rng(0).permuted(np.tile(values, (DRAWS, 1)), axis=1)
    return Permutation((1 + int((np.abs(drawn @ shares) >= least).sum())) / (1 + DRAWS), False)


def _arrangements(sizes: Sequence[int], left: tuple[int, ...]) -> Iterator[list[tuple[int, ...]]]:
    """Every way to deal out the indices `left` into groups of these sizes."""
    if len(sizes) == 1:
        yield [left]
        return
    for chosen in combinations(left, sizes[0]):
        rest = tuple(x for x in left if x not in chosen)
        for others in _arrangements(sizes[1:], rest):
            yield [chosen, *others]


def sign_flips(differences: Sequence[float]) -> Permutation:
    """The permutation test for differences within trainings: the two labels may be exchanged in each training."""
    values, n = np.asarray(differences, float), len(differences)
    least = abs(float(values.sum())) - 1e-9
    if 2**n <= DRAWS:
        signs = 1 - 2 * ((np.arange(2**n)[:, None] >> np.arange(n)) & 1)
        return Permutation(float((np.abs(signs @ values) >= least).mean()), True)
    signs = 1 - 2 * np.random.default_rng(0).integers(0, 2, (DRAWS, n))
    return Permutation((1 + int((np.abs(signs @ values) >= least).sum())) / (1 + DRAWS), False)


def power(effect: float, error: float, freedom: float, level: float) -> float:
    """The probability that a two-sided test finds an effect.

    Args:
        effect: the true value.
        error: the true standard error of its estimate.
        freedom: degrees of freedom from which the test estimates that error.
        level: the significance level of the test.
    """
    limit = float(student.ppf(1 - level / 2, freedom))
    shares = np.sqrt(chi2.ppf((np.arange(4000) + 0.5) / 4000, freedom) / freedom)  # estimated error ÷ true one
    shift = effect / error
    return float((norm.sf(limit * shares - shift) + norm.cdf(-limit * shares - shift)).mean())


def detectable(error: float, freedom: float, level: float, wanted: float = 0.8) -> float:
    """The smallest effect that a two-sided test finds with the wanted probability.

    Args:
        error: the standard error of the estimate.
        freedom: degrees of freedom from which the test estimates that error.
        level: the significance level of the test.
        wanted: the probability of finding the effect.
    """
    if not (math.isfinite(error) and error >= 0 and freedom > 0):
        return math.inf
    if error == 0:
        return 0.0
    most = 1.0
    while power(most, 1.0, freedom, level) < wanted:
        most *= 2
    return error * float(brentq(lambda x: power(x, 1.0, freedom, level) - wanted, 0.0, most))
