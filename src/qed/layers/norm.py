"""RMSNorm, and RMSNorm times an activated gate."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .fused import has_kernels, pays

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": nn.functional.silu, "sigmoid": torch.sigmoid}


class RMSNorm(nn.Module):
    """x / √(mean x² + eps) · weight over the last dimension; statistics in float32."""

    def __init__(self, width: int, eps: float = 1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if pays(x):
            from .row_kernels import rms_norm

            return rms_norm(x, self.weight, self.eps)
        if has_kernels(x) and torch.compiler.is_compiling() and torch.is_grad_enabled():
            return self._in_parts(x)
        # Autocast would return float32 from here on.
        return nn.functional.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps).to(x.dtype)

    def _in_parts(self, x: Tensor) -> Tensor:
        """What one of torch's operators would hide: the scales, one number a row, that a backward can keep instead of
        reading every row once more."""
        wide = torch.promote_types(x.dtype, torch.float32)
        x_ = x.to(wide)
        scales = torch.rsqrt(x_.square().mean(-1, keepdim=True) + self.eps)
        return (x_ * scales * self.weight.to(wide)).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class GatedRMSNorm(RMSNorm):
    """RMSNorm(x) · activation(gate)."""

    def __init__(self, width: int, activation: str, eps: float = 1e-5):
        super().__init__(width, eps)
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation: expected one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        self.activation = activation

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        if pays(x):
            from .row_kernels import rms_norm

            return rms_norm(x, self.weight, self.eps, gate, self.activation)
        return super().forward(x) * ACTIVATIONS[self.activation](gate)
