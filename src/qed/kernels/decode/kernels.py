"""One token as Triton kernels: a matrix times a token, and all of a mixer between its first and last matrix.

With EARLY (from Hopper on) a kernel starts while the kernel before it still runs. Until that one is done, it reads only
what no other kernel writes for the same token: its weights, and its own states.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..activations import exp, sigmoid, silu
from ..prologue.kernels import correction, load, softplus, unit
from ..recurrence.tiles import load_tile, store_tile


@triton.jit
def take_over(EARLY: tl.constexpr):
    """Let the next kernel start, and wait until the kernel before has written everything."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def row(x, columns, width: tl.constexpr):
    """Load some columns of one row, in float32; zeros outside it."""
    return tl.load(x + columns, mask=columns < width, other=0.0).to(tl.float32)


@triton.jit
def vector_kernel(
    x, norm, weight, residual, y,  # in: [M], [M], [N or 2 N, M], [N]; out: [N]
    N: tl.constexpr, M: tl.constexpr, EPS: tl.constexpr,
    NORM: tl.constexpr, SWIGLU: tl.constexpr, RESIDUAL: tl.constexpr, EARLY: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Compute W x, W RMSNorm(x), residual + W x, or, with SWIGLU, silu(W_gate x) ⊙ W_up x, where W_gate stands above
    W_up in one matrix. A program has some whole rows of the matrix, which are being loaded while it computes the norm
    of x."""
    rows, columns = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BM)
    matrix = load_tile(weight, rows, columns, M, N, M)
    if SWIGLU:
        upper = load_tile(weight + N * M, rows, columns, M, N, M)
    take_over(EARLY)
    x_ = row(x, columns, M)
    if NORM:
        x_ *= tl.rsqrt(tl.sum(x_ * x_, 0) / M + EPS) * row(norm, columns, M)
    y_ = tl.sum(matrix.to(tl.float32) * x_[None, :], 1)
    if SWIGLU:
        y_ *= sigmoid(y_) * tl.sum(upper.to(tl.float32) * x_[None, :], 1)
    if RESIDUAL:
        y_ += row(residual, rows, N)
    tl.store(y + rows, y_.to(y.dtype.element_ty), mask=rows < N)


@triton.jit
def convolved(x, taps, state, columns, D, width: tl.constexpr, W: tl.constexpr, BW: tl.constexpr):
    """Return SiLU of the window's sum, and move the window in the state on by one token. Several threads may hold the
    same column, so none may write before all have read."""
    i = tl.arange(0, BW)[:, None]
    inside = (columns < width)[None, :]
    window = tl.load(state + i * D + columns[None, :], mask=inside & (i < W - 1), other=0.0)
    window += tl.load(x + i * 0 + columns[None, :], mask=inside & (i == W - 1), other=0.0)
    weight = tl.load(taps + columns[None, :] * W + i, mask=inside & (i < W), other=0.0)
    z = tl.sum(window.to(tl.float32) * weight.to(tl.float32), 0)
    tl.debug_barrier()
    tl.store(state + (i - 1) * D + columns[None, :], window, mask=inside & (i > 0) & (i < W))
    return silu(z)[None, :]


@triton.jit
def mixer_kernel(
    x, conv, states,  # in: [B, rows of `in_proj`]; in and out: [B, W − 1, D], [B, H, K, V]
    taps, f_weight, A_log, dt_bias, theta, direction, g_weight, g_bias, norm, y,  # y, out: [B, H · V]
    x_stride, scale, lambda_max,
    AT_B: tl.constexpr, AT_W: tl.constexpr, AT_F: tl.constexpr, AT_G: tl.constexpr,  # columns of x
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    ERASE: tl.constexpr, WRITE: tl.constexpr, DECAY: tl.constexpr,  # 0: none, 1: one number, 2: one for each channel
    CORRECTED: tl.constexpr, DIRECTED: tl.constexpr, GATE: tl.constexpr, PROJECT: tl.constexpr,
    F_RANK: tl.constexpr, G_RANK: tl.constexpr, ACTIVATION: tl.constexpr, EPS: tl.constexpr,
    EARLY: tl.constexpr, AHEAD: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BW: tl.constexpr, BF: tl.constexpr, BG: tl.constexpr,
):  # fmt: skip
    """Compute everything between the first and the last matrix of a mixer, for one head of one sequence, whose columns
    of both states are this program's own. With AHEAD, all weights and states are loaded before x is there. Without it,
    registers are left for a second program on the same multiprocessor."""
    h, lane = tl.program_id(0) % H, tl.program_id(0).to(tl.int64)
    keys, values, one = tl.arange(0, BK), tl.arange(0, BV), tl.arange(0, 1)
    D: tl.constexpr = 2 * H * K + H * V
    states += lane * K * V
    if AHEAD:
        S = load_tile(states, keys, values, V, K, V)
    if F_RANK > 0:
        f_columns = tl.arange(0, BF)
        f_matrix = load_tile(f_weight + h * K * F_RANK, keys, f_columns, F_RANK, K, F_RANK)
    if G_RANK > 0:
        g_columns = tl.arange(0, BG)
        if AHEAD:
            g_matrix = load_tile(g_weight + h * V * G_RANK, values, g_columns, G_RANK, V, G_RANK)
    take_over(EARLY)
    x += lane // H * x_stride
    conv += lane // H * (W - 1) * D

    at = h * K
    q_ = unit(convolved(x + at, taps + at * W, conv + at, keys, D, K, W, BW))
    at = (H + h) * K
    k_ = unit(convolved(x + at, taps + at * W, conv + at, keys, D, K, W, BW))
    at = 2 * H * K + h * V
    u_ = convolved(x + at, taps + at * W, conv + at, values, D, V, W, BW)

    b_ = sigmoid(load(x + AT_B + h * K, one, keys, 0, 1, K) if ERASE == 2 else load(x + AT_B + h, one, one, 0, 1, 1))
    if WRITE == 2:
        u_ *= sigmoid(load(x + AT_W + h * V, one, values, 0, 1, V))
    else:
        u_ *= sigmoid(load(x + AT_W + h, one, one, 0, 1, 1)) if WRITE == 1 else b_
    a_ = b_ * k_
    if CORRECTED:
        source = load(direction + h * K, one, keys, 0, 1, K) if DIRECTED else q_
        strength = lambda_max * sigmoid(tl.load(theta + h).to(tl.float32))
        a_ += strength * correction(source, k_, b_, GATE, PROJECT)
    if DECAY > 0:
        rate = -tl.exp(tl.load(A_log + h).to(tl.float32))
        if DECAY == 2:
            f_ = tl.sum(f_matrix.to(tl.float32) * row(x + AT_F, f_columns, F_RANK)[None, :], 1)
            decay = exp(rate * softplus(f_ + row(dt_bias + h * K, keys, K)))[:, None]
        else:
            f_ = tl.load(x + AT_F + h).to(tl.float32) + tl.load(dt_bias + h).to(tl.float32)
            decay = exp(rate * softplus(f_))
    if not AHEAD:
        S = load_tile(states, keys, values, V, K, V)
    if DECAY > 0:
        S *= decay

    left = tl.reshape(u_, (BV,)) - tl.sum(tl.reshape(a_, (BK,))[:, None] * S, 0)
    S += tl.reshape(k_, (BK,))[:, None] * left[None, :]
    store_tile(states, keys, values, V, K, V, S)
    o = tl.sum(tl.reshape(q_, (BK,))[:, None] * S, 0) * scale
    o *= tl.rsqrt(tl.sum(o * o, 0) / V + EPS) * row(norm, values, V)
    if ACTIVATION > 0:
        if G_RANK > 0:
            if not AHEAD:
                g_matrix = load_tile(g_weight + h * V * G_RANK, values, g_columns, G_RANK, V, G_RANK)
            gate = tl.sum(g_matrix.to(tl.float32) * row(x + AT_G, g_columns, G_RANK)[None, :], 1)
            gate += row(g_bias + h * V, values, V)
        else:
            gate = row(x + AT_G + h * V, values, V)
        o *= (gate if ACTIVATION == 1 else 1.0) * sigmoid(gate)
    tl.store(y + lane * V + values, o.to(y.dtype.element_ty), mask=values < V)
