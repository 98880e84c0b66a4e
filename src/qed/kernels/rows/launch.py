"""Launches the kernels of rows, and registers SwiGLU's product as a torch operator with a gradient.

    qed::silu_product(both) -> silu(gate) ⊙ up
    qed::silu_product_backward(dy, both) -> gradient of both

If torch.compile made the gradient, the program that writes its two halves side by side would read every input twice.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...ops.registration import register, register_gradient
from ..launching import FUSED, Prepared, on_its_device, power_of_two

TILE, BLOCK = 4096, 1024  # how many numbers a program has: in whole rows, and in a stretch of them
ACTIVATIONS = {None: 0, "silu": 1, "sigmoid": 2}


@lru_cache
def _norm(width: int, eps: float, activation: str | None) -> Prepared:
    from .kernels import norm_kernel

    BD = power_of_two(width)
    tile = {"BR": max(1, TILE // BD), "BD": BD}
    return Prepared(norm_kernel, WIDTH=width, EPS=eps, ACTIVATION=ACTIVATIONS[activation], **tile, **FUSED, num_warps=4)


@lru_cache
def _product(width: int, back: bool) -> Prepared:
    from .kernels import product_kernel

    return Prepared(product_kernel, WIDTH=width, BACK=back, BLOCK=BLOCK, **FUSED, num_warps=4)


@on_its_device
def rms_norm(
    x: Tensor, weight: Tensor, eps: float, gate: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """Return RMSNorm(x), or RMSNorm(x) · activation(gate).

    Args:
        x, weight, eps, gate, activation: as in `qed.layers.functions.rms_norm`.
    """
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    flat, given = _matrix(x), None if gate is None else _matrix(gate)
    if y.numel():
        norm, strides = _norm(x.shape[-1], eps, activation), (flat.stride(0), 0 if given is None else given.stride(0))
        grid = (-(-flat.shape[0] // norm.constants["BR"]),)
        norm(grid, flat, given, weight.contiguous(), y, *strides, flat.shape[0])
    return y


@on_its_device
def silu_product(both: Tensor) -> Tensor:
    """Return silu(gate) ⊙ up, from `both` [..., 2·width], which has gate and up side by side."""
    y = torch.empty(*both.shape[:-1], both.shape[-1] // 2, dtype=both.dtype, device=both.device)
    _launch_product(both, y, None, None)
    return y


@on_its_device
def silu_product_gradient(dy: Tensor, both: Tensor) -> Tensor:
    """Return the gradient of `both`, from that of the product."""
    d_both = torch.empty(both.shape, dtype=both.dtype, device=both.device)
    _launch_product(both, None, dy.contiguous(), d_both)
    return d_both


def _launch_product(both: Tensor, y: Tensor | None, dy: Tensor | None, d_both: Tensor | None) -> None:
    flat, width, numbers = _matrix(both), both.shape[-1] // 2, both.numel() // 2
    if numbers:
        _product(width, dy is not None)((-(-numbers // BLOCK),), flat, y, dy, d_both, flat.stride(0), numbers)


def _matrix(x: Tensor) -> Tensor:
    """Return x of any shape as a matrix [rows, width] whose rows are contiguous."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()


_PRODUCT_BACKWARD = register_gradient(
    "silu_product_backward(Tensor dy, Tensor both) -> Tensor",
    silu_product_gradient,
    lambda dy, both: both.new_empty(both.shape),
)


def _differentiate(ctx: Any, dy: Tensor) -> Any:
    return _PRODUCT_BACKWARD(dy, *ctx.saved_tensors)


SILU_PRODUCT = register(
    "silu_product(Tensor both) -> Tensor",
    silu_product,
    lambda both: both.new_empty(*both.shape[:-1], both.shape[-1] // 2),
    differentiate=_differentiate,
)
