"""Contrasts over trainings against scipy, closed forms, enumeration, and the numbers of the registered plan."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from qed.analysis.contrasts import (
    DRAWS,
    Estimate,
    contrast,
    detectable,
    mean_of,
    permutation,
    pooled,
    power,
    sign_flips,
    welch,
)

RANDOM = np.random.default_rng(7)
A, B, C = (list(RANDOM.normal(m, s, n)) for m, s, n in ((60, 3, 5), (65, 3, 4), (50, 8, 6)))
DIFFERENCE = {"b": 1.0, "a": -1.0}


def test_two_arms_are_students_test() -> None:
    found, known = contrast({"a": A, "b": B}, DIFFERENCE), stats.ttest_ind(B, A)
    assert found.p == pytest.approx(known.pvalue)
    assert found.freedom == known.df
    for level in (0.9, 0.95):
        assert found.interval(level) == pytest.approx(tuple(known.confidence_interval(level)))


def test_welch_is_scipys() -> None:
    found, known = welch({"a": A, "b": B, "c": C}, DIFFERENCE), stats.ttest_ind(B, A, equal_var=False)
    assert (found.p, found.freedom) == pytest.approx((known.pvalue, known.df))


def test_a_difference_within_trainings_is_the_test_of_one_sample() -> None:
    found, known = mean_of(A), stats.ttest_1samp(A, 0)
    assert found.p == pytest.approx(known.pvalue)
    assert found.interval() == pytest.approx(tuple(known.confidence_interval()))


def test_other_arms_give_variance_and_freedom() -> None:
    """Two arms of two and one of three: SS = 0.5 + 2 + 2 over 4 degrees of freedom."""
    groups = {"a": [1.0, 2.0], "b": [5.0, 7.0], "c": [10.0, 11.0, 12.0]}
    assert pooled(groups) == pytest.approx((math.sqrt(4.5 / 4), 4))
    found = contrast(groups, DIFFERENCE)
    assert found == pytest.approx((4.5, math.sqrt(4.5 / 4), 4))
    trend = contrast(groups, {"a": -1.0, "b": 0.0, "c": 1.0})
    assert trend == pytest.approx((9.5, math.sqrt(4.5 / 4 * (1 / 2 + 1 / 3)), 4))


def test_one_training_each_tells_no_variance() -> None:
    found = contrast({"a": [1.0], "b": [5.0]}, DIFFERENCE)
    assert found.value == 4
    assert found.interval() == (-math.inf, math.inf)
    assert found.p == 1
    assert not found.within(1000)
    with pytest.raises(ValueError, match="expected trainings of every arm of the contrast, got none of b"):
        contrast({"a": [1.0, 2.0], "b": []}, DIFFERENCE)


def test_trainings_that_agree_to_the_last_digit() -> None:
    same = {"a": [1.0, 1.0], "b": [1.0, 1.0]}
    assert contrast(same, DIFFERENCE).p == 1
    assert contrast(same | {"b": [2.0, 2.0]}, DIFFERENCE).p == 0
    assert welch(same | {"b": [2.0, 2.0]}, DIFFERENCE).p == 0


@pytest.mark.parametrize("value", np.linspace(-4, 4, 33))
def test_equivalence_is_two_one_sided_tests(value: float) -> None:
    """The 90 % interval is within ±3 just when both one-sided tests reject at .05."""
    found, margin = Estimate(value, 0.8, 9), 3.0
    above = stats.t.sf((value + margin) / 0.8, 9)  # of lying below −3
    below = stats.t.cdf((value - margin) / 0.8, 9)
    assert found.within(margin) == (max(above, below) < 0.05)


def test_permutations_are_enumerated() -> None:
    """Of the 20 ways to label six trainings, the one found and its mirror are as far apart."""
    found = permutation({"a": [1.0, 2.0, 3.0], "b": [10.0, 20.0, 30.0]}, DIFFERENCE)
    assert found == (2 / 20, True)
    groups = {"a": [1.0, 4.0], "b": [2.0, 7.0], "c": [3.0, 9.0]}
    weights = {"a": -1.0, "b": 0.0, "c": 1.0}
    values = [x for group in groups.values() for x in group]
    every = [abs(sum(order[4:]) - sum(order[:2])) for order in itertools.permutations(values)]
    least = abs(sum(groups["c"]) - sum(groups["a"]))
    assert permutation(groups, weights).p == pytest.approx(np.mean([x >= least - 1e-9 for x in every]))


@pytest.mark.slow
def test_drawn_permutations_are_close_to_all_of_them() -> None:
    one, two = list(range(12)), [x + 3.5 for x in range(12)]
    found = permutation({"a": one, "b": two}, DIFFERENCE)
    assert not found.exact
    values = np.array(one + two)
    sums = np.array([values[list(x)].sum() for x in itertools.combinations(range(24), 12)])
    p = float((np.abs(2 * sums - values.sum()) >= abs(sum(two) - sum(one)) - 1e-9).mean())
    assert found.p == pytest.approx(p, abs=5 * math.sqrt(p * (1 - p) / DRAWS))


def test_sign_flips() -> None:
    assert sign_flips([1.0, 2.0, 3.0]) == (2 / 8, True)
    assert sign_flips([1.0, -2.0, 3.0]).p == 6 / 8  # ±2, ±4 and ±6 for the sums 2, 0, 4, 6
    assert not sign_flips([1.0] * 17).exact
    assert sign_flips([1.0] * 17).p < 1e-3


def test_power_is_that_of_the_noncentral_t() -> None:
    limit = stats.t.ppf(0.975, 9)
    known = stats.nct.sf(limit, 9, 2.5) + stats.nct.cdf(-limit, 9, 2.5)
    assert power(5.0, 2.0, 9, 0.05) == pytest.approx(known, abs=1e-3)
    assert power(0.0, 1.0, 9, 0.05) == pytest.approx(0.05, abs=1e-3)
    assert power(detectable(1.3, 4, 0.01), 1.3, 4, 0.01) == pytest.approx(0.8, abs=1e-6)
    assert detectable(math.inf, 0, 0.05) == math.inf


@pytest.mark.parametrize(
    ("deviation", "seeds", "effect"), [(2.75, 12, 3.2), (6.2, 12, 7.3), (2.75, 4, 6.1), (6.2, 4, 13.8)]
)
def test_the_plans_power(deviation: float, seeds: int, effect: float) -> None:
    """Three arms; as the registered plan says it."""
    assert detectable(deviation * math.sqrt(2 / seeds), 3 * (seeds - 1), 0.05) == pytest.approx(effect, abs=0.06)
