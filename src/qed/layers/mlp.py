"""SwiGLU: W_down (silu(W_gate x) ⊙ W_up x)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .fused import has_kernels, pays
from .linear import Linear, ResidualProjection, onto
from .product_operator import product_operator


class SwiGLU(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size, bias=False)  # W_gate above W_up
        self.down_proj = ResidualProjection(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """`residual`: as in `ResidualProjection`."""
        return onto(residual, self.down_proj, self._product(self.gate_up_proj(x)))

    def _product(self, both: Tensor) -> Tensor:
        if pays(both):
            from .row_kernels import silu_product

            return silu_product(both)
        if has_kernels(both) and torch.is_grad_enabled():
            return product_operator(both)
        gate, up = both.chunk(2, -1)
        return nn.functional.silu(gate) * up
