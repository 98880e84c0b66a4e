"""One token of several sequences as Triton kernels: what the recurrence takes, and its step.

`kernels.py` has the same for one sequence, and says what EARLY is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..activations import exp, sigmoid, silu
from ..prologue.kernels import load, softplus, store, unit
from ..recurrence.tiles import load_tile, store_tile
from .kernels import erase_vector, moved_on, row, take_over


@triton.jit
def sum_before(conv, taps, rows, columns, left, D, width: tl.constexpr, W: tl.constexpr):
    """A window's sum without the token itself. Taps are read as equal rows, in the layout of the sequences' own."""
    z = tl.zeros((rows.shape[0], columns.shape[0]), tl.float32)
    for i in tl.static_range(W - 1):
        z += load(conv + i * D, rows, columns, (W - 1) * D, left, width) * tap(taps, i, rows, columns, left, width, W)
    return z


@triton.jit
def tap(taps, i: tl.constexpr, rows, columns, left, width: tl.constexpr, W: tl.constexpr):
    """The weights of one place of the window, as equal rows."""
    mask = (rows < left)[:, None] & (columns < width)[None, :]
    return tl.load(taps + rows[:, None] * 0 + columns[None, :] * W + i, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def move_window(conv, x, rows, columns, left, D, width: tl.constexpr, W: tl.constexpr):
    """Move a state's windows on by one token, whose inputs are x. Several threads may hold the same numbers, so none
    may write a place before all have read it."""
    for i in tl.static_range(1, W - 1):
        later = load(conv + i * D, rows, columns, (W - 1) * D, left, width)
        tl.debug_barrier()
        store(conv + (i - 1) * D, rows, columns, (W - 1) * D, left, width, later)
    if W > 1:
        tl.debug_barrier()
        store(conv + (W - 2) * D, rows, columns, (W - 1) * D, left, width, x)


@triton.jit
def operands_kernel(
    x, conv, taps,  # in: [B, rows of `in_proj`]; in and out: [B, W − 1, D]; in: [D, W]
    f_weight, A_log, dt_bias, theta, direction, g_weight, g_bias,
    operands,  # out: [B, H, 4 K + 2 V]: q, k, a and the decay, u and the gate
    x_stride, batch, lambda_max,
    AT_B: tl.constexpr, AT_W: tl.constexpr, AT_F: tl.constexpr, AT_G: tl.constexpr,  # columns of x
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    ERASE: tl.constexpr, WRITE: tl.constexpr, DECAY: tl.constexpr,  # 0: none, 1: one number, 2: one for each channel
    CORRECTED: tl.constexpr, DIRECTED: tl.constexpr, GATE: tl.constexpr, PROJECT: tl.constexpr,
    F_RANK: tl.constexpr, G_RANK: tl.constexpr, ACTIVATION: tl.constexpr,
    EARLY: tl.constexpr, PRECISION: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BF: tl.constexpr, BG: tl.constexpr,
):  # fmt: skip
    """Compute what the step of the recurrence takes, and the output's gate, for BT sequences and one head, whose
    columns of the convolution's state are this program's own: half of the programs have q, k, a and the decay, the
    others u and the gate before its activation."""
    part, h = tl.program_id(0) % 2, tl.program_id(0) // 2 % H
    start = tl.program_id(0) // (2 * H) * BT
    left = batch - start
    rows, keys, values, one = tl.arange(0, BT), tl.arange(0, BK), tl.arange(0, BV), tl.arange(0, 1)
    D: tl.constexpr = 2 * H * K + H * V
    LENGTH: tl.constexpr = 4 * K + 2 * V
    conv += start * (W - 1) * D
    x += start.to(tl.int64) * x_stride
    operands += (start * H + h).to(tl.int64) * LENGTH
    if part == 0:
        at_q, at_k = h * K, (H + h) * K
        z_q = sum_before(conv + at_q, taps + at_q * W, rows, keys, left, D, K, W)
        z_k = sum_before(conv + at_k, taps + at_k * W, rows, keys, left, D, K, W)
        tap_q = tap(taps + at_q * W, W - 1, rows, keys, left, K, W)
        tap_k = tap(taps + at_k * W, W - 1, rows, keys, left, K, W)
        if DECAY == 2:
            f_columns = tl.arange(0, BF)
            f_matrix = load_tile(f_weight + h * K * F_RANK, keys, f_columns, F_RANK, K, F_RANK)
            bias = load(dt_bias + h * K, rows, keys, 0, left, K)
        if DECAY > 0:
            rate = -tl.exp(tl.load(A_log + h).to(tl.float32))
        take_over(EARLY)
        x_q, x_k = load(x + at_q, rows, keys, x_stride, left, K), load(x + at_k, rows, keys, x_stride, left, K)
        if ERASE == 2:
            b_ = load(x + AT_B + h * K, rows, keys, x_stride, left, K)
        else:
            b_ = load(x + AT_B + h, rows, one, x_stride, left, 1)
        if DECAY == 2:
            f_ = load(x + AT_F, rows, f_columns, x_stride, left, F_RANK).to(f_weight.dtype.element_ty)
        elif DECAY == 1:
            f_ = load(x + AT_F + h, rows, one, x_stride, left, 1)
        q_, k_ = unit(silu(z_q + x_q * tap_q)), unit(silu(z_k + x_k * tap_k))
        a_ = erase_vector(
            q_,
            k_,
            sigmoid(b_),
            theta,
            direction,
            h,
            lambda_max,
            rows,
            keys,
            left,
            K,
            CORRECTED,
            DIRECTED,
            GATE,
            PROJECT,
        )
        store(operands, rows, keys, H * LENGTH, left, K, q_)
        store(operands + K, rows, keys, H * LENGTH, left, K, k_)
        store(operands + 2 * K, rows, keys, H * LENGTH, left, K, a_)
        if DECAY == 2:
            f_ = tl.dot(f_, tl.trans(f_matrix), input_precision=PRECISION)
            store(operands + 3 * K, rows, keys, H * LENGTH, left, K, exp(rate * softplus(f_ + bias)))
        elif DECAY == 1:
            decay = exp(rate * softplus(f_ + tl.load(dt_bias + h).to(tl.float32)))
            store(operands + 3 * K, rows, keys, H * LENGTH, left, K, tl.broadcast_to(decay, (BT, BK)))
        move_window(conv + at_q, x_q, rows, keys, left, D, K, W)
        move_window(conv + at_k, x_k, rows, keys, left, D, K, W)
    else:
        at_v = 2 * H * K + h * V
        z_v = sum_before(conv + at_v, taps + at_v * W, rows, values, left, D, V, W)
        tap_v = tap(taps + at_v * W, W - 1, rows, values, left, V, W)
        if G_RANK > 0:
            g_columns = tl.arange(0, BG)
            g_matrix = load_tile(g_weight + h * V * G_RANK, values, g_columns, G_RANK, V, G_RANK)
            gate_bias = load(g_bias + h * V, rows, values, 0, left, V)
        take_over(EARLY)
        x_v = load(x + at_v, rows, values, x_stride, left, V)
        if WRITE == 2:
            w_ = load(x + AT_W + h * V, rows, values, x_stride, left, V)
        else:
            w_ = load(x + (AT_W if WRITE == 1 else AT_B) + h, rows, one, x_stride, left, 1)
        if G_RANK > 0:
            gate = load(x + AT_G, rows, g_columns, x_stride, left, G_RANK).to(g_weight.dtype.element_ty)
        elif ACTIVATION > 0:
            gate = load(x + AT_G + h * V, rows, values, x_stride, left, V)
        u_ = silu(z_v + x_v * tap_v) * sigmoid(w_)
        store(operands + 4 * K, rows, values, H * LENGTH, left, V, u_)
        if G_RANK > 0:
            gate = tl.dot(gate, tl.trans(g_matrix), input_precision=PRECISION) + gate_bias
        if ACTIVATION > 0:
            store(operands + 4 * K + V, rows, values, H * LENGTH, left, V, gate)
        move_window(conv + at_v, x_v, rows, values, left, D, V, W)


@triton.jit
def step_kernel(
    operands, states,  # in: [lanes, 4 K + 2 V]; in and out: [lanes, K, V]
    y, scale,  # out: [lanes, V]
    K: tl.constexpr, V: tl.constexpr, DECAY: tl.constexpr, SLICES: tl.constexpr,
    EARLY: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Move some columns of a state on by one token, for one lane (a sequence and a head)."""
    part, lane = tl.program_id(0) % SLICES, (tl.program_id(0) // SLICES).to(tl.int64)
    keys, values = tl.arange(0, BK), part * BV + tl.arange(0, BV)
    states += lane * K * V
    S = load_tile(states, keys, values, V, K, V)
    take_over(EARLY)
    operands += lane * (4 * K + 2 * V)
    q_, k_, a_ = row(operands, keys, K), row(operands + K, keys, K), row(operands + 2 * K, keys, K)
    u_ = row(operands + 4 * K, values, V)
    if DECAY > 0:
        S *= row(operands + 3 * K, keys, K)[:, None]
    S, o = moved_on(S, q_, k_, a_, u_)
    store_tile(states, keys, values, V, K, V, S)
    tl.store(y + lane * V + values, (o * scale).to(y.dtype.element_ty), mask=values < V)
