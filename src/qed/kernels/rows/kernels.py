"""RMSNorm, RMSNorm times an activated gate, and SwiGLU's product with its gradient, as Triton kernels.

Each kernel reads its inputs once and writes its outputs once. `layers/norm.py` and `layers/mlp.py` define what they
compute.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..activations import sigmoid, silu_gradient


@triton.jit
def norm_kernel(
    x, gate, weight, y, x_stride, gate_stride, rows,
    WIDTH: tl.constexpr, EPS: tl.constexpr, ACTIVATION: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute the norm of BR whole rows of x, times the activated gate if there is an ACTIVATION."""
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
    """Write the product `y`, or with BACK the gradient `d_both`. A program has a stretch of the numbers as they lie in
    memory, not whole rows, because the width of a row is seldom a multiple of a large tile's width."""
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
