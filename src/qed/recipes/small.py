"""Smaller runs of the same arms, for one GPU and for a laptop, and the sweep the paper leaves open."""

from __future__ import annotations

import dataclasses

from ..choices import check_choice
from ..model.config import SIZES
from ..train.config import TrainConfig
from .paper import SHORT
from .parts import run_of, steps_of
from .theta import matched


def medium(data: str, arm: str = "qed", seed: int = 0, validation: str = "") -> TrainConfig:
    """64M parameters (with 32,000 tokens), 48M tokens in 1,465 steps of 16 rows of 2048: two minutes on an H200.

    Heads are as wide and rows as long as the paper's. The corpus is meant to have a tenth of practice documents
    (`qed prepare --practice 0.1`). θ can travel as far as in the paper (`theta.py`).

    Args:
        data, arm, seed, validation: as in `paper_short`.
    """
    run = run_of("medium", SIZES["medium"], data, arm, seed, validation)
    return matched(TrainConfig(**run, **SHORT, learning_rate=3e-3, validate_every=250))


def small(data: str, arm: str = "qed", seed: int = 0, validation: str = "") -> TrainConfig:
    """14M parameters (with 32,000 tokens), 64M tokens in 3,907 steps of 32 rows of 512: minutes on a large GPU.

    Args:
        data, arm, seed, validation: as in `paper_short`.
    """
    return TrainConfig(
        **run_of("small", SIZES["small"], data, arm, seed, validation),
        **steps_of(32, 512, tokens=64_000_000, decay_start=51_200_000),
        learning_rate=3e-3,
        save_every=500,
        validation_tokens=262_144,
    )


def mini(data: str, arm: str = "qed", seed: int = 0, validation: str = "") -> TrainConfig:
    """Two layers of width 64, 3,000 steps of 8 rows of 128: two minutes on one CPU core.

    Args:
        data, arm, seed, validation: as in `paper_short`.
    """
    return TrainConfig(
        **run_of("mini", SIZES["mini"], data, arm, seed, validation),
        **steps_of(8, 128, tokens=3000 * 8 * 128, decay_start=2400 * 8 * 128),
        learning_rate=5e-3,
        precision="float32",
        compile=False,
        save_every=500,
        validate_every=250,
        validation_tokens=16_384,
    )


def lambda_max_sweep(data: str, lambda_max: float = 0.25, seed: int = 0, scale: str = "small") -> TrainConfig:
    """QED trained with another bound on λ; the paper has 0.25 only.

    Args:
        data: a folder that `qed prepare` wrote.
        lambda_max: the bound.
        seed: of the weights and of the order of the data.
        scale: the recipe whose sizes it has: medium, small or mini.
    """
    recipes = {"medium": medium, "small": small, "mini": mini}
    check_choice("scale", scale, recipes)
    base = recipes[scale](data, "qed", seed)
    return dataclasses.replace(
        base, name=f"lambda_max_sweep-{scale}-{lambda_max}-{seed}", model=base.model | {"lambda_max": lambda_max}
    )
