"""What a shell offers after Tab, beyond commands and options: names of recipes, arms, fields, scales and tasks.

`qed --install-completion` sets it up. What the functions import is imported only when a shell asks.
"""

from __future__ import annotations

from collections.abc import Iterable


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    """The names that begin with what stands after the last comma, each with what stands before."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in names if name.startswith(last)]


def recipes(incomplete: str) -> list[str]:
    """Names of recipes."""
    from ..recipes import RECIPES

    return _beginning(incomplete, RECIPES)


def arms(incomplete: str) -> list[str]:
    """Names of arms, separated by commas; `all` for the paper's five."""
    from ..recipes.paper import ARMS
    from ..rules import RULES

    return _beginning(incomplete, dict.fromkeys(["all", *ARMS, *RULES]))


def fields(incomplete: str) -> list[str]:
    """Fields of `--set`, and after those that have names as their values, these names."""
    from ..rules import RULES
    from ..train.config import CHOICES, TrainConfig
    from ..train.fields import field_types
    from ..train.loggers import LOGGERS
    from ..train.optimizers import OPTIMIZERS

    named: dict[str, Iterable[str]] = {"arm": RULES, "loggers": LOGGERS, "optimizer": OPTIMIZERS, **CHOICES}
    field, sign, value = incomplete.partition("=")
    if sign:
        return [f"{field}={name}" for name in _beginning(value, named.get(field, ()))]
    known = dict.fromkeys(["arm", *field_types(TrainConfig)])
    return [f"{name}=" for name in known if name.startswith(incomplete) and name not in ("name", "model")]


def scales(incomplete: str) -> list[str]:
    """Scales of `qed reproduce`."""
    from ..reproduce.plan import PLANS

    return _beginning(incomplete, PLANS)


def tasks(incomplete: str) -> list[str]:
    """Names of tasks, separated by commas."""
    from ..eval.tasks import TASKS

    return _beginning(incomplete, TASKS)


def suites(incomplete: str) -> list[str]:
    """Names of suites, separated by commas."""
    from ..eval.harness.suites import SUITES

    return _beginning(incomplete, SUITES)
