"""RMSNorm, RMSNorm times an activated gate, and SwiGLU's product, the last with its gradient, as Triton kernels. Each
reads its inputs once and writes once; torch's functions in `norm.py` and `mlp.py` say what they compute."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops.launching import FUSED, on_its_device, power_of_two
from .sigmoid import sigmoid, silu_gradient

TILE, BLOCK = 4096, 1024  # numbers of a program, in rows and flat
ACTIVATIONS = {None: 0, "silu": 1, "sigmoid": 2}


@triton.jit
def norm_kernel(
    x, gate, weight, y, x_stride, gate_stride, rows,
    WIDTH: tl.constexpr, EPS: tl.constexpr, ACTIVATION: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * BR
    r, d = tl.arange(0, BR)[:, None], tl.arange(0, BD)[None, :]
    inside = (r < rows - first) & (d < WIDTH)
    x_ = tl.load(x + first * x_stride + r * x_stride + d, mask=inside, other=0.0).to(tl.float32)
    w_ = tl.load(weight + d, mask=d < WIDTH, other=0.0).to(tl.float32)
    y_ = x_ * tl.rsqrt(tl.sum(x_ * x_, 1) / WIDTH + EPS)[:, None] * w_
    if ACTIVATION > 0:
        g_ = tl.load(gate + first * gate_stride + r * gate_stride + d, mask=inside, other=0.0).to(tl.float32)
        y_ *= (g_ if ACTIVATION == 1 else 1.0) * sigmoid(g_)
    tl.store(y + first * WIDTH + r * WIDTH + d, y_.to(y.dtype.element_ty), mask=inside)


@triton.jit
def product_kernel(both, y, dy, d_both, stride, numbers, WIDTH: tl.constexpr, BACK: tl.constexpr, BLOCK: tl.constexpr):
    """`y`, or with BACK `d_both`. Numbers lie flat: widths are seldom a multiple of a large tile's."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    first = start // WIDTH  # row
    at = (start - first * WIDTH).to(tl.int32) + tl.arange(0, BLOCK)
    inside = tl.arange(0, BLOCK) < numbers - start
    rows, columns = first + at // WIDTH, at % WIDTH
    both += rows * stride + columns
    gate = tl.load(both, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + WIDTH, mask=inside, other=0.0).to(tl.float32)
    open_ = sigmoid(gate)
    if BACK:
        dy_ = tl.load(dy + start + tl.arange(0, BLOCK), mask=inside, other=0.0).to(tl.float32)
        d_both += rows * (2 * WIDTH) + columns
        tl.store(d_both, silu_gradient(gate, dy_ * up).to(d_both.dtype.element_ty), mask=inside)
        tl.store(d_both + WIDTH, (dy_ * gate * open_).to(d_both.dtype.element_ty), mask=inside)
    else:
        tl.store(y + start + tl.arange(0, BLOCK), (gate * up * open_).to(y.dtype.element_ty), mask=inside)


@on_its_device
def rms_norm(
    x: Tensor, weight: Tensor, eps: float, gate: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """x and gate [..., width] → like x."""
    width = x.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    flat, given = _matrix(x), None if gate is None else _matrix(gate)
    BD = power_of_two(width)
    BR = max(1, TILE // BD)
    if y.numel():
        norm_kernel[(-(-flat.shape[0] // BR),)](
            *(flat, given, weight, y, flat.stride(0), 0 if given is None else given.stride(0), flat.shape[0]),
            **{"WIDTH": width, "EPS": eps, "ACTIVATION": ACTIVATIONS[activation], "BR": BR, "BD": BD},
            **FUSED,
            num_warps=4,
        )
    return y


@on_its_device
def silu_product(both: Tensor) -> Tensor:
    """silu(gate) ⊙ up of [..., gate and up side by side]."""
    y = torch.empty(*both.shape[:-1], both.shape[-1] // 2, dtype=both.dtype, device=both.device)
    _product(both, y, None, None)
    return y


@on_its_device
def silu_product_gradient(dy: Tensor, both: Tensor) -> Tensor:
    d_both = torch.empty(both.shape, dtype=both.dtype, device=both.device)
    _product(both, None, dy.contiguous(), d_both)
    return d_both


def _product(both: Tensor, y: Tensor | None, dy: Tensor | None, d_both: Tensor | None) -> None:
    flat, width, numbers = _matrix(both), both.shape[-1] // 2, both.numel() // 2
    if numbers:
        product_kernel[(-(-numbers // BLOCK),)](
            *(flat, y, dy, d_both, flat.stride(0), numbers),
            **{"WIDTH": width, "BACK": dy is not None, "BLOCK": BLOCK},
            **FUSED,
            num_warps=4,
        )


def _matrix(x: Tensor) -> Tensor:
    """[rows, width] of whatever shape, numbers of a row side by side."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()
