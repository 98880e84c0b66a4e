"""Warm-up, a plateau, a linear decay to zero (WSD). A step's learning rate is a function of the step alone."""

from __future__ import annotations

from .config import TrainConfig


def learning_rate(config: TrainConfig, step: int) -> float:
    """The learning rate of a step; steps are counted from 0."""
    warmup = max(1, round(config.warmup_fraction * config.steps))
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    done = step * config.batch_tokens
    left = (config.total_tokens - done) / max(1, config.total_tokens - config.decay_start_tokens)
    return config.learning_rate * min(1.0, max(0.0, left))
