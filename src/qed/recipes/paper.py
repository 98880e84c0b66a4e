"""The paper's runs: 340M parameters, 15B tokens of FineWeb-Edu, five arms, two seeds; and its model trained briefly.

What the paper leaves open has the defaults of `QEDConfig` and `TrainConfig`: betas, weight decay, clipping, warm-up,
and how the learning rate falls.
"""

from __future__ import annotations

from typing import Any

from ..choices import check_choice
from ..train.config import TrainConfig
from .parts import run_of, steps_of
from .theta import matched

# A short training, the same for models of two sizes: 1,465 steps of 16 of the paper's rows.
SHORT: dict[str, Any] = {
    **steps_of(16, 2048, tokens=48_000_000, decay_start=37_920_000),
    "warmup_fraction": 0.05,
    "save_every": 1000,
    "validation_tokens": 524_288,
    "log_every": 10,
}
# The paper's arms: the rule that is trained, and what the paper calls it.
ARMS = {
    "gdn2": "GDN-2",
    "qed": "QED",
    "qed-rand": "QED-rand",
    "qed-nogate": "QED-nogate",
    "qed-nogate-noproj": "QED-nogate-noproj",
}


def paper_340m(data: str, arm: str = "qed", seed: int = 0, validation: str = "") -> TrainConfig:
    """The paper's run of one arm: 28,611 steps of 256 rows of 2048 tokens.

    Args:
        data: a folder that `qed prepare` wrote.
        arm: one of the paper's arms.
        seed: of the weights and of the order of the data.
        validation: a folder of held-out tokens; without one the run is not validated.
    """
    check_choice("arm", arm, ARMS)
    return TrainConfig(**run_of("paper_340m", {}, data, arm, seed, validation), activation_checkpointing="cheap")


def paper_short(data: str, arm: str = "qed", seed: int = 0, validation: str = "") -> TrainConfig:
    """The paper's model trained on 48M tokens instead of 15B, in 1,465 steps of 16 rows of 2048.

    The corpus is meant to have a tenth of practice documents (`qed prepare --practice 0.1`): then accuracy by length
    comes out like that of the paper's GDN-2. θ can travel as far as in the paper (`theta.py`).

    Args:
        data, arm, seed, validation: as in `paper_340m`; any rule can be the arm.
    """
    return matched(
        TrainConfig(
            **run_of("paper_short", {}, data, arm, seed, validation),
            **SHORT,
            learning_rate=8e-4,
            activation_checkpointing="cheap",
            validate_every=500,
        )
    )
