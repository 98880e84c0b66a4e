"""What is trained, in one name: a rule, and after it whatever differs from the recipe.

| name | means |
|---|---|
| `qed` | the rule, as the recipe has it |
| `qed@0.5` | trained with the bound λ_max = 0.5 instead of the paper's 0.25 |
| `gdn2+erase2` | the erase gate b is in (0, 2) instead of (0, 1), so that the erase can have negative eigenvalues |
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
WHOLE = re.compile(
    rf"(?P<rule>[^@+]+)(?:@(?P<bound>{NUMBER}))?(?:\+erase(?P<erase>{NUMBER}))?(?:\+theta(?P<theta>{NUMBER}))?"
)


class Arm(NamedTuple):
    """A rule, and what is trained differently from the recipe."""

    rule: str
    bound: float | None = None  # λ_max; None: as in the recipe
    erase: float | None = None  # upper end of the erase gate's range; None: as in the recipe
    theta: float | None = None  # factor on θ's learning rate; None: as in the recipe

    @staticmethod
    def parse(name: str) -> Arm:
        """Read an arm's name; ValueError if it has none of the forms above."""
        match = WHOLE.fullmatch(name)
        rule = match["rule"] if match else re.split("[@+]", name)[0]
        check_choice("--arms", rule, RULES, "; `all` takes the paper's five, and `--import FILE` adds those of yours")
        given = match.groupdict() if match else {}
        has = RULES[rule].strength, RULES[rule].erase != "none"
        needs = any(given.get(x) for x in ("bound", "theta")), bool(given.get("erase"))
        if match is None or any(needed and not there for needed, there in zip(needs, has, strict=True)):
            raise ValueError(
                "--arms: expected RULE; or, where the rule has a strength λ, RULE@λ_max or RULE+thetaFACTOR; or, where "
                f"it has an erase gate, RULE+eraseMOST, with numbers, got {name!r}"
            )
        bound, erase, theta = (None if given[x] is None else float(given[x]) for x in ("bound", "erase", "theta"))
        return Arm(rule, bound, erase, theta)

    @property
    def name(self) -> str:
        """The name that `parse` reads."""
        said = {"@": self.bound, "+erase": self.erase, "+theta": self.theta}
        return self.rule + "".join(f"{mark}{value:g}" for mark, value in said.items() if value is not None)

    @property
    def changes(self) -> dict[str, str]:
        """What `--set` changes in a recipe to train the arm, apart from the rule."""
        settings = {"model.lambda_max": self.bound, "model.erase_max": self.erase, "theta_learning_rate": self.theta}
        return {name: f"{value:g}" for name, value in settings.items() if value is not None}

    @staticmethod
    def of(config: dict[str, Any], usual_theta: float | None) -> Arm:
        """The arm of a run's configuration; `usual_theta` is its recipe's factor on θ's learning rate, if known."""
        model = QEDConfig(**config["model"])
        usual = QEDConfig()
        bound = None if model.lambda_max == usual.lambda_max else model.lambda_max
        erase = None if model.erase_max == usual.erase_max else model.erase_max
        theta = config.get("theta_learning_rate", TrainConfig.theta_learning_rate)
        unusual = RULES[model.rule].strength and usual_theta is not None and theta != usual_theta
        return Arm(model.rule, bound, erase, theta if unusual else None)
