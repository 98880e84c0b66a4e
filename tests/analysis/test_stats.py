"""The published values, and what the numbers promise: coverage and invariance."""

import itertools
import math

import pytest
from scipy.stats import beta, binom, norm

from qed.analysis.stats import across_seeds, clopper_pearson, holm, mcnemar, paired_difference, wilson


@pytest.mark.parametrize(
    ("b", "c", "p"),
    [(5, 0, 0.0625), (6, 0, 0.03125), (1, 9, 0.021484), (10, 25, 0.016674), (30, 50, 0.032993), (20, 20, 1)],
)
def test_mcnemar(b: int, c: int, p: float) -> None:
    assert mcnemar(b, c) == pytest.approx(p, abs=5e-7)
    assert mcnemar(c, b) == mcnemar(b, c)
    assert mcnemar(0, 0) == 1


@pytest.mark.parametrize(
    ("k", "exact", "score"),
    [
        (0, (0, 0.0074), (0, 0.0076)),
        (50, (0.0751, 0.1297), (0.0767, 0.1294)),
        (250, (0.4553, 0.5447), (0.4563, 0.5437)),
        (495, (0.9768, 0.9967), (0.9768, 0.9957)),
        (500, (0.9926, 1), (0.9924, 1)),
    ],
)
def test_intervals_of_500(k: int, exact: tuple[float, float], score: tuple[float, float]) -> None:
    assert clopper_pearson(k, 500) == pytest.approx(exact, abs=6e-5)
    assert wilson(k, 500) == pytest.approx(score, abs=6e-5)


@pytest.mark.parametrize(("n", "level"), [(1, 0.95), (7, 0.9), (40, 0.95), (500, 0.99)])
def test_intervals_are_those_of_their_formulas(n: int, level: float) -> None:
    """To ten digits: quantiles of beta distributions, and the roots of Wilson's quadratic equation."""
    tail, z = (1 - level) / 2, norm.ppf((1 + level) / 2)
    for k in {0, 1, n // 3, n // 2, n - 1, n}:
        exact = (beta.ppf(tail, k, n - k + 1) if k else 0, beta.ppf(1 - tail, k + 1, n - k) if k < n else 1)
        assert clopper_pearson(k, n, level) == pytest.approx(exact, abs=1e-10)
        score = wilson(k, n, level)
        for end in score:
            assert (k / n - end) ** 2 == pytest.approx(z * z * end * (1 - end) / n, abs=1e-10)
        assert score.low <= k / n <= score.high


def test_mcnemar_is_twice_the_smaller_tail() -> None:
    for b, c in itertools.product((0, 1, 5, 30, 200), repeat=2):
        tail = binom.cdf(min(b, c), b + c, 0.5) if b + c else 1.0
        assert mcnemar(b, c) == pytest.approx(min(1.0, 2 * tail), rel=1e-10)


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.93])
def test_the_exact_interval_covers(p: float) -> None:
    covered = sum(binom.pmf(k, 40, p) for k in range(41) if clopper_pearson(k, 40)[0] <= p <= clopper_pearson(k, 40)[1])
    assert covered >= 0.95


def test_holm() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_paired_differences_cover() -> None:
    """Exact coverage by summing over all tables of 20 pairs, with a difference of 0.2."""
    n, p10, p01 = 20, 0.3, 0.1
    covered = 0.0
    for b, c in itertools.product(range(n + 1), repeat=2):
        if b + c > n:
            continue
        probability = math.comb(n, b) * math.comb(n - b, c) * p10**b * p01**c * (1 - p10 - p01) ** (n - b - c)
        low, high = paired_difference(b, c, n)[1]
        covered += probability * (low <= p10 - p01 <= high)
    assert 0.93 < covered < 0.98


def test_paired_differences_are_odd_and_hold_what_was_found() -> None:
    for b, c in ((0, 0), (5, 0), (7, 3), (20, 20), (50, 0)):
        found, (low, high) = paired_difference(b, c, 50) if b + c <= 50 else (0.0, (-1.0, 1.0))
        again, (low2, high2) = paired_difference(c, b, 50) if b + c <= 50 else (0.0, (-1.0, 1.0))
        assert low <= found <= high
        assert (found, low, high) == pytest.approx((-again, -high2, -low2), abs=1e-9)
    found, (low, high) = paired_difference(0, 0, 50)
    assert low < 0 < high  # fifty pairs alike do not show that nothing differs


def test_a_published_paired_interval() -> None:
    """Airway hyper-responsiveness in 21 children, 7 and 1 discordant: 0.286, by Tango's interval 0.026 to 0.517."""
    found, interval = paired_difference(7, 1, 21)
    assert found == pytest.approx(0.2857, abs=1e-4)
    assert interval == pytest.approx((0.026, 0.517), abs=5e-4)


def test_across_seeds() -> None:
    mean, (low, high) = across_seeds([1.0, 3.0])
    assert (mean, low, high) == pytest.approx((2, 2 - 12.7062, 2 + 12.7062), abs=1e-3)
    assert across_seeds([1.0])[1] == (-math.inf, math.inf)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="k, n: expected 0 ≤ k ≤ n and n ≥ 1, got 3 of 2"):
        wilson(3, 2)
    with pytest.raises(ValueError, match="b, c, n: expected discordant pairs of n, got 2, 2 of 3"):
        paired_difference(2, 2, 3)
