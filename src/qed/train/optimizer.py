"""AdamW in three groups: matrices with weight decay; θ at its own rate; everything else without decay."""

from __future__ import annotations

import torch
from torch import nn

from .config import TrainConfig


def groups(model: nn.Module) -> dict[str, list[tuple[str, nn.Parameter]]]:
    """Every parameter once, by group."""
    found: dict[str, list[tuple[str, nn.Parameter]]] = {"decayed": [], "theta": [], "plain": []}
    for name, x in model.named_parameters():
        if name.endswith("theta"):
            found["theta"].append((name, x))
        elif x.dim() < 2 or ".conv." in name:
            found["plain"].append((name, x))
        else:
            found["decayed"].append((name, x))
    return found


def make(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    found = groups(model)
    decay = {"decayed": config.weight_decay, "theta": 0.0, "plain": 0.0}
    scale = {"decayed": 1.0, "theta": config.theta_learning_rate, "plain": 1.0}
    device = next(model.parameters()).device
    return torch.optim.AdamW(
        [
            {"params": [x for _, x in found[name]], "weight_decay": decay[name], "scale": scale[name]}
            for name in found
            if found[name]
        ],
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.epsilon,
        fused=device.type == "cuda",
    )


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate * group["scale"]
