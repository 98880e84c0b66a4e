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
def window(conv, rows, columns, left, D, width: tl.constexpr, W: tl.constexpr):
    """The inputs of the W − 1 tokens before this one, as tiles of equal rows, from the oldest on."""
    found = ()
    for i in tl.static_range(W - 1):
        found += (load(conv + i * D, rows, columns, (W - 1) * D, left, width),)
    return found


@triton.jit
def taps_of(taps, rows, columns, left, width: tl.constexpr, W: tl.constexpr):
    """The weights of all places of the window, as equal rows, in the layout of the sequences' own."""
    found = ()
    mask = (rows < left)[:, None] & (columns < width)[None, :]
    for i in tl.static_range(W):
        weight = tl.load(taps + rows[:, None] * 0 + columns[None, :] * W + i, mask=mask, other=0.0)
        found += (weight.to(tl.float32),)
    return found


@triton.jit
def convolved(before, x, taps, W: tl.constexpr):
    """The convolution's sum for a token whose input is x."""
    z = x * taps[W - 1]
    for i in tl.static_range(W - 1):
        z += before[i] * taps[i]
    return z


@triton.jit
def move_window(conv, before, x, rows, columns, left, D, width: tl.constexpr, W: tl.constexpr):
    """Move a state's windows on by one token, whose inputs are x. Several threads may hold the same numbers, so all
    must have read them before."""
    for i in tl.static_range(1, W - 1):
        store(conv + (i - 1) * D, rows, columns, (W - 1) * D, left, width, before[i])
    if W > 1:
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
    F_RANK: tl.constexpr, G_RANK: tl.constexpr, ACTIVATION: tl.constexpr, PARTS: tl.constexpr,
    EARLY: tl.constexpr, PRECISION: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BF: tl.constexpr, BG: tl.constexpr,
):  # fmt: skip
    """Compute what the step of the recurrence takes, and the output's gate, for BT sequences and one head, whose
    columns of the convolution's state are this program's own. Programs have one of PARTS each: q, k and a; u, with a
    decay for the head and a gate that is not projected; a decay for each channel; and the gate before its activation if
    it is projected."""
    part, h = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS % H
    start = tl.program_id(0) // (PARTS * H) * BT
    left = batch - start
    rows, keys, values, one = tl.arange(0, BT), tl.arange(0, BK), tl.arange(0, BV), tl.arange(0, 1)
    D: tl.constexpr = 2 * H * K + H * V
    LENGTH: tl.constexpr = 4 * K + 2 * V
    conv += start * (W - 1) * D
    x += start.to(tl.int64) * x_stride
    operands += (start * H + h).to(tl.int64) * LENGTH
    if part == 0:
        at_q, at_k = h * K, (H + h) * K
        before_q = window(conv + at_q, rows, keys, left, D, K, W)
        before_k = window(conv + at_k, rows, keys, left, D, K, W)
        taps_q = taps_of(taps + at_q * W, rows, keys, left, K, W)
        taps_k = taps_of(taps + at_k * W, rows, keys, left, K, W)
        take_over(EARLY)
        x_q, x_k = load(x + at_q, rows, keys, x_stride, left, K), load(x + at_k, rows, keys, x_stride, left, K)
        if ERASE == 2:
            b_ = load(x + AT_B + h * K, rows, keys, x_stride, left, K)
        else:
            b_ = load(x + AT_B + h, rows, one, x_stride, left, 1)
        q_, k_ = unit(silu(convolved(before_q, x_q, taps_q, W))), unit(silu(convolved(before_k, x_k, taps_k, W)))
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
        tl.debug_barrier()
        move_window(conv + at_q, before_q, x_q, rows, keys, left, D, K, W)
        move_window(conv + at_k, before_k, x_k, rows, keys, left, D, K, W)
    elif part == 1:
        at_v = 2 * H * K + h * V
        before_v = window(conv + at_v, rows, values, left, D, V, W)
        taps_v = taps_of(taps + at_v * W, rows, values, left, V, W)
        if DECAY == 1:
            rate = -tl.exp(tl.load(A_log + h).to(tl.float32))
        take_over(EARLY)
        x_v = load(x + at_v, rows, values, x_stride, left, V)
        if WRITE == 2:
            w_ = load(x + AT_W + h * V, rows, values, x_stride, left, V)
        else:
            w_ = load(x + (AT_W if WRITE == 1 else AT_B) + h, rows, one, x_stride, left, 1)
        if ACTIVATION > 0 and G_RANK == 0:
            store(
                operands + 4 * K + V, rows, values, H * LENGTH, left, V,
                load(x + AT_G + h * V, rows, values, x_stride, left, V),
            )  # fmt: skip
        if DECAY == 1:
            f_ = load(x + AT_F + h, rows, one, x_stride, left, 1)
            decay = exp(rate * softplus(f_ + tl.load(dt_bias + h).to(tl.float32)))
            store(operands + 3 * K, rows, keys, H * LENGTH, left, K, tl.broadcast_to(decay, (BT, BK)))
        store(
            operands + 4 * K, rows, values, H * LENGTH, left, V, silu(convolved(before_v, x_v, taps_v, W)) * sigmoid(w_)
        )
        tl.debug_barrier()
        move_window(conv + at_v, before_v, x_v, rows, values, left, D, V, W)
    elif part == 2 and DECAY == 2:
        f_columns = tl.arange(0, BF)
        f_matrix = load_tile(f_weight + h * K * F_RANK, keys, f_columns, F_RANK, K, F_RANK)
        bias = load(dt_bias + h * K, rows, keys, 0, left, K)
        rate = -tl.exp(tl.load(A_log + h).to(tl.float32))
        take_over(EARLY)
        f_ = load(x + AT_F, rows, f_columns, x_stride, left, F_RANK).to(f_weight.dtype.element_ty)
        f_ = tl.dot(f_, tl.trans(f_matrix), input_precision=PRECISION)
        store(operands + 3 * K, rows, keys, H * LENGTH, left, K, exp(rate * softplus(f_ + bias)))
    elif G_RANK > 0:
        g_columns = tl.arange(0, BG)
        g_matrix = load_tile(g_weight + h * V * G_RANK, values, g_columns, G_RANK, V, G_RANK)
        gate_bias = load(g_bias + h * V, rows, values, 0, left, V)
        take_over(EARLY)
        gate = load(x + AT_G, rows, g_columns, x_stride, left, G_RANK).to(g_weight.dtype.element_ty)
        gate = tl.dot(gate, tl.trans(g_matrix), input_precision=PRECISION) + gate_bias
        store(operands + 4 * K + V, rows, values, H * LENGTH, left, V, gate)


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
