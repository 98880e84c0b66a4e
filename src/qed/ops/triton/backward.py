"""Three kernels for the backward: the gradient of the states, last chunk first; then the rest, chunk by chunk.

    state_gradients   E = Tᵀ(Pᵀ dO + k̄ dS) = dU    dS₀ = γ_C dS + q̃ᵀ dO − ãᵀ E
                                                                        grid: columns of V × (sequences × heads)
    pair_gradients    dP = dO Rᵀ    dA = −E Rᵀ                          grid: chunks × heads
    chunk_gradients   dq̃ = dO S₀ᵀ   dã = −E S₀ᵀ   dk̄ = R dSᵀ; these and the pairs' gradients carried on to q, k, a
                      and g                                             grid: chunks × heads × columns of K

The gradient of g is a sum over all products that a step's decay is a factor of. Each factor exp(G_i − G_j) gives +z to
G_i and −z to G_j, and g collects from its own token to the chunk's end. What cancels there, cancels exactly only if the
same rounded operands made both sides: z is taken from them, not from the finished dq, da and dk.
"""

import triton
import triton.language as tl

from .tiles import (
    chunk_place,
    flat,
    level_factors,
    load_blocks,
    load_tile,
    sequence_place,
    step_decays,
    store_tile,
)


@triton.jit
def state_gradients(
    a_tilde, q_tilde, k_bar, gamma, P, T, do, d_final_state,  # in
    du, d_initial_state, d_ends,  # out: du like u, states [N, H, K, V], and dS of every chunk's end [chunks, H, K, V]
    tokens, offsets, chunk_offsets,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PACKED: tl.constexpr, HAS_STATE: tl.constexpr,
    OUTPUT: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (V + BV - 1) // BV
    tile, lane = tl.program_id(0) % TILES, tl.program_id(0) // TILES
    n, h = lane // H, lane % H
    start, length, first = sequence_place(n, tokens, offsets, chunk_offsets, PACKED, C)
    rows, keys, columns = tl.arange(0, C), tl.arange(0, BK), tile * BV + tl.arange(0, BV)
    dtype = do.dtype.element_ty
    state = lane.to(tl.int64) * K * V
    dS = tl.zeros((BK, BV), tl.float32)
    if HAS_STATE:
        dS = load_tile(d_final_state + state, keys, columns, V, K, V)

    chunks = tl.cdiv(length, C)
    for back in range(chunks):
        c = chunks - 1 - back
        block = (first + c) * H + h
        place = (start + c * C) * H + h
        left = length - c * C
        dS_ = dS.to(dtype)
        if OUTPUT:
            store_tile(d_ends + block * K * V, keys, columns, V, K, V, dS_)
        dO = load_tile(do + place * V, rows, columns, H * V, left, V)
        P_ = load_tile(P + block * C * C, rows, rows, C, C, C)
        k_ = load_tile(k_bar + block * C * K, rows, keys, K, C, K)
        dR = tl.dot(tl.trans(P_), dO, input_precision=PRECISION)
        dR = tl.dot(k_, dS_, acc=dR, input_precision=PRECISION)
        T_ = load_tile(T + block * C * C, rows, rows, C, C, C)
        E = tl.dot(tl.trans(T_), dR.to(dtype), input_precision=PRECISION).to(dtype)
        if OUTPUT:
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
    d_pairs,  # out: [chunks, H, C, C], dP up to the diagonal and dAᵀ above it
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
    dP = tl.zeros((C, C), tl.float32)
    minus_dA_T = tl.zeros((C, C), tl.float32)
    for first in tl.static_range(0, V, BV):
        columns = first + tl.arange(0, BV)
        R_ = load_tile(R + block * C * V, rows, columns, V, C, V)
        dO_ = load_tile(do + place * V, rows, columns, H * V, length, V)
        E_ = load_tile(E + place * V, rows, columns, H * V, length, V)
        dP = tl.dot(dO_, tl.trans(R_), acc=dP, input_precision=PRECISION)
        minus_dA_T = tl.dot(R_, tl.trans(E_), acc=minus_dA_T, input_precision=PRECISION)
    found = tl.where(rows[:, None] >= rows[None, :], dP, -minus_dA_T)
    store_tile(d_pairs + block * C * C, rows, rows, C, C, C, found)


@triton.jit
def chunk_gradients(
    q, k, a, g, do, E, R, starts, d_ends, d_pairs,  # in; E is du
    dq, dk, da, dg,  # out; dg [tokens, H, K], or one sum for every tile of K [tiles, tokens, H] if G_WIDTH is 1
    tokens, all_tokens, offsets, sequence_of, chunk_offsets, scale,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, G_WIDTH: tl.constexpr, PACKED: tl.constexpr,
    C: tl.constexpr, LEVELS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
    DIAGONAL: tl.constexpr, SUB: tl.constexpr,
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
        dO_ = load_tile(do + place * V, rows, columns, H * V, length, V)
        E_ = load_tile(E + place * V, rows, columns, H * V, length, V)
        R_ = load_tile(R + block * C * V, rows, columns, V, C, V)
        dq_ = tl.dot(dO_, tl.trans(S), acc=dq_, input_precision=PRECISION)
        da_ = tl.dot(E_, tl.trans(S), acc=da_, input_precision=PRECISION)
        dk_ = tl.dot(R_, tl.trans(dS), acc=dk_, input_precision=PRECISION)
        d_gamma += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)

    each = step_decays(g, place, rows, keys, length, H, K, G_WIDTH, SUB)
    within, total = tl.cumsum(each, 1), tl.sum(each, 1)  # from a sub-block's start; over all of it
    upto = tl.cumsum(total, 0)  # over all sub-blocks up to this one's end
    whole = tl.sum(total, 0)

    # Rows decayed from their sub-block's start and keys to its end, and the gradients of those.
    q_row = load_blocks(q + place * K, rows, keys, H * K, length, K, SUB) * scale * tl.exp2(within)
    a_row = load_blocks(a + place * K, rows, keys, H * K, length, K, SUB) * tl.exp2(within)
    k_column = load_blocks(k + place * K, rows, keys, H * K, length, K, SUB) * tl.exp2(total[:, None, :] - within)
    before, after = tl.exp2(upto - total)[:, None, :], tl.exp2(whole[None, :] - upto)[:, None, :]
    dq_ = tl.reshape(dq_, each.shape) * before
    da_ = tl.reshape(da_, each.shape) * -before
    dk_ = tl.reshape(dk_, each.shape) * after
    ends = k_column * dk_  # each key's decay to the chunk's end is one to its last token, less one to its own
    dG = q_row * dq_ + a_row * da_ - ends
    d_whole = d_gamma * tl.exp2(whole) + tl.sum(tl.sum(ends, 1), 0)
    square = tl.load(d_pairs + block * C * C + i * C + j)  # masked afterwards: a masked load is a narrow one
    for level in range(LEVELS):
        row, column = level_factors(total, upto, level)
        same = (i // SUB >> level + 1) == (j // SUB >> level + 1)
        dP, dA_T = tl.where(same & (i > j), square, 0.0), tl.where(same & (i < j), square, 0.0)
        k_hat = flat(k_column * column).to(dtype)
        q_hat, a_hat = flat(q_row * row).to(dtype), flat(a_row * row).to(dtype)
        dq_hat = tl.reshape(tl.dot(dP, k_hat, input_precision=PRECISION), each.shape)
        da_hat = tl.reshape(tl.dot(tl.trans(dA_T), k_hat, input_precision=PRECISION), each.shape)
        dk_hat = tl.dot(tl.trans(dP), q_hat, input_precision=PRECISION)
        dk_hat = tl.reshape(tl.dot(dA_T, a_hat, acc=dk_hat, input_precision=PRECISION), each.shape)
        # Rows of first halves and columns of second ones have had products too: a factor of zero takes them out.
        dq_ += dq_hat * row
        da_ += da_hat * row
        dk_ += dk_hat * column
        dG += tl.reshape(q_hat, each.shape) * dq_hat + tl.reshape(a_hat, each.shape) * da_hat
        dG -= tl.reshape(k_hat, each.shape) * dk_hat
    dq_ *= tl.exp2(within)
    da_ *= tl.exp2(within)
    dk_ *= tl.exp2(total[:, None, :] - within)

    # Pairs in one sub-block, with its middle as reference. q, k and a are loaded anew, and the barrier keeps the
    # compiler from holding on to them instead: registers are short.
    tl.debug_barrier()
    centre = within - 0.5 * total[:, None, :]
    up, down = tl.exp2(-centre), tl.exp2(centre)
    same = i // SUB == j // SUB
    dP = tl.where(same & (i >= j), square, 0.0).to(DIAGONAL)
    dA_T = tl.where(same & (i < j), square, 0.0).to(DIAGONAL)
    k_hat = flat(load_blocks(k + place * K, rows, keys, H * K, length, K, SUB) * up).to(DIAGONAL)
    q_hat = flat(load_blocks(q + place * K, rows, keys, H * K, length, K, SUB) * scale * down).to(DIAGONAL)
    a_hat = flat(load_blocks(a + place * K, rows, keys, H * K, length, K, SUB) * down).to(DIAGONAL)
    dq_hat = tl.reshape(tl.dot(dP, k_hat, input_precision=PRECISION), each.shape)
    da_hat = tl.reshape(tl.dot(tl.trans(dA_T), k_hat, input_precision=PRECISION), each.shape)
    dk_hat = tl.dot(tl.trans(dP), q_hat, input_precision=PRECISION)
    dk_hat = tl.reshape(tl.dot(dA_T, a_hat, acc=dk_hat, input_precision=PRECISION), each.shape)
    dq_ = flat(dq_ + dq_hat * down) * scale
    da_ = flat(da_ + da_hat * down)
    dk_ = flat(dk_ + dk_hat * up)
    dG += tl.reshape(q_hat, each.shape) * dq_hat + tl.reshape(a_hat, each.shape) * da_hat
    dG -= tl.reshape(k_hat, each.shape) * dk_hat

    store_tile(dq + place * K, rows, keys, H * K, length, K, dq_)
    store_tile(da + place * K, rows, keys, H * K, length, K, da_)
    store_tile(dk + place * K, rows, keys, H * K, length, K, dk_)
    if G_WIDTH > 0:
        dg_ = tl.cumsum(flat(dG), 0, reverse=True) + d_whole[None, :]
        if G_WIDTH == 1:
            where = dg + (tile.to(tl.int64) * all_tokens * H + place) + rows.to(tl.int64) * H
            tl.store(where, tl.sum(dg_, 1), mask=rows < length)
        else:
            store_tile(dg + place * K, rows, keys, H * K, length, K, dg_)
