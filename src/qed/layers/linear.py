"""Matrices of the layers.

One token on a GPU is a matrix times a vector, and its time is that of reading the matrix. Compiled, a sum over rows
reads it faster than kernels for matrix products do, and fuses with what comes before and after.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        one = x.is_cuda and x.shape[:-1].numel() == 1
        if one and torch.compiler.is_compiling() and not torch.is_grad_enabled():
            return times_vector(self.weight, x, self.bias)
        return super().forward(x)


class ResidualProjection(Linear):
    """Back into the residual stream: a matrix like others, known by its class because it starts smaller."""


def times_vector(weight: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """weight [N, M], x [..., M] of one row → [..., N], summed in at least float32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = (weight.to(wide) * x.reshape(1, -1).to(wide)).sum(-1)
    y = y if bias is None else y + bias.to(wide)
    return y.to(x.dtype).view(*x.shape[:-1], -1)
