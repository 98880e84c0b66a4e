"""RMSNorm, and RMSNorm times an activated gate."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..routes import AUTO, Call, Impl
from .functions import ACTIVATIONS
from .routes import NORM


class RMSNorm(nn.Module):
    """x / √(mean x² + eps) · weight over the last dimension; statistics in float32."""

    impl: Impl = AUTO

    def __init__(self, width: int, eps: float = 1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor, *, impl: Impl | None = None) -> Tensor:
        """Return the norm of x [..., width]. `impl` is for this call; None for the layer's own."""
        route = NORM.pick(self.impl if impl is None else impl, Call.of(x))
        y: Tensor = route.run(x, self.weight, self.eps)
        return y

    def extra_repr(self) -> str:
        """The width and eps, for printing."""
        return f"{self.weight.shape[0]}, eps={self.eps}"


class GatedRMSNorm(RMSNorm):
    """RMSNorm(x) · activation(gate)."""

    def __init__(self, width: int, activation: str, eps: float = 1e-5):
        super().__init__(width, eps)
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation: expected one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        self.activation = activation

    def forward(self, x: Tensor, gate: Tensor, *, impl: Impl | None = None) -> Tensor:  # type: ignore[override]
        """Return the gated norm.

        Args:
            x: [..., width].
            gate: like x, before its activation.
            impl: the route for this call; None for the layer's own.
        """
        route = NORM.pick(self.impl if impl is None else impl, Call.of(x))
        y: Tensor = route.run(x, self.weight, self.eps, gate, self.activation)
        return y
