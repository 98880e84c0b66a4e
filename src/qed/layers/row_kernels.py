"""RMSNorm, RMSNorm times an activated gate, and SwiGLU's product as Triton kernels without a gradient. Each reads its
inputs once and writes once; torch's functions in `norm.py` and `mlp.py` say what they compute."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops.launching import FUSED, on_its_device, power_of_two
from .sigmoid import sigmoid

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
def product_kernel(both, y, stride, numbers, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Numbers lie flat: widths are seldom a multiple of a large tile's."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    first = start // WIDTH  # row
    at = (start - first * WIDTH).to(tl.int32) + tl.arange(0, BLOCK)
    inside = tl.arange(0, BLOCK) < numbers - start
    both += first * stride + (at // WIDTH).to(tl.int64) * stride + at % WIDTH
    gate = tl.load(both, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + WIDTH, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + start + tl.arange(0, BLOCK), (gate * up * sigmoid(gate)).to(y.dtype.element_ty), mask=inside)


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
    flat, width = _matrix(both), both.shape[-1] // 2
    y = torch.empty(*both.shape[:-1], width, dtype=both.dtype, device=both.device)
    if y.numel():
        grid = (-(-y.numel() // BLOCK),)
        product_kernel[grid](flat, y, flat.stride(0), y.numel(), WIDTH=width, BLOCK=BLOCK, num_warps=4, **FUSED)
    return y


def _matrix(x: Tensor) -> Tensor:
    """[rows, width] of whatever shape, numbers of a row side by side."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()
