"""The paper's runs: 340M parameters, 15B tokens of FineWeb-Edu, five arms, two seeds.

What the paper leaves open are defaults of `QEDConfig` and `TrainConfig`: betas, weight decay, clipping, warm-up, and
how the learning rate falls.
"""

from __future__ import annotations

from ..train.config import TrainConfig

ARMS = ("gdn2", "qed", "qed-rand", "qed-nogate", "qed-nogate-noproj")


def paper_340m(data: str, arm: str = "qed", seed: int = 0, validation: str = "") -> TrainConfig:
    if arm not in ARMS:
        raise ValueError(f"arm: expected one of {', '.join(ARMS)}, got {arm!r}")
    return TrainConfig(
        name=f"paper_340m-{arm}-{seed}",
        model={"rule": arm},
        data=data,
        validation=validation or None,
        seed=seed,
        activation_checkpointing="cheap",
    )
