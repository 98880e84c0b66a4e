"""Runs by name: functions that return complete configurations. `--set` on the command line sets their parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from ..choices import check_choice
from ..train.config import TrainConfig
from .generated import recall, tracking
from .paper import paper_340m, paper_short
from .small import lambda_max_sweep, medium, mini, small

RECIPES: dict[str, Callable[..., TrainConfig]] = {
    "paper_340m": paper_340m,
    "paper_short": paper_short,
    "medium": medium,
    "small": small,
    "mini": mini,
    "lambda_max_sweep": lambda_max_sweep,
    "tracking": tracking,
    "recall": recall,
}


def usual_theta(config: dict[str, Any]) -> float | None:
    """The factor on θ's learning rate in the recipe that a run's configuration names; None if it names none."""
    recipe = str(config.get("name")).partition("-")[0]
    if recipe not in RECIPES or "arm" not in inspect.signature(RECIPES[recipe]).parameters:
        return None
    return build(recipe, {"data": ""}).theta_learning_rate


def build(name: str, changes: dict[str, str]) -> TrainConfig:
    """The configuration of a recipe. `changes` sets the recipe's parameters and fields of the configuration."""
    check_choice("RECIPE", name, RECIPES)
    parameters = inspect.signature(RECIPES[name]).parameters
    given: dict[str, Any] = {}
    for key, parameter in parameters.items():
        if key in changes:
            kind = type(parameter.default) if parameter.default is not inspect.Parameter.empty else str
            try:
                given[key] = kind(changes[key])
            except ValueError:
                expected = {int: "a whole number", float: "a number"}[kind]
                raise ValueError(f"{key}: expected {expected}, got {changes[key]!r}") from None
    missing = [key for key, x in parameters.items() if x.default is inspect.Parameter.empty and key not in given]
    if missing:
        raise ValueError(f"RECIPE: {name} needs --set {missing[0]}=…")
    return RECIPES[name](**given).changed({k: v for k, v in changes.items() if k not in parameters}, parameters)
