"""θ's learning rate in a short run.

The paper trains θ, which sets λ = λ_max·σ(θ), at ten times the learning rate, since at the plain rate λ hardly leaves
its initial value. Under Adam a parameter moves by about its learning rate in a step at most, so the sum of θ's learning
rates over a run says how far θ can travel: 81 in the paper's 28,611 steps. A run of a thousand steps with the same
factor of ten would give θ an eighth of that. The short recipes take the factor that gives θ the paper's sum; the factor
of ten itself is the arm `qed+theta10` of `qed reproduce`, and `--set theta_learning_rate=10` of `qed train`.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache

from ..train.config import TrainConfig
from ..train.schedule import learning_rate


def travel(config: TrainConfig) -> float:
    """The sum of θ's learning rates over all steps."""
    return config.theta_learning_rate * sum(learning_rate(config, step) for step in range(config.steps))


@lru_cache
def papers_travel() -> float:
    """The sum in the paper's run, whose values are the defaults of every field that decides it."""
    return travel(TrainConfig(name="the paper's", data=""))


def matched(config: TrainConfig) -> TrainConfig:
    """The same run with the factor, rounded to a tenth, by which θ can travel as far as in the paper."""
    factor = config.theta_learning_rate * papers_travel() / travel(config)
    return dataclasses.replace(config, theta_learning_rate=round(factor, 1))
