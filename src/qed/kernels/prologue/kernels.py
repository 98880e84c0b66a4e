"""The prologue as Triton kernels. The tokens of all sequences lie one behind the other; a program has a stretch of them
and all channels of one head.

A token's earlier neighbours are read again for every tap; they come from the first-level cache, because the program has
just read them. What is the same for all tokens is read as a tile of equal rows, so that it has the same layout as the
tokens' own tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..activations import exp, sigmoid, silu, silu_gradient

EPS = tl.constexpr(1e-6)  # of `l2_normalize`


@triton.jit
def load(x, rows, columns, stride, left, width: tl.constexpr):
    """Load some rows and columns of x [left, width], in float32; zeros outside it."""
    mask = ((rows >= 0) & (rows < left))[:, None] & (columns < width)[None, :]
    return tl.load(x + rows[:, None] * stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store(to, rows, columns, stride, left, width: tl.constexpr, x):
    """Store x as some rows and columns of a matrix [left, width]; what is outside it is left out."""
    mask = (rows < left)[:, None] & (columns < width)[None, :]
    tl.store(to + rows[:, None] * stride + columns[None, :], x.to(to.dtype.element_ty), mask=mask)


@triton.jit
def window_sum(
    x, taps, state, place, owner, rows, columns, stride, left, D,
    width: tl.constexpr, W: tl.constexpr, HAS_STATE: tl.constexpr,
):  # fmt: skip
    """Σ_s taps[W − 1 − s] · x_{t−s}, where the inputs before a sequence's first token (place = 0) are its state."""
    z = tl.zeros((rows.shape[0], columns.shape[0]), tl.float32)
    inside = columns < width
    for s in tl.static_range(W):
        there = ((place >= s) & (rows < left))[:, None] & inside[None, :]
        found = tl.load(x + (rows - s)[:, None] * stride + columns[None, :], mask=there, other=0.0).to(tl.float32)
        if HAS_STATE and s > 0:
            kept = state + (owner * (W - 1) + place - s + W - 1)[:, None] * D + columns[None, :]
            earlier = ((place < s) & (rows < left))[:, None] & inside[None, :]
            found += tl.load(kept, mask=earlier, other=0.0).to(tl.float32)
        z += found * load(taps + (W - 1 - s) * D, rows, columns, 0, left, width)
    return z


@triton.jit
def unit(x):
    """x divided by its L2 norm, row by row, as in `l2_normalize`."""
    return x * tl.rsqrt(tl.sum(x * x, 1) + EPS)[:, None]


@triton.jit
def softplus(x):
    """log(1 + exp x) = max(x, 0) + 2 artanh(y / (2 + y)) with y = exp(−|x|), by its series. A GPU's logarithm has
    few digits near 1, where the smallest decays come from, with which a model remembers longest."""
    y = exp(-tl.abs(x))
    r = tl.rsqrt(2.0 + y)  # as in `sigmoid`
    z = y * (r * r)  # at most 1 / 3
    s = z * z
    series = 1.0 + s * (1 / 3 + s * (1 / 5 + s * (1 / 7 + s * (1 / 9 + s * (1 / 11 + s * (1 / 13))))))
    return tl.maximum(x, 0.0) + 2.0 * z * series


@triton.jit
def correction(source, k, b, GATE: tl.constexpr, PROJECT: tl.constexpr):
    """The correction, which λ multiplies in a."""
    if GATE:
        source = b * source
    if PROJECT:
        source -= k * tl.sum(k * source, 1)[:, None]
    return source


@triton.jit
def operands_kernel(
    qkv, taps, state, places, owners, b, w, f, A_log, dt_bias, strength, direction,  # in
    q, k, a, u, g,  # out
    qkv_stride, b_stride, w_stride, f_stride, all_tokens, tokens,
    PACKED: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, HAS_STATE: tl.constexpr,
    ERASE: tl.constexpr, WRITE: tl.constexpr, DECAY: tl.constexpr,  # 0: none, 1: one number, 2: one for each channel
    CORRECTED: tl.constexpr, DIRECTED: tl.constexpr, GATE: tl.constexpr, PROJECT: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Compute the operands of the recurrence for BT tokens and one head."""
    h, start = tl.program_id(0) % H, tl.program_id(0) // H * BT
    left = all_tokens - start
    rows, keys, values, one = tl.arange(0, BT), tl.arange(0, BK), tl.arange(0, BV), tl.arange(0, 1)
    if PACKED:
        place = tl.load(places + start + rows, mask=rows < left, other=0)
        owner = tl.load(owners + start + rows, mask=rows < left, other=0).to(tl.int64)
    else:
        place, owner = (start + rows) % tokens, ((start + rows) // tokens).to(tl.int64)
    D: tl.constexpr = 2 * H * K + H * V
    first = start.to(tl.int64)
    qkv += first * qkv_stride
    own = (first * H + h) * K

    at = (H + h) * K
    z = window_sum(qkv + at, taps + at, state + at, place, owner, rows, keys, qkv_stride, left, D, K, W, HAS_STATE)
    k_ = unit(silu(z))
    store(k + own, rows, keys, H * K, left, K, k_)
    at = h * K
    z = window_sum(qkv + at, taps + at, state + at, place, owner, rows, keys, qkv_stride, left, D, K, W, HAS_STATE)
    q_ = unit(silu(z))
    store(q + own, rows, keys, H * K, left, K, q_)

    if ERASE == 2:
        b_ = sigmoid(load(b + first * b_stride + h * K, rows, keys, b_stride, left, K))
    else:
        b_ = sigmoid(load(b + first * b_stride + h, rows, one, b_stride, left, 1))
    a_ = b_ * k_
    if CORRECTED:
        source = load(direction + h * K, rows, keys, 0, left, K) if DIRECTED else q_
        a_ += tl.load(strength + h).to(tl.float32) * correction(source, k_, b_, GATE, PROJECT)
    store(a + own, rows, keys, H * K, left, K, a_)

    at = 2 * H * K + h * V
    z = window_sum(qkv + at, taps + at, state + at, place, owner, rows, values, qkv_stride, left, D, V, W, HAS_STATE)
    u_ = silu(z)
    if WRITE == 2:
        u_ *= sigmoid(load(w + first * w_stride + h * V, rows, values, w_stride, left, V))
    elif WRITE == 1:
        u_ *= sigmoid(load(w + first * w_stride + h, rows, one, w_stride, left, 1))
    else:
        u_ *= b_
    store(u + (first * H + h) * V, rows, values, H * V, left, V, u_)

    if DECAY > 0:
        rate = -tl.exp(tl.load(A_log + h).to(tl.float32))
        if DECAY == 2:
            f_ = load(f + first * f_stride + h * K, rows, keys, f_stride, left, K)
            f_ += load(dt_bias + h * K, rows, keys, 0, left, K)
            store(g + own, rows, keys, H * K, left, K, rate * softplus(f_))
        else:
            f_ = load(f + first * f_stride + h, rows, one, f_stride, left, 1) + tl.load(dt_bias + h).to(tl.float32)
            store(g + first * H + h, rows, one, H, left, 1, rate * softplus(f_))


@triton.jit
def unit_gradient(y, d):
    """The gradient of y, from that of unit(y)."""
    r = tl.rsqrt(tl.sum(y * y, 1) + EPS)[:, None]
    return r * (d - y * (r * r * tl.sum(y * d, 1)[:, None]))


@triton.jit
def gradients_kernel(
    dq, dk, da, du, dg,  # in
    qkv, taps, b, w, f, A_log, dt_bias, strength, direction,
    dz, db, dw, df,  # out: of the convolution's sums, like qkv, and of b, w and f
    d_A_log, d_dt_bias, d_strength,  # out: one sum for every stretch of tokens
    qkv_stride, b_stride, w_stride, f_stride, db_stride, dw_stride, df_stride, sums_stride, all_tokens, tokens,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    ERASE: tl.constexpr, WRITE: tl.constexpr, DECAY: tl.constexpr,
    CORRECTED: tl.constexpr, DIRECTED: tl.constexpr, GATE: tl.constexpr, PROJECT: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Recompute what `operands_kernel` computes, and go from the gradients of its outputs back to those of the
    convolution's sums, of the gates and of the parameters."""
    h, stretch = tl.program_id(0) % H, tl.program_id(0) // H
    start = stretch * BT
    left = all_tokens - start
    rows, keys, values, one = tl.arange(0, BT), tl.arange(0, BK), tl.arange(0, BV), tl.arange(0, 1)
    place, owner = (start + rows) % tokens, rows
    D: tl.constexpr = 2 * H * K + H * V
    first = start.to(tl.int64)
    qkv += first * qkv_stride
    dz += first * D
    own, own_v = (first * H + h) * K, (first * H + h) * V
    to_sums = stretch.to(tl.int64) * sums_stride

    at = (H + h) * K
    z_k = window_sum(qkv + at, taps + at, taps, place, owner, rows, keys, qkv_stride, left, D, K, W, False)
    z_q = window_sum(qkv + h * K, taps + h * K, taps, place, owner, rows, keys, qkv_stride, left, D, K, W, False)
    k_, q_ = unit(silu(z_k)), unit(silu(z_q))
    dk_, dq_ = load(dk + own, rows, keys, H * K, left, K), load(dq + own, rows, keys, H * K, left, K)
    da_ = load(da + own, rows, keys, H * K, left, K)
    if ERASE == 2:
        b_ = sigmoid(load(b + first * b_stride + h * K, rows, keys, b_stride, left, K))
    else:
        b_ = sigmoid(load(b + first * b_stride + h, rows, one, b_stride, left, 1))

    db_ = da_ * k_
    dk_ += da_ * b_
    if CORRECTED:
        source = load(direction + h * K, rows, keys, 0, left, K) if DIRECTED else q_
        gated = b_ * source if GATE else source
        lambda_ = tl.load(strength + h).to(tl.float32)
        d_gated = lambda_ * da_
        d_lambda = da_ * gated
        if PROJECT:  # c = x − k (kᵀx)
            along, d_along = tl.sum(k_ * gated, 1)[:, None], tl.sum(k_ * da_, 1)[:, None]
            dk_ -= lambda_ * (along * da_ + d_along * gated)
            d_gated -= lambda_ * d_along * k_
            d_lambda -= along * (k_ * da_)
        tl.store(d_strength + to_sums + h, tl.sum(tl.sum(d_lambda, 1), 0))
        if GATE:
            db_ += d_gated * source
            d_gated = b_ * d_gated
        if not DIRECTED:
            dq_ += d_gated
    store(dz + at, rows, keys, D, left, K, silu_gradient(z_k, unit_gradient(silu(z_k), dk_)))
    store(dz + h * K, rows, keys, D, left, K, silu_gradient(z_q, unit_gradient(silu(z_q), dq_)))

    at = 2 * H * K + h * V
    z_v = window_sum(qkv + at, taps + at, taps, place, owner, rows, values, qkv_stride, left, D, V, W, False)
    v_ = silu(z_v)
    du_ = load(du + own_v, rows, values, H * V, left, V)
    if WRITE == 2:
        w_ = sigmoid(load(w + first * w_stride + h * V, rows, values, w_stride, left, V))
        store(dw + first * dw_stride + h * V, rows, values, dw_stride, left, V, du_ * v_ * (w_ * (1.0 - w_)))
        du_ *= w_
    elif WRITE == 1:
        w_ = sigmoid(load(w + first * w_stride + h, rows, one, w_stride, left, 1))
        dw_ = tl.sum(du_ * v_, 1)[:, None] * (w_ * (1.0 - w_))
        store(dw + first * dw_stride + h, rows, one, dw_stride, left, 1, dw_)
        du_ *= w_
    store(dz + at, rows, values, D, left, V, silu_gradient(z_v, du_ * b_ if WRITE == 0 else du_))
    if ERASE == 2:
        store(db + first * db_stride + h * K, rows, keys, db_stride, left, K, db_ * (b_ * (1.0 - b_)))
    else:
        d_gate = tl.sum(db_, 1)
        if WRITE == 0:
            d_gate += tl.sum(du_ * v_, 1)
        store(db + first * db_stride + h, rows, one, db_stride, left, 1, d_gate[:, None] * (b_ * (1.0 - b_)))

    if DECAY > 0:
        rate = -tl.exp(tl.load(A_log + h).to(tl.float32))
        if DECAY == 2:
            dg_ = load(dg + own, rows, keys, H * K, left, K)
            x = load(f + first * f_stride + h * K, rows, keys, f_stride, left, K)
            x += load(dt_bias + h * K, rows, keys, 0, left, K)
            dx = rate * dg_ * sigmoid(x)
            store(df + first * df_stride + h * K, rows, keys, df_stride, left, K, dx)
            tl.store(d_dt_bias + to_sums + h * K + keys, tl.sum(dx, 0), mask=keys < K)
        else:
            dg_ = load(dg + first * H + h, rows, one, H, left, 1)
            x = load(f + first * f_stride + h, rows, one, f_stride, left, 1) + tl.load(dt_bias + h).to(tl.float32)
            dx = rate * dg_ * sigmoid(x)
            store(df + first * df_stride + h, rows, one, df_stride, left, 1, dx)
            tl.store(d_dt_bias + to_sums + h, tl.sum(tl.sum(dx, 1), 0))
        tl.store(d_A_log + to_sums + h, tl.sum(tl.sum(dg_ * (rate * softplus(x)), 1), 0))
