"""Recipes: every one is a complete configuration, and the command line changes what it should."""

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
            "RECIPE: expected one of paper_340m, paper_short, medium, small, mini, lambda_max_sweep, got micro",
        ),
        ("mini", {}, "RECIPE: mini needs --set data=…"),
        ("mini", {"data": "x", "rate": "3"}, "--set: expected one of .*, got rate"),
        ("mini", {"data": "x", "sequence": "100"}, "batch_tokens, micro_tokens: expected multiples of a row of 100"),
        ("mini", {"data": "x", "model.rule": "qet"}, "rule: expected one of linear"),
        ("mini", {"data": "x", "total_tokens": "10"}, "decay_start_tokens: expected at most total_tokens"),
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
