"""One token of one sequence as Triton kernels: a matrix times a vector, and a mixer between its first and last matrix.

With EARLY (from Hopper on) a kernel starts while the kernel before it still runs. Until that one is done, it reads only
what no other kernel writes for the same token: its weights, and its own states. After that it loads all it needs at
once, before the first sum over threads: whatever is loaded behind one is waited for once more.
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
def scales_of_heads(squares, head, inside, V: tl.constexpr, SLICES: tl.constexpr, EPS: tl.constexpr):
    """1 / √(mean square + EPS) of heads, whose sums of squares lie in SLICES parts side by side."""
    total = tl.load(squares + head * SLICES, mask=inside, other=1.0)
    for s in tl.static_range(1, SLICES):
        total += tl.load(squares + head * SLICES + s, mask=inside, other=0.0)
    return tl.rsqrt(total / V + EPS)


@triton.jit
def vector_kernel(
    x, norm, weight, residual, squares,  # in: [M], [M], [N or 2 N, M], [N], [M / V, SLICES]
    taps, conv, y,  # in: [D, W]; in and out: [W − 1, D]; out: [N]
    N: tl.constexpr, M: tl.constexpr, EPS: tl.constexpr, V: tl.constexpr, SLICES: tl.constexpr,
    D: tl.constexpr, W: tl.constexpr,
    NORM: tl.constexpr, SWIGLU: tl.constexpr, RESIDUAL: tl.constexpr, EARLY: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Compute W x, W RMSNorm(x), residual + W x, or, with SWIGLU, silu(W_gate x) ⊙ W_up x, where W_gate stands above
    W_up in one matrix. A program has some whole rows of the matrix, which are being loaded while it computes the norm
    of x. With SLICES, x is first divided by the root mean square of each V of its numbers, which is given by `squares`.
    The first D rows are convolved and pass through SiLU; their windows move on by one token."""
    rows, columns = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BM)
    matrix = load_tile(weight, rows, columns, M, N, M)
    if SWIGLU:
        upper = load_tile(weight + N * M, rows, columns, M, N, M)
    if D > 0:
        i, inside = tl.arange(0, BW)[:, None], (rows < D)[None, :]
        window = tl.load(conv + i * D + rows[None, :], mask=inside & (i < W - 1), other=0.0)
        earlier = tl.load(taps + rows[None, :] * W + i, mask=inside & (i < W - 1), other=0.0).to(tl.float32)
        last = tl.load(taps + rows * W + W - 1, mask=rows < D, other=0.0).to(tl.float32)
    if NORM:
        norm_ = row(norm, columns, M)
    take_over(EARLY)
    x_ = row(x, columns, M)
    if RESIDUAL:
        residual_ = row(residual, rows, N)
    if SLICES > 0:
        x_ *= scales_of_heads(squares, columns // V, columns < M, V, SLICES, EPS)
    if NORM:
        x_ *= tl.rsqrt(tl.sum(x_ * x_, 0) / M + EPS) * norm_
    y_ = tl.sum(matrix.to(tl.float32) * x_[None, :], 1)
    if SWIGLU:
        y_ *= sigmoid(y_) * tl.sum(upper.to(tl.float32) * x_[None, :], 1)
    if RESIDUAL:
        y_ += residual_
    if D > 0:
        now = y_.to(conv.dtype.element_ty)
        z = tl.sum(window.to(tl.float32) * earlier, 0) + now.to(tl.float32) * last
        y_ = tl.where(rows < D, silu(z), y_)
        tl.debug_barrier()  # several threads may hold the same column: none may write before all have read
        tl.store(conv + (i - 1) * D + rows[None, :], window, mask=inside & (i > 0) & (i < W - 1))
        tl.store(conv + (W - 2) * D + rows, now, mask=(rows < D) & (W > 1))
    tl.store(y + rows, y_.to(y.dtype.element_ty), mask=rows < N)


@triton.jit
def erase_vector(
    q, k, b, theta, direction, h, lambda_max, rows, keys, left, K: tl.constexpr,
    CORRECTED: tl.constexpr, DIRECTED: tl.constexpr, GATE: tl.constexpr, PROJECT: tl.constexpr,
):  # fmt: skip
    """a, from rows of q, k and the erase gate b."""
    a = b * k
    if CORRECTED:
        source = load(direction + h * K, rows, keys, 0, left, K) if DIRECTED else q
        strength = lambda_max * sigmoid(tl.load(theta + h).to(tl.float32))
        a += strength * correction(source, k, b, GATE, PROJECT)
    return a


@triton.jit
def moved_on(S, q, k, a, u):
    """The state after a token, and what q reads of it. Both sums over the old state's rows are independent of each
    other: Sᵀq after the token is Sᵀq before it, and kᵀq of what the token wrote."""
    left = u - tl.sum(a[:, None] * S, 0)
    o = tl.sum(q[:, None] * S, 0) + tl.sum(q * k, 0) * left
    return S + k[:, None] * left[None, :], o


@triton.jit
def mixer_kernel(
    x, states,  # in: [rows of `in_proj`], q, k and v convolved; in and out: [H, K, V]
    f_weight, A_log, dt_bias, theta, direction, g_weight, g_bias, norm,
    y, squares,  # out: [H · V], [H, SLICES]
    scale, lambda_max,
    AT_B: tl.constexpr, AT_W: tl.constexpr, AT_F: tl.constexpr, AT_G: tl.constexpr,  # columns of x
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    ERASE: tl.constexpr, WRITE: tl.constexpr, DECAY: tl.constexpr,  # 0: none, 1: one number, 2: one for each channel
    CORRECTED: tl.constexpr, DIRECTED: tl.constexpr, GATE: tl.constexpr, PROJECT: tl.constexpr,
    F_RANK: tl.constexpr, G_RANK: tl.constexpr, ACTIVATION: tl.constexpr, SLICES: tl.constexpr, EARLY: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BF: tl.constexpr, BG: tl.constexpr,
):  # fmt: skip
    """Compute everything between the convolution and the last matrix of a mixer, for one sequence, but the division by
    the root mean square of a head's outputs: a program has some of their columns, and leaves the sum of their squares.
    """
    h, part = tl.program_id(0) // SLICES, tl.program_id(0) % SLICES
    keys, values, one = tl.arange(0, BK), part * BV + tl.arange(0, BV), tl.arange(0, 1)
    states += h * K * V
    S = load_tile(states, keys, values, V, K, V)
    if F_RANK > 0:
        f_columns = tl.arange(0, BF)
        f_matrix = load_tile(f_weight + h * K * F_RANK, keys, f_columns, F_RANK, K, F_RANK)
    if DECAY > 0:
        rate = -tl.exp(tl.load(A_log + h).to(tl.float32))
        bias = row(dt_bias + h * K, keys, K) if DECAY == 2 else tl.load(dt_bias + h).to(tl.float32)
    factor = row(norm, values, V)
    if G_RANK > 0:
        g_columns = tl.arange(0, BG)
        g_matrix = load_tile(g_weight + h * V * G_RANK, values, g_columns, G_RANK, V, G_RANK)
        gate_bias = row(g_bias + h * V, values, V)
    take_over(EARLY)

    q_ = load(x + h * K, one, keys, 0, 1, K)
    k_ = load(x + (H + h) * K, one, keys, 0, 1, K)
    u_ = row(x + 2 * H * K + h * V, values, V)
    b_ = load(x + AT_B + h * K, one, keys, 0, 1, K) if ERASE == 2 else load(x + AT_B + h, one, one, 0, 1, 1)
    if WRITE == 2:
        w_ = row(x + AT_W + h * V, values, V)
    else:
        w_ = tl.load(x + (AT_W if WRITE == 1 else AT_B) + h).to(tl.float32)
    if DECAY > 0:
        f_ = row(x + AT_F, f_columns, F_RANK) if DECAY == 2 else tl.load(x + AT_F + h).to(tl.float32)
    if ACTIVATION > 0:
        gate = row(x + AT_G, g_columns, G_RANK) if G_RANK > 0 else row(x + AT_G + h * V, values, V)

    if DECAY == 2:
        S *= exp(rate * softplus(tl.sum(f_matrix.to(tl.float32) * f_[None, :], 1) + bias))[:, None]
    elif DECAY == 1:
        S *= exp(rate * softplus(f_ + bias))
    q_, k_ = unit(q_), unit(k_)
    a_ = erase_vector(
        q_, k_, sigmoid(b_), theta, direction, h, lambda_max, one, keys, 1, K, CORRECTED, DIRECTED, GATE, PROJECT
    )
    q_, k_, a_ = tl.reshape(q_, (BK,)), tl.reshape(k_, (BK,)), tl.reshape(a_, (BK,))
    S, o = moved_on(S, q_, k_, a_, u_ * sigmoid(w_))
    store_tile(states, keys, values, V, K, V, S)
    o *= scale
    tl.store(squares + h * SLICES + part, tl.sum(o * o, 0))
    if ACTIVATION > 0:
        if G_RANK > 0:
            gate = tl.sum(g_matrix.to(tl.float32) * gate[None, :], 1) + gate_bias
        factor *= (gate if ACTIVATION == 1 else 1.0) * sigmoid(gate)
    tl.store(y + h * V + values, (o * factor).to(y.dtype.element_ty), mask=values < V)


@triton.jit
def likeliest_kernel(logits, tokens, N: tl.constexpr, EARLY: tl.constexpr, BLOCK: tl.constexpr):
    """Write the index of the largest of N numbers, for one row of them; the first where there are several. NaN counts
    as infinity."""
    columns = tl.arange(0, BLOCK)
    logits += tl.program_id(0).to(tl.int64) * N
    take_over(EARLY)
    best = tl.load(logits + columns, mask=columns < N, other=float("-inf")).to(tl.float32)
    best = tl.where(best == best, best, float("inf"))
    at = columns
    for start in tl.static_range(BLOCK, N, BLOCK):
        x = tl.load(logits + start + columns, mask=start + columns < N, other=float("-inf")).to(tl.float32)
        x = tl.where(x == x, x, float("inf"))
        at = tl.where(x > best, start + columns, at)
        best = tl.maximum(x, best)
    found = tl.min(tl.where(best == tl.max(best, 0), at, N), 0)
    tl.store(tokens + tl.program_id(0), found.to(tl.int64))
