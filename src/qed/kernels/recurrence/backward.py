"""Three kernels for the backward: first the gradients of the states, from the last chunk to the first; then the rest,
for all chunks in parallel.

    state_gradients   E = Tᵀ(Pᵀ dO + k̄ dS) = dU    dS₀ = γ_C dS + q̃ᵀ dO − ãᵀ E
                                                                        grid: columns of V × (sequences × heads)
    pair_gradients    dP = dO Rᵀ    dA = −E Rᵀ                          grid: chunks × heads
    chunk_gradients   dq̃ = dO S₀ᵀ   dã = −E S₀ᵀ   dk̄ = R dSᵀ; these and the pairs' gradients carried on to q, k, a
                      and g                                             grid: chunks × heads × columns of K

The gradient of g is a sum over all products that a step's decay is a factor of. Each factor exp(G_i − G_j) gives +z to
G_i and −z to G_j, and the gradient of g is the sum of these from its own token to the chunk's end. What cancels there
cancels exactly only if both sides were computed from the same rounded operands, so z is computed from these operands
and not from the finished dq, da and dk.
"""

import triton
import triton.language as tl

from .forgetting import forgetting_gradients
from .tiles import (
    as_operand,
    bounded,
    centred,
    chunk_place,
    forgets,
    in_other_parts,
    lane_place,
    level_factors,
    load_tile,
    per_token,
    step_decays,
    store_decay_gradient,
    store_tile,
    whole_enough,
)


@triton.jit(do_not_specialize=["first_lane"])
def state_gradients(
    a_tilde, q_tilde, k_bar, gamma, P, T, do, d_final_state,  # in
    du, d_initial_state, d_ends,  # out: du like u, states [N, H, K, V], and dSᵀ of every chunk's end [chunks, H, V, K]
    first_lane, tokens, segments, segment_chunks, offsets, chunk_offsets, order,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PACKED: tl.constexpr, HAS_STATE: tl.constexpr,
    OUTPUT: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Go through a segment's chunks from the last to the first. Everything is transposed, as in `chunk_states`. Without
    OUTPUT only the gradient of the state that the segment starts from is written."""
    TILES: tl.constexpr = (V + BV - 1) // BV
    tile, lane = tl.program_id(0) % TILES, first_lane + tl.program_id(0) // TILES
    lane, h, start, length, first = lane_place(
        lane, order, tokens, segments, segment_chunks, offsets, chunk_offsets, H, PACKED, C
    )
    rows, keys, columns = tl.arange(0, C), tl.arange(0, BK), tile * BV + tl.arange(0, BV)
    dtype = do.dtype.element_ty
    state = lane.to(tl.int64) * K * V
    dS = tl.zeros((BV, BK), tl.float32)
    if HAS_STATE:
        dS = tl.trans(load_tile(d_final_state + state, keys, columns, V, K, V))

    chunks = tl.cdiv(length, C)
    for back in range(chunks):
        c = chunks - 1 - back
        block, place = (first + c) * H + h, (start + c * C) * H + h
        left = length - c * C
        dS_ = dS.to(dtype)
        if OUTPUT:
            store_tile(d_ends + block * K * V, columns, keys, K, V, K, dS_)
        k_ = load_tile(k_bar + block * C * K, rows, keys, K, C, K)
        dO = tl.trans(load_tile(do + place * V, rows, columns, H * V, left, V))
        P_ = load_tile(P + block * C * C, rows, rows, C, C, C)
        dR = tl.dot(dO, P_, input_precision=PRECISION)
        dR = tl.dot(dS_, tl.trans(k_), acc=dR, input_precision=PRECISION)
        T_ = load_tile(T + block * C * C, rows, rows, C, C, C)
        E = tl.dot(dR.to(dtype), T_, input_precision=PRECISION)
        if OUTPUT:
            store_tile(du + place * V, rows, columns, H * V, left, V, tl.trans(E.to(dtype)))
        decay = tl.load(gamma + block * K + keys, mask=keys < K, other=0.0)
        read = load_tile(q_tilde + block * C * K, rows, keys, K, C, K)
        erase = load_tile(a_tilde + block * C * K, rows, keys, K, C, K)
        dS = tl.dot(dO, read, acc=dS * decay[None, :], input_precision=PRECISION)
        dS = tl.dot((-E).to(dtype), erase, acc=dS, input_precision=PRECISION)
    store_tile(d_initial_state + state, keys, columns, V, K, V, tl.trans(dS))


@triton.jit
def pair_gradients(
    do, E, R,  # in; E is du
    dP, dA,  # out: [chunks, H, C, C], zero above the diagonal, dA on it too
    tokens, chunk_starts, chunk_lengths,
    H: tl.constexpr, V: tl.constexpr, PACKED: tl.constexpr,
    C: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of P and A for one chunk and head."""
    chunk, h = tl.program_id(0) // H, tl.program_id(0) % H
    start, length = chunk_place(chunk, tokens, chunk_starts, chunk_lengths, PACKED, C)
    if length <= 0:
        return
    place = start * H + h
    block = chunk.to(tl.int64) * H + h
    rows = tl.arange(0, C)
    i, j = rows[:, None], rows[None, :]
    dP_ = tl.zeros((C, C), tl.float32)
    minus_dA = tl.zeros((C, C), tl.float32)
    for first in tl.static_range(0, V, BV):
        columns = first + tl.arange(0, BV)
        R_ = load_tile(R + block * C * V, columns, rows, C, V, C)  # Rᵀ
        dO_ = load_tile(do + place * V, rows, columns, H * V, length, V)
        E_ = load_tile(E + place * V, rows, columns, H * V, length, V)
        dP_ = tl.dot(dO_, R_, acc=dP_, input_precision=PRECISION)
        minus_dA = tl.dot(E_, R_, acc=minus_dA, input_precision=PRECISION)
    store_tile(dP + block * C * C, rows, rows, C, C, C, tl.where(i >= j, dP_, 0.0))
    store_tile(dA + block * C * C, rows, rows, C, C, C, tl.where(i > j, -minus_dA, 0.0))


@triton.jit
def chunk_gradients(
    q, k, a, g, lowest, do, E, R, starts, d_ends, dP, dA,  # in; E is du
    dq, dk, da, dg,  # out; dg [tokens, H, K], or one sum for every tile of K [tiles, tokens, H] if G_WIDTH is 1
    all_tokens, tokens, chunk_starts, chunk_lengths, scale,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, G_WIDTH: tl.constexpr,
    PACKED: tl.constexpr, C: tl.constexpr, SUB: tl.constexpr, LEVELS: tl.constexpr, RATIO: tl.constexpr,
    LEAST: tl.constexpr, REACH: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """With LEVELS = 0, compute the gradients of the chunks that can be one block; otherwise those of the other
    chunks."""
    TILES: tl.constexpr = (K + BK - 1) // BK
    tile, chunk_and_head = tl.program_id(0) % TILES, tl.program_id(0) // TILES
    chunk, h = chunk_and_head // H, chunk_and_head % H
    start, length = chunk_place(chunk, tokens, chunk_starts, chunk_lengths, PACKED, C)
    if length <= 0:
        return
    place = start * H + h
    block = chunk_and_head.to(tl.int64)
    most = tl.load(lowest + block)
    if whole_enough(most, REACH) != (LEVELS == 0):
        return
    if LEVELS > 0:  # noqa: SIM102  (the compiler decides this condition, a GPU the next one)
        if forgets(most):
            forgetting_gradients(
                q, k, a, g, do, E, R, starts, d_ends, dP, dA, dq, dk, da, dg,
                place, block, length, tile, all_tokens, scale, H, K, V, G_WIDTH, C, BK, BV, PRECISION,
            )  # fmt: skip
            return
    rows, keys = tl.arange(0, C), tile * BK + tl.arange(0, BK)
    i, j = rows[:, None], rows[None, :]

    # Rows and keys relative to the centres of their blocks; see `tiles.py`.
    each = step_decays(g, place, rows, keys, length, H, K, G_WIDTH)
    if LEVELS > 0:
        each = bounded(each, LEAST)
    k_ = load_tile(k + place * K, rows, keys, H * K, length, K)
    q_ = load_tile(q + place * K, rows, keys, H * K, length, K)
    a_ = load_tile(a + place * K, rows, keys, H * K, length, K)
    own, centre, total, rest, whole = centred(each, SUB)
    down, up = tl.exp2(own), tl.exp2(-own)
    k_ = as_operand(k_ * up, CENTRED, PRECISION)
    q_ = as_operand(q_ * (down * scale), CENTRED, PRECISION)
    a_ = as_operand(a_ * down, CENTRED, PRECISION)
    dP_ = load_tile(dP + block * C * C, rows, rows, C, C, C)
    dA_ = load_tile(dA + block * C * C, rows, rows, C, C, C)

    # dk comes from the chunk's end, from pairs in one block, and from pairs between sub-blocks.
    columns = tl.arange(0, BV)
    S = load_tile(starts + block * K * V, columns, keys, K, V, K)  # S₀ᵀ; the next two are transposed too
    dS = load_tile(d_ends + block * K * V, columns, keys, K, V, K)
    R_ = load_tile(R + block * C * V, columns, rows, C, V, C)
    d = tl.dot(tl.trans(R_), dS, input_precision=PRECISION)
    d_gamma = tl.sum(S.to(tl.float32) * dS.to(tl.float32), 0)
    d *= per_token(tl.exp2(rest), SUB)
    # The logarithm of a key's decay to the chunk's end is G at the last token minus G at the key's own token.
    d_whole = d_gamma * tl.exp2(whole) + tl.sum(k_ * d, 0)
    inside_P, inside_A = dP_, dA_
    if LEVELS > 0:
        same = i // SUB == j // SUB
        inside_P, inside_A = tl.where(same, dP_, 0.0), tl.where(same, dA_, 0.0)
    d = tl.dot(tl.trans(inside_P.to(CENTRED)), q_, acc=d, input_precision=PRECISION)
    d = tl.dot(tl.trans(inside_A.to(CENTRED)), a_, acc=d, input_precision=PRECISION)
    dG = -(k_ * d)
    for level in tl.static_range(LEVELS):
        row, column = level_factors(total, level, RATIO, REACH, SUB)
        there = in_other_parts(i, j, level, RATIO, C)
        q_hat, a_hat = as_operand(q_ * row, CENTRED, PRECISION), as_operand(a_ * row, CENTRED, PRECISION)
        found = tl.dot(tl.trans(tl.where(there, dP_, 0.0).to(CENTRED)), q_hat, input_precision=PRECISION)
        found = tl.dot(tl.trans(tl.where(there, dA_, 0.0).to(CENTRED)), a_hat, acc=found, input_precision=PRECISION)
        d += found * column
        dG -= as_operand(k_ * column, CENTRED, PRECISION) * found
    store_tile(dk + place * K, rows, keys, H * K, length, K, d * up)

    # dq, then da, in the same way. It is a loop so that the second can reuse the registers of the first.
    for which in range(2):
        is_q = which == 0
        x, read, pairs = tl.where(is_q, q, a), tl.where(is_q, do, E), tl.where(is_q, dP, dA)
        x_ = load_tile(x + place * K, rows, keys, H * K, length, K)
        read_ = load_tile(read + place * V, rows, columns, H * V, length, V)
        d = tl.dot(read_, S, input_precision=PRECISION)
        factor = down * tl.where(is_q, scale, 1.0)
        x_ = as_operand(x_ * factor, CENTRED, PRECISION)
        d *= per_token(tl.where(is_q, tl.exp2(centre), -tl.exp2(centre)), SUB)
        pairs_ = load_tile(pairs + block * C * C, rows, rows, C, C, C)
        inside = pairs_
        if LEVELS > 0:
            inside = tl.where(i // SUB == j // SUB, pairs_, 0.0)
        d = tl.dot(inside.to(CENTRED), k_, acc=d, input_precision=PRECISION)
        dG += x_ * d
        for level in tl.static_range(LEVELS):
            row, column = level_factors(total, level, RATIO, REACH, SUB)
            there = in_other_parts(i, j, level, RATIO, C)
            k_hat = as_operand(k_ * column, CENTRED, PRECISION)
            found = tl.dot(tl.where(there, pairs_, 0.0).to(CENTRED), k_hat, input_precision=PRECISION)
            d += found * row
            dG += as_operand(x_ * row, CENTRED, PRECISION) * found
        store_tile(tl.where(is_q, dq, da) + place * K, rows, keys, H * K, length, K, d * factor)

    if G_WIDTH > 0:
        dg_ = tl.cumsum(dG, 0, reverse=True) + d_whole[None, :]
        store_decay_gradient(dg, dg_, place, rows, keys, length, tile, all_tokens, H, K, G_WIDTH)
