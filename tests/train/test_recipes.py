"""Recipes: every one is a complete configuration, and the command line changes what it should."""

from fractions import Fraction

import pytest

from qed.recipes import RECIPES, build
from qed.recipes.paper import ARMS


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_complete(name: str) -> None:
    config = build(name, {"data": "somewhere", "seed": "1"})
    assert config.seed == 1
    assert type(config).from_json(config.to_json()) == config


def test_the_papers_arms() -> None:
    made = [build("paper_340m", {"data": "x", "arm": arm}) for arm in ARMS]
    assert len({config.name for config in made}) == 5
    assert [config.model_config().rule for config in made] == list(ARMS)
    config = made[1]
    assert (config.batch_tokens, config.total_tokens, config.decay_start_tokens) == (
        524_288,
        15_000_000_000,
        13_500_000_000,
    )
    assert (config.learning_rate, config.theta_learning_rate, config.sequence, config.seed) == (3e-4, 10.0, 2048, 0)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "micro",
            {},
            "RECIPE: expected one of paper_340m, .*, mini, .*, got 'micro'; the nearest is mini",
        ),
        ("mini", {}, "RECIPE: mini needs --set data=…"),
        ("mini", {"data": "x", "rate": "3"}, "--set: expected one of .*, got 'rate'"),
        ("mini", {"data": "x", "sequence": "100"}, "batch_tokens, micro_tokens: expected multiples of a row of 100"),
        ("mini", {"data": "x", "model.rule": "qet"}, "rule: expected one of linear, .* the nearest is qed"),
        ("mini", {"data": "x", "amr": "qed"}, "got 'amr'; the nearest is arm"),
        ("mini", {"data": "x", "totl_tokens": "9"}, "got 'totl_tokens'; the nearest is total_tokens"),
        ("paper_340m", {"data": "x", "arm": "qed-rnd"}, "got 'qed-rnd'; the nearest is qed-rand"),
        (
            "mini",
            {"data": "x", "total_tokens": "10", "decay_start_tokens": "11"},
            "decay_start_tokens: expected at most total_tokens",
        ),
        ("paper_340m", {"data": "x", "arm": "kda"}, "arm: expected one of gdn2, qed"),
    ],
)
def test_what_is_no_recipe(name: str, changes: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(name, changes)


def test_fields_from_the_command_line() -> None:
    given = {"data": "x", "model.lambda_max": "0.5", "total_tokens": "1e9", "betas": "[0.8, 0.9]", "compile": "true"}
    config = build("mini", given)
    assert (config.model["lambda_max"], config.total_tokens, config.betas, config.compile) == (
        0.5,
        10**9,
        (0.8, 0.9),
        True,
    )


@pytest.mark.parametrize("name", RECIPES)
def test_a_run_of_another_length_decays_after_the_same_share(name: str) -> None:
    usual = build(name, {"data": "x"})
    share = Fraction(usual.decay_start_tokens, usual.total_tokens)
    for total in (1, 2_999, usual.total_tokens, 10**11):
        config = build(name, {"data": "x", "total_tokens": str(total)})
        assert config.total_tokens == total
        assert config.decay_start_tokens == share * total // 1
    exact = build(name, {"data": "x", "total_tokens": str(7 * share.denominator)})
    assert Fraction(exact.decay_start_tokens, exact.total_tokens) == share


def test_a_decay_that_is_set_stays_where_it_is() -> None:
    both = {"data": "x", "total_tokens": "1e6", "decay_start_tokens": "1000"}
    for changes in (both, dict(reversed(both.items()))):
        config = build("mini", changes)
        assert (config.total_tokens, config.decay_start_tokens) == (10**6, 1000)
    alone = build("mini", {"data": "x", "decay_start_tokens": "1000"})
    assert (alone.total_tokens, alone.decay_start_tokens) == (build("mini", {"data": "x"}).total_tokens, 1000)
