"""Three kernels for the backward: the gradient of the states, last chunk first; then the rest, chunk by chunk.

    state_gradients   E = Tᵀ(Pᵀ dO + k̄ dS) = dU    dS₀ = γ_C dS + q̃ᵀ dO − ãᵀ E   grid: columns of V × (sequences × heads)
    pair_gradients    dP = dO Rᵀ    dA = −E Rᵀ                                     grid: chunks × heads
    chunk_gradients   dq̃ = dO S₀ᵀ   dã = −E S₀ᵀ   dk̄ = R dSᵀ; these and the pairs' gradients carried on to q, k, a
                      and g                                                        grid: chunks × heads × columns of K

The gradient of g is a sum over all products that a step's decay is a factor of. Each factor exp(G_i − G_j) gives +z to
G_i and −z to G_j, and g collects from its own token to the chunk's end. What cancels there, cancels exactly only if the
same rounded operands made both sides: z is taken from them, not from the finished dq, da and dk.
"""

import triton
import triton.language as tl

from .tiles import (
    chunk_place,
    level_factor,
    level_pairs,
    load_tile,
    running_decay,
    sequence_place,
    store_tile,
)


@triton.jit
def state_gradients(
    a_tilde, q_tilde, k_bar, gamma, P, T, do, d_final_state,  # in
    du, d_initial_state, d_ends,  # out: du like u, states [N, H, K, V], and dS of every chunk's end [chunks, H, K, V]
    tokens, offsets, chunk_offsets,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PACKED: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (V + BV - 1) // BV
    tile, lane = tl.program_id(0) % TILES, tl.program_id(0) // TILES
    n, h = lane // H, lane % H
    start, length, first = sequence_place(n, tokens, offsets, chunk_offsets, PACKED, C)
    rows, keys, columns = tl.arange(0, C), tl.arange(0, BK), tile * BV + tl.arange(0, BV)
    dtype = do.dtype.element_ty
    state = lane.to(tl.int64) * K * V
    dS = load_tile(d_final_state + state, keys, columns, V, K, V)

    chunks = tl.cdiv(length, C)
    for back in range(chunks):
        c = chunks - 1 - back
        block = (first + c) * H + h
        place = (start + c * C) * H + h
        left = length - c * C
        dS_ = dS.to(dtype)
        store_tile(d_ends + block * K * V, keys, columns, V, K, V, dS_)
        dO = load_tile(do + place * V, rows, columns, H * V, left, V)
        P_ = load_tile(P + block * C * C, rows, rows, C, C, C)
        k_ = load_tile(k_bar + block * C * K, rows, keys, K, C, K)
        dR = tl.dot(tl.trans(P_), dO, input_precision=PRECISION)
        dR = tl.dot(k_, dS_, acc=dR, input_precision=PRECISION)
        T_ = load_tile(T + block * C * C, rows, rows, C, C, C)
        E = tl.dot(tl.trans(T_), dR.to(dtype), input_precision=PRECISION).to(dtype)
        store_tile(du + place * V, rows, columns, H * V, left, V, E)
        decay = tl.load(gamma + block * K + keys, mask=keys < K, other=0.0)
        read = load_tile(q_tilde + block * C * K, rows, keys, K, C, K)
        erase = load_tile(a_tilde + block * C * K, rows, keys, K, C, K)
        dS = tl.dot(tl.trans(read), dO, acc=dS * decay[:, None], input_precision=PRECISION)
        dS -= tl.dot(tl.trans(erase), E, input_precision=PRECISION)
    store_tile(d_initial_state + state, keys, columns, V, K, V, dS)


@triton.jit
def pair_gradients(
    do, E, R,  # in; E is du
    dP, dA,  # out: [chunks, H, C, C], of which what lies above the diagonal means nothing
    tokens, offsets, sequence_of, chunk_offsets,
    H: tl.constexpr, V: tl.constexpr, PACKED: tl.constexpr,
    C: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    chunk, h = tl.program_id(0) // H, tl.program_id(0) % H
    start, length = chunk_place(chunk, tokens, offsets, sequence_of, chunk_offsets, PACKED, C)
    if length <= 0:
        return
    place = start * H + h
    block = chunk.to(tl.int64) * H + h
    rows = tl.arange(0, C)
    dP_ = tl.zeros((C, C), tl.float32)
    dA_ = tl.zeros((C, C), tl.float32)
    for first in tl.static_range(0, V, BV):
        columns = first + tl.arange(0, BV)
        R_ = tl.trans(load_tile(R + block * C * V, rows, columns, V, C, V))
        dO_ = load_tile(do + place * V, rows, columns, H * V, length, V)
        dP_ = tl.dot(dO_, R_, acc=dP_, input_precision=PRECISION)
        E_ = load_tile(E + place * V, rows, columns, H * V, length, V)
        dA_ = tl.dot(E_, R_, acc=dA_, input_precision=PRECISION)
    store_tile(dP + block * C * C, rows, rows, C, C, C, dP_)
    store_tile(dA + block * C * C, rows, rows, C, C, C, -dA_)


@triton.jit
def chunk_gradients(
    q, k, a, g, do, E, R, starts, d_ends, dP, dA,  # in; E is du
    dq, dk, da, dg,  # out; dg [tokens, H, K], or one sum for every tile of K [tiles, tokens, H] if G_WIDTH is 1
    tokens, all_tokens, offsets, sequence_of, chunk_offsets, scale,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, G_WIDTH: tl.constexpr, PACKED: tl.constexpr,
    C: tl.constexpr, LEVELS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (K + BK - 1) // BK
    tile, chunk_and_head = tl.program_id(0) % TILES, tl.program_id(0) // TILES
    chunk, h = chunk_and_head // H, chunk_and_head % H
    start, length = chunk_place(chunk, tokens, offsets, sequence_of, chunk_offsets, PACKED, C)
    if length <= 0:
        return
    place = start * H + h
    block = chunk_and_head.to(tl.int64)
    rows, keys = tl.arange(0, C), tile * BK + tl.arange(0, BK)
    i, j = rows[:, None], rows[None, :]
    dtype = q.dtype.element_ty

    # What the states at the chunk's two ends give.
    dq_ = tl.zeros((C, BK), tl.float32)
    da_ = tl.zeros((C, BK), tl.float32)
    dk_ = tl.zeros((C, BK), tl.float32)
    d_gamma = tl.zeros((BK,), tl.float32)
    for first in tl.static_range(0, V, BV):
        columns = first + tl.arange(0, BV)
        S = load_tile(starts + block * K * V, keys, columns, V, K, V)
        dS = load_tile(d_ends + block * K * V, keys, columns, V, K, V)
        d_gamma += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)
        dO_ = load_tile(do + place * V, rows, columns, H * V, length, V)
        dq_ = tl.dot(dO_, tl.trans(S), acc=dq_, input_precision=PRECISION)
        E_ = load_tile(E + place * V, rows, columns, H * V, length, V)
        da_ = tl.dot(E_, tl.trans(S), acc=da_, input_precision=PRECISION)
        R_ = load_tile(R + block * C * V, rows, columns, V, C, V)
        dk_ = tl.dot(R_, tl.trans(dS), acc=dk_, input_precision=PRECISION)

    G = running_decay(g, place, rows, keys, length, H, K, G_WIDTH)
    G_C = tl.sum(tl.where(i == C - 1, G, 0.0), 0)
    gamma = tl.exp2(G)
    k_ = load_tile(k + place * K, rows, keys, H * K, length, K)
    a_ = load_tile(a + place * K, rows, keys, H * K, length, K)
    q_ = load_tile(q + place * K, rows, keys, H * K, length, K)
    dq_ *= gamma * scale
    da_ *= -gamma
    dk_ *= tl.exp2(G_C[None, :] - G)
    ends = k_ * dk_  # each key's decay to the chunk's end is one to G_C, less one to its own token
    d_total = d_gamma * tl.exp2(G_C) + tl.sum(ends, 0)
    dG = q_ * dq_ + a_ * da_ - ends + tl.where(i == C - 1, d_total[None, :], 0.0)

    # What the pairs give: the diagonal, where nothing decays, then level by level.
    diagonal = tl.load(dP + block * C * C + rows * (C + 1)).to(tl.float32)[:, None] * scale
    dq_ += diagonal * k_
    dk_ += diagonal * q_
    for level in range(LEVELS):
        factor = level_factor(G, level)
        square = block * C * C + i * C + j
        here = level_pairs(i, j, level)
        k_column = (k_ * factor).to(dtype)
        q_row = (q_ * (factor * scale)).to(dtype)
        dP_ = tl.load(dP + square, mask=here, other=0.0)
        dq_row = tl.dot(dP_, k_column, input_precision=PRECISION)
        dG += q_row * dq_row
        dq_ += dq_row * (factor * scale)
        dk_column = tl.dot(tl.trans(dP_), q_row, input_precision=PRECISION)
        a_row = (a_ * factor).to(dtype)
        dA_ = tl.load(dA + square, mask=here, other=0.0)
        da_row = tl.dot(dA_, k_column, input_precision=PRECISION)
        dG += a_row * da_row
        da_ += da_row * factor
        dk_column = tl.dot(tl.trans(dA_), a_row, acc=dk_column, input_precision=PRECISION)
        dG -= k_column * dk_column
        dk_ += dk_column * factor

    store_tile(dq + place * K, rows, keys, H * K, length, K, dq_)
    store_tile(da + place * K, rows, keys, H * K, length, K, da_)
    store_tile(dk + place * K, rows, keys, H * K, length, K, dk_)
    if G_WIDTH > 0:
        each = tl.cumsum(dG, 0, reverse=True)
        if G_WIDTH == 1:
            where = dg + (tile.to(tl.int64) * all_tokens * H + place) + rows.to(tl.int64) * H
            tl.store(where, tl.sum(each, 1), mask=rows < length)
        else:
            store_tile(dg + place * K, rows, keys, H * K, length, K, each)
