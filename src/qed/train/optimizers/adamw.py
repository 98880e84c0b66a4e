"""AdamW in three groups: matrices with weight decay; θ at its own rate; everything else without decay."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from .row import Groups, NoSettings, OptimizerRow

if TYPE_CHECKING:
    from ..config import TrainConfig


def groups(model: nn.Module) -> Groups:
    """Sort all parameters: matrices, θ, and norms, biases and convolutions' taps."""
    sorted_: Groups = {"decayed": [], "theta": [], "plain": []}
    for name, x in model.named_parameters():
        if name.endswith("theta"):
            sorted_["theta"].append((name, x))
        elif x.dim() < 2 or ".conv." in name:
            sorted_["plain"].append((name, x))
        else:
            sorted_["decayed"].append((name, x))
    return sorted_


def adamw(chosen: Groups, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW over some parameters, in groups named as above."""
    decay = {"decayed": config.weight_decay, "theta": 0.0, "plain": 0.0}
    scale = {"decayed": 1.0, "theta": config.theta_learning_rate, "plain": 1.0}
    device = next(x.device for parameters in chosen.values() for _, x in parameters)
    return torch.optim.AdamW(
        [
            {"params": [x for _, x in chosen[name]], "weight_decay": decay[name], "scale": scale[name]}
            for name in chosen
            if chosen[name]
        ],
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.epsilon,
        fused=device.type == "cuda",
    )


def _make(model: nn.Module, config: TrainConfig, _: NoSettings) -> list[torch.optim.Optimizer]:
    return [adamw(groups(model), config)]


ROW = OptimizerRow("adamw", groups, _make)
