"""The forward: what depends on no state, chunk by chunk at once; then the states, chunk after chunk.

    chunk_terms    x̃ = x∘γ for x in (a, q), k̄, γ_C, P and T = (I + A)⁻¹        grid: chunks × heads
    chunk_states   R = T (U − ã S₀)    O = q̃ S₀ + P R    S_C = γ_C S₀ + k̄ᵀ R   grid: columns of V × (sequences × heads)

(`chunkwise.py` has the derivation.) What passes between the two lies chunk by chunk and head by head in memory.

Few sequences and heads leave most of a GPU idle while one chunk follows the other. Then sequences are cut into segments
(`affine.py`): `chunk_states` finds every segment's map S → M S + N side by side, from the identity without writes and
from zero with them; `segment_starts` composes the maps; `chunk_states` runs all segments from where they start.
"""

import triton
import triton.language as tl

from .tiles import (
    chunk_place,
    flat,
    inverse,
    level_factors,
    load_tile,
    sequence_place,
    step_decays,
    store_tile,
)


@triton.jit
def chunk_terms(
    q, k, a, g,  # in: [tokens, H, K], g [tokens, H, G_WIDTH]
    a_tilde, q_tilde, k_bar, gamma, P, T,  # out: [chunks, H, C, K] three times, [chunks, H, K], [chunks, H, C, C] twice
    tokens, offsets, sequence_of, chunk_offsets, scale,
    H: tl.constexpr, K: tl.constexpr, G_WIDTH: tl.constexpr, PACKED: tl.constexpr,
    C: tl.constexpr, LOG_C: tl.constexpr, LEVELS: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
    DIAGONAL: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    chunk, h = tl.program_id(0) // H, tl.program_id(0) % H
    start, length = chunk_place(chunk, tokens, offsets, sequence_of, chunk_offsets, PACKED, C)
    if length <= 0:
        return
    place = start * H + h  # in tokens × heads
    block = chunk.to(tl.int64) * H + h
    rows = tl.arange(0, C)
    i, j = rows[:, None], rows[None, :]
    dtype = q.dtype.element_ty

    pairs_a = tl.zeros((C, C), tl.float32)
    pairs_q = tl.zeros((C, C), tl.float32)
    for first in range(0, K, BK):
        columns = first + tl.arange(0, BK)
        # Loads first, one behind the other, and only then what waits for them.
        k_ = load_tile(k + place * K, rows, columns, H * K, length, K)
        a_ = load_tile(a + place * K, rows, columns, H * K, length, K)
        q_ = load_tile(q + place * K, rows, columns, H * K, length, K)
        each = step_decays(g, place, rows, columns, length, H, K, G_WIDTH, SUB)
        within, total = tl.cumsum(each, 1), tl.sum(each, 1)  # from a sub-block's start; over all of it
        upto = tl.cumsum(total, 0)  # over all sub-blocks up to this one's end
        whole = tl.sum(total, 0)
        tl.store(gamma + block * K + columns, tl.exp2(whole), mask=columns < K)

        # Pairs in one sub-block, with its middle as reference: no factor is beyond exp(±80).
        centre = flat(within - 0.5 * total[:, None, :])
        same = (i // SUB) == (j // SUB)
        up = tl.trans((k_ * tl.exp2(-centre)).to(DIAGONAL))
        down = tl.exp2(centre)
        found = tl.dot((a_ * down).to(DIAGONAL), up, input_precision=PRECISION)
        pairs_a += tl.where(same & (i > j), found, 0.0)
        found = tl.dot((q_ * (down * scale)).to(DIAGONAL), up, input_precision=PRECISION)
        pairs_q += tl.where(same & (i >= j), found, 0.0)

        # Rows decayed from their sub-block's start, keys to its end; a factor for every sub-block does the rest.
        decay = tl.exp2(within)
        a_ = tl.reshape(a_, each.shape) * decay
        q_ = tl.reshape(q_, each.shape) * (decay * scale)
        k_ = tl.reshape(k_, each.shape) * tl.exp2(total[:, None, :] - within)
        before = tl.exp2(upto - total)[:, None, :]
        store_tile(a_tilde + block * C * K, rows, columns, K, C, K, flat(a_ * before))
        store_tile(q_tilde + block * C * K, rows, columns, K, C, K, flat(q_ * before))
        store_tile(k_bar + block * C * K, rows, columns, K, C, K, flat(k_ * tl.exp2(whole[None, :] - upto)[:, None, :]))
        for level in range(LEVELS):
            row, column = level_factors(total, upto, level)
            keys = tl.trans(flat(k_ * column).to(dtype))
            same = (i // SUB >> level + 1) == (j // SUB >> level + 1)
            pairs_a += tl.where(same, tl.dot(flat(a_ * row).to(dtype), keys, input_precision=PRECISION), 0.0)
            pairs_q += tl.where(same, tl.dot(flat(q_ * row).to(dtype), keys, input_precision=PRECISION), 0.0)

    store_tile(P + block * C * C, rows, rows, C, C, C, pairs_q)
    store_tile(T + block * C * C, rows, rows, C, C, C, inverse(pairs_a, C, LOG_C, PRECISION))


@triton.jit
def chunk_states(
    a_tilde, q_tilde, k_bar, gamma, P, T, u, initial_state,  # in
    o, final_state, starts, R,  # out: o like u, states [N, H, K, V]; and if SAVE [chunks, H, K, V], [chunks, H, C, V]
    tokens, offsets, chunk_offsets,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PACKED: tl.constexpr, HAS_STATE: tl.constexpr,
    WRITES: tl.constexpr, OUTPUT: tl.constexpr, SAVE: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (V + BV - 1) // BV
    tile, lane = tl.program_id(0) % TILES, tl.program_id(0) // TILES
    n, h = lane // H, lane % H
    start, length, first = sequence_place(n, tokens, offsets, chunk_offsets, PACKED, C)
    rows, keys, columns = tl.arange(0, C), tl.arange(0, BK), tile * BV + tl.arange(0, BV)
    dtype = a_tilde.dtype.element_ty
    state = lane.to(tl.int64) * K * V
    S = tl.zeros((BK, BV), tl.float32)
    if HAS_STATE:
        S = load_tile(initial_state + state, keys, columns, V, K, V)

    for c in range(tl.cdiv(length, C)):
        block = (first + c) * H + h
        place = (start + c * C) * H + h
        left = length - c * C
        S_ = S.to(dtype)
        if SAVE:
            store_tile(starts + block * K * V, keys, columns, V, K, V, S_)
        erase = load_tile(a_tilde + block * C * K, rows, keys, K, C, K)
        write = tl.zeros((C, BV), tl.float32)
        if WRITES:
            write = load_tile(u + place * V, rows, columns, H * V, left, V).to(tl.float32)
        write -= tl.dot(erase, S_, input_precision=PRECISION)
        T_ = load_tile(T + block * C * C, rows, rows, C, C, C)
        R_ = tl.dot(T_, write.to(dtype), input_precision=PRECISION).to(dtype)
        if OUTPUT:
            P_ = load_tile(P + block * C * C, rows, rows, C, C, C)
            read = load_tile(q_tilde + block * C * K, rows, keys, K, C, K)
            out = tl.dot(P_, R_, input_precision=PRECISION)
            out = tl.dot(read, S_, acc=out, input_precision=PRECISION)
            store_tile(o + place * V, rows, columns, H * V, left, V, out)
        if SAVE:
            store_tile(R + block * C * V, rows, columns, V, C, V, R_)
        decay = tl.load(gamma + block * K + keys, mask=keys < K, other=0.0)
        k_ = load_tile(k_bar + block * C * K, rows, keys, K, C, K)
        S = tl.dot(tl.trans(k_), R_, acc=S * decay[:, None], input_precision=PRECISION)
    store_tile(final_state + state, keys, columns, V, K, V, S)


@triton.jit
def segment_starts(
    M, N, initial_state,  # in: [sequences × segments, H, K, K], [sequences × segments, H, K, V], [sequences, H, K, V]
    starts,  # out: like N
    segments,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, HAS_STATE: tl.constexpr, REVERSE: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """In REVERSE, for the backward: last segment first, and by Mᵀ."""
    TILES: tl.constexpr = (V + BV - 1) // BV
    tile, lane = tl.program_id(0) % TILES, tl.program_id(0) // TILES
    n, h = lane // H, lane % H
    keys, columns = tl.arange(0, BK), tile * BV + tl.arange(0, BV)
    S = tl.zeros((BK, BV), tl.float32)
    if HAS_STATE:
        S = load_tile(initial_state + lane.to(tl.int64) * K * V, keys, columns, V, K, V)
    for segment in range(segments):
        if REVERSE:
            at = (n.to(tl.int64) * segments + segments - 1 - segment) * H + h
            M_ = tl.trans(load_tile(M + at * K * K, keys, keys, K, K, K))
        else:
            at = (n.to(tl.int64) * segments + segment) * H + h
            M_ = load_tile(M + at * K * K, keys, keys, K, K, K)
        store_tile(starts + at * K * V, keys, columns, V, K, V, S)
        N_ = load_tile(N + at * K * V, keys, columns, V, K, V)
        S = tl.dot(M_, S, acc=N_, input_precision="tf32x3")
