"""Matrices of the layers.

One token on a GPU is a matrix times a vector, and its time is that of reading the matrix. Compiled, a sum over rows
reads it faster than kernels for matrix products do, and fuses with what comes before and after.

Many tokens are a product of matrices, which can add a bias or the residual stream on its way at almost no cost.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .fused import pays


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        one = x.is_cuda and x.shape[:-1].numel() == 1
        if one and torch.compiler.is_compiling() and not torch.is_grad_enabled():
            return times_vector(self.weight, x, self.bias)
        if self.bias is not None and x.dim() > 2:  # torch adds it in a pass of its own unless x is a matrix
            return super().forward(x.flatten(0, -2)).unflatten(0, x.shape[:-1])
        return super().forward(x)


class ResidualProjection(Linear):
    """Back into the residual stream; known by its class, because it starts smaller. Without a bias."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """W x, or residual + W x: on a GPU where no gradient is recorded one product, written over `residual`."""
        if residual is None:
            return super().forward(x)
        plain = type(self.weight.data) is Tensor  # not quantised in place
        if pays(x) and plain and residual.is_contiguous() and residual.dtype == x.dtype == self.weight.dtype:
            return residual.flatten(0, -2).addmm_(x.flatten(0, -2), self.weight.t()).view_as(residual)
        return residual + super().forward(x)


def onto(residual: Tensor | None, projection: nn.Module, x: Tensor) -> Tensor:
    """residual + projection(x), or projection(x) alone. Something else may have taken a projection's place, quantised
    or adapted, that knows of no residual."""
    if residual is None:
        return projection(x)
    return projection(x, residual) if isinstance(projection, ResidualProjection) else residual + projection(x)


def times_vector(weight: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """weight [N, M], x [..., M] of one row → [..., N], summed in at least float32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = (weight.to(wide) * x.reshape(1, -1).to(wide)).sum(-1)
    y = y if bias is None else y + bias.to(wide)
    return y.to(x.dtype).view(*x.shape[:-1], -1)
