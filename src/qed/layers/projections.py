"""Matrices of the layers: plain `nn.Linear`s, so that adapters and quantisers find them."""

from __future__ import annotations

from torch import nn


def into_residual(inputs: int, outputs: int) -> nn.Linear:
    """A matrix without a bias whose result is added to the residual stream. It is marked, because it starts smaller."""
    linear = nn.Linear(inputs, outputs, bias=False)
    linear.into_residual = True  # type: ignore[assignment]
    return linear


def is_into_residual(module: nn.Module) -> bool:
    """Whether a module was made by `into_residual`."""
    return bool(module.__dict__.get("into_residual", False))
