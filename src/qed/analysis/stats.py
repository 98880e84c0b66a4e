"""Statistics of proportions, single and paired. Needs scipy (`pip install 'qed-attention[analysis]'`).

Arms are compared on the same frozen examples, so their differences are paired: with b examples right for the first arm
alone and c for the second alone, the other examples say nothing about the difference. Only `across_seeds` covers
another training run, as far as a few seeds can; every other interval is about these trained models alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from scipy.optimize import brentq
from scipy.stats import binomtest, norm
from scipy.stats import t as student


class Interval(NamedTuple):
    """The two ends of a confidence interval."""

    low: float
    high: float


def clopper_pearson(k: int, n: int, level: float = 0.95) -> Interval:
    """The exact interval for a proportion: it covers the truth with a probability of at least `level`, whatever it is.

    Args:
        k: how many of the examples are right.
        n: the number of examples.
        level: the least coverage, between 0 and 1.
    """
    return _of_proportion(k, n, level, "exact")


def wilson(k: int, n: int, level: float = 0.95) -> Interval:
    """Wilson's score interval for a proportion: shorter than the exact one. Figures use it.

    Args:
        k: how many of the examples are right.
        n: the number of examples.
        level: the coverage that it has on average, between 0 and 1.
    """
    return _of_proportion(k, n, level, "wilson")


def mcnemar(b: int, c: int) -> float:
    """McNemar's exact two-sided p-value: that of b heads and c tails among b + c throws of a fair coin."""
    return 1.0 if b + c == 0 else float(binomtest(b, b + c).pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values after Holm's correction for their number, in the order in which they were given."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def paired_difference(b: int, c: int, n: int, level: float = 0.95) -> tuple[float, Interval]:
    """The difference of two proportions on the same examples, (b − c)/n, and Tango's score interval for it.

    Args:
        b: examples that the first alone has right.
        c: examples that the second alone has right.
        n: the number of examples.
        level: the coverage of the interval, between 0 and 1.
    """
    if min(b, c) < 0 or b + c > n or n < 1:
        raise ValueError(f"b, c, n: expected discordant pairs of n, got {b}, {c} of {n}")
    z = float(norm.ppf((1 + level) / 2))

    def score(d: float) -> float:
        """How many standard errors lie between the observed difference and d."""
        B, C = -b - c + (2 * n - b + c) * d, -c * d * (1 - d)
        share = (-B + math.sqrt(max(B * B - 8 * n * C, 0.0))) / (4 * n)
        return (b - c - n * d) / math.sqrt(max(n * (2 * share + d * (1 - d)), 1e-300))

    difference, edge = (b - c) / n, 1 - 1e-12
    low = -1.0 if score(-edge) < z else brentq(lambda d: score(d) - z, -edge, difference)
    high = 1.0 if score(edge) > -z else brentq(lambda d: score(d) + z, difference, edge)
    return difference, Interval(low, high)


def across_seeds(differences: Sequence[float], level: float = 0.95) -> tuple[float, Interval]:
    """The mean of one difference per seed and Student's interval for it, which is unbounded with a single seed."""
    n = len(differences)
    if n == 0:
        raise ValueError("differences: expected one per seed, got none")
    mean = sum(differences) / n
    if n == 1:
        return mean, Interval(-math.inf, math.inf)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in differences) / (n - 1))
    half = float(student.ppf((1 + level) / 2, n - 1)) * deviation / math.sqrt(n)
    return mean, Interval(mean - half, mean + half)


@cache  # a report asks for the same proportions many times
def _of_proportion(k: int, n: int, level: float, method: str) -> Interval:
    if not 0 <= k <= n or n < 1:
        raise ValueError(f"k, n: expected 0 ≤ k ≤ n and n ≥ 1, got {k} of {n}")
    ends = binomtest(k, n).proportion_ci(level, method)
    return Interval(float(ends.low), float(ends.high))
