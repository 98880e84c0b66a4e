"""What is trained, in one name: a rule, and after it whatever differs from the recipe.

| name | means |
|---|---|
| `qed` | the rule, as the recipe has it |
| `qed@0.5` | trained with the bound λ_max = 0.5 instead of the paper's 0.25 |
| `qed+theta10` | θ's learning rate is 10 times the learning rate, instead of the recipe's factor |
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from ..choices import check_choice
from ..model.config import QEDConfig
from ..rules import RULES
from ..train.config import TrainConfig

NUMBER = r"\d+(?:\.\d+)?"
WHOLE = re.compile(rf"(?P<rule>[^@+]+)(?:@(?P<bound>{NUMBER}))?(?:\+theta(?P<theta>{NUMBER}))?")


class Arm(NamedTuple):
    """A rule, and what is trained differently from the recipe."""

    rule: str
    bound: float | None = None  # λ_max; None: as in the recipe
    theta: float | None = None  # factor on θ's learning rate; None: as in the recipe

    @staticmethod
    def parse(name: str) -> Arm:
        """Read an arm's name; ValueError if it has none of the forms above."""
        match = WHOLE.fullmatch(name)
        rule = match["rule"] if match else re.split("[@+]", name)[0]
        check_choice("--arms", rule, RULES, "; `all` takes the paper's five, and `--import FILE` adds those of yours")
        plain = rule == name
        if match is None or not (plain or RULES[rule].strength):
            raise ValueError(
                "--arms: expected RULE, or, where the rule has a strength λ, RULE@λ_max or RULE+thetaFACTOR with "
                f"numbers, got {name!r}"
            )
        bound, theta = (None if match[x] is None else float(match[x]) for x in ("bound", "theta"))
        return Arm(rule, bound, theta)

    @property
    def name(self) -> str:
        """The name that `parse` reads."""
        bound = "" if self.bound is None else f"@{self.bound:g}"
        return self.rule + bound + ("" if self.theta is None else f"+theta{self.theta:g}")

    @property
    def changes(self) -> dict[str, str]:
        """What `--set` changes in a recipe to train the arm, apart from the rule."""
        settings = {"model.lambda_max": self.bound, "theta_learning_rate": self.theta}
        return {name: f"{value:g}" for name, value in settings.items() if value is not None}

    @staticmethod
    def of(config: dict[str, Any], usual_theta: float | None) -> Arm:
        """The arm of a run's configuration; `usual_theta` is its recipe's factor on θ's learning rate, if known."""
        model = QEDConfig(**config["model"])
        bound = None if model.lambda_max == QEDConfig().lambda_max else model.lambda_max
        theta = config.get("theta_learning_rate", TrainConfig.theta_learning_rate)
        unusual = RULES[model.rule].strength and usual_theta is not None and theta != usual_theta
        return Arm(model.rule, bound, theta if unusual else None)
