"""The forward: first what does not depend on a state, for all chunks in parallel; then the states, chunk after chunk.

    chunk_terms    x̃ = x∘γ for x in (a, q), k̄, γ_C, P and T = (I + A)⁻¹        grid: chunks × heads
    chunk_states   R = T (U − ã S₀)    O = q̃ S₀ + P R    S_C = γ_C S₀ + k̄ᵀ R   grid: columns of V × (sequences × heads)

(`chunkwise.py` has the derivation.) What the first kernel gives to the second lies in memory chunk by chunk and head by
head.

With few sequences and heads most of a GPU would be idle while one chunk follows the other. Then sequences are cut into
segments (`affine.py`): `chunk_states` finds the maps S → M S + N of all segments in parallel, `segment_starts` composes
them, and `chunk_states` runs all segments in parallel from the states that they start from.
"""

import triton
import triton.language as tl

from .forgetting import forgetting_terms
from .tiles import (
    bounded,
    centred,
    chunk_place,
    forgets,
    in_other_parts,
    inverse,
    lane_place,
    level_factors,
    load_tile,
    most_decay,
    per_token,
    step_decays,
    store_tile,
    whole_enough,
)


@triton.jit
def chunk_terms(
    q, k, a, g,  # in: [tokens, H, K], g [tokens, H, G_WIDTH]
    a_tilde, q_tilde, k_bar, gamma, P, T,  # out: [chunks, H, C, K] three times, [chunks, H, K], [chunks, H, C, C] twice
    lowest,  # out: the most that a channel decays over the chunk, in powers of two [chunks, H]
    tokens, chunk_starts, chunk_lengths, scale,
    H: tl.constexpr, K: tl.constexpr, ALL_K: tl.constexpr, G_WIDTH: tl.constexpr, PACKED: tl.constexpr,
    C: tl.constexpr, LOG_C: tl.constexpr, SUB: tl.constexpr, LEVELS: tl.constexpr, RATIO: tl.constexpr,
    LEAST: tl.constexpr, REACH: tl.constexpr,
    BK: tl.constexpr, PRECISION: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """With LEVELS = 0, compute the terms of the chunks that can be one block, and for every chunk how far it decays,
    which decides this. Otherwise compute the terms of the other chunks."""
    chunk, h = tl.program_id(0) // H, tl.program_id(0) % H
    start, length = chunk_place(chunk, tokens, chunk_starts, chunk_lengths, PACKED, C)
    if length <= 0:
        return
    place = start * H + h  # in tokens × heads
    block = chunk.to(tl.int64) * H + h
    if LEVELS > 0:
        most = tl.load(lowest + block)
        if whole_enough(most, REACH):
            return
        if forgets(most):
            forgetting_terms(
                q, k, a, g, a_tilde, q_tilde, k_bar, gamma, P, T, place, block, length, scale,
                H, K, G_WIDTH, C, LOG_C, BK, PRECISION,
            )  # fmt: skip
            return
    else:
        most = most_decay(g, place, length, H, K, ALL_K, G_WIDTH, C)
        tl.store(lowest + block, most)
        if not whole_enough(most, REACH):
            return
    rows = tl.arange(0, C)
    i, j = rows[:, None], rows[None, :]

    pairs_a = tl.zeros((C, C), tl.float32)
    pairs_q = tl.zeros((C, C), tl.float32)
    for first in range(0, K, BK):
        columns = first + tl.arange(0, BK)
        # All loads are issued first, and only then what waits for them.
        each = step_decays(g, place, rows, columns, length, H, K, G_WIDTH)
        k_ = load_tile(k + place * K, rows, columns, H * K, length, K)
        a_ = load_tile(a + place * K, rows, columns, H * K, length, K)
        q_ = load_tile(q + place * K, rows, columns, H * K, length, K)
        if LEVELS > 0:
            each = bounded(each, LEAST)
        own, centre, total, rest, whole = centred(each, SUB)
        tl.store(gamma + block * K + columns, tl.exp2(whole), mask=columns < K)

        # Rows and keys relative to the centres of their blocks; see `tiles.py`.
        down = tl.exp2(own)
        a_, q_, k_ = a_ * down, q_ * (down * scale), k_ * tl.exp2(-own)
        before, after = per_token(tl.exp2(centre), SUB), per_token(tl.exp2(rest), SUB)
        store_tile(a_tilde + block * C * K, rows, columns, K, C, K, a_ * before)
        store_tile(q_tilde + block * C * K, rows, columns, K, C, K, q_ * before)
        store_tile(k_bar + block * C * K, rows, columns, K, C, K, k_ * after)
        k_T = tl.trans(k_.to(CENTRED))
        found_a = tl.dot(a_.to(CENTRED), k_T, input_precision=PRECISION)
        found_q = tl.dot(q_.to(CENTRED), k_T, input_precision=PRECISION)
        if LEVELS > 0:
            same = i // SUB == j // SUB
            found_a, found_q = tl.where(same, found_a, 0.0), tl.where(same, found_q, 0.0)
        pairs_a += found_a
        pairs_q += found_q
        for level in tl.static_range(LEVELS):
            row, column = level_factors(total, level, RATIO, REACH, SUB)
            k_hat = tl.trans((k_ * column).to(CENTRED))
            there = in_other_parts(i, j, level, RATIO, C)
            pairs_a += tl.where(there, tl.dot((a_ * row).to(CENTRED), k_hat, input_precision=PRECISION), 0.0)
            pairs_q += tl.where(there, tl.dot((q_ * row).to(CENTRED), k_hat, input_precision=PRECISION), 0.0)

    store_tile(P + block * C * C, rows, rows, C, C, C, tl.where(i >= j, pairs_q, 0.0))
    found = inverse(tl.where(i > j, pairs_a, 0.0), C, LOG_C, PRECISION)
    store_tile(T + block * C * C, rows, rows, C, C, C, found)


@triton.jit(do_not_specialize=["first_lane"])
def chunk_states(
    a_tilde, q_tilde, k_bar, gamma, P, T, u, initial_state,  # in
    o, final_state, maps, starts, R,  # out: o like u, states [segments, H, K, V]; if MAPS M and Mᵀ
    # [segments, H, 2, K, K]; if SAVE S₀ᵀ [chunks, H, V, K] and Rᵀ [chunks, H, V, C]
    first_lane, tokens, segments, segment_chunks, offsets, chunk_offsets, order,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PACKED: tl.constexpr, HAS_STATE: tl.constexpr,
    MAPS: tl.constexpr, SAVE: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Everything is transposed, V × …, so that each product's result is the left operand of the next one and never
    leaves registers.

    With MAPS > 0 there are no outputs, only the map of every segment: N, the final state from zero, and M, the final
    state from the identity without writes. They lie side by side, M from column MAPS on."""
    TILES: tl.constexpr = (MAPS + BK if MAPS else V + BV - 1) // BV
    tile, lane = tl.program_id(0) % TILES, first_lane + tl.program_id(0) // TILES
    lane, h, start, length, first = lane_place(
        lane, order, tokens, segments, segment_chunks, offsets, chunk_offsets, H, PACKED, C
    )
    rows, keys, columns = tl.arange(0, C), tl.arange(0, BK), tile * BV + tl.arange(0, BV)
    dtype = a_tilde.dtype.element_ty
    S = tl.zeros((BV, BK), tl.float32)
    if MAPS:
        M_columns = tl.where(columns >= MAPS, columns - MAPS, BK)  # BK: none
        S = tl.where(M_columns[:, None] == keys[None, :], 1.0, 0.0)
    elif HAS_STATE:
        S = tl.trans(load_tile(initial_state + lane.to(tl.int64) * K * V, keys, columns, V, K, V))

    for c in range(tl.cdiv(length, C)):
        block, place = (first + c) * H + h, (start + c * C) * H + h
        left = length - c * C
        S_ = S.to(dtype)
        if SAVE:
            store_tile(starts + block * K * V, columns, keys, K, V, K, S_)
        erase = load_tile(a_tilde + block * C * K, rows, keys, K, C, K)
        write = -tl.dot(S_, tl.trans(erase), input_precision=PRECISION)
        write += tl.trans(load_tile(u + place * V, rows, columns, H * V, left, V))
        T_ = load_tile(T + block * C * C, rows, rows, C, C, C)
        R_ = tl.dot(write.to(dtype), tl.trans(T_), input_precision=PRECISION).to(dtype)
        if not MAPS:
            P_ = load_tile(P + block * C * C, rows, rows, C, C, C)
            read = load_tile(q_tilde + block * C * K, rows, keys, K, C, K)
            out = tl.dot(S_, tl.trans(read), input_precision=PRECISION)
            out = tl.dot(R_, tl.trans(P_), acc=out, input_precision=PRECISION)
            store_tile(o + place * V, rows, columns, H * V, left, V, tl.trans(out))
        if SAVE:
            store_tile(R + block * C * V, columns, rows, C, V, C, R_)
        decay = tl.load(gamma + block * K + keys, mask=keys < K, other=0.0)
        k_ = load_tile(k_bar + block * C * K, rows, keys, K, C, K)
        S = tl.dot(R_, k_, acc=S * decay[None, :], input_precision=PRECISION)
    if MAPS:
        store_tile(maps + (2 * lane).to(tl.int64) * K * K, keys, M_columns, K, K, K, tl.trans(S))
        store_tile(maps + (2 * lane + 1).to(tl.int64) * K * K, M_columns, keys, K, K, K, S)
    store_tile(final_state + lane.to(tl.int64) * K * V, keys, columns, V, K, V, tl.trans(S))


@triton.jit
def segment_starts(
    maps, N, initial_state,  # in: M and Mᵀ [sequences × segments, H, 2, K, K], N [… K, V], [sequences, H, K, V]
    starts,  # out: like N
    segments,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, HAS_STATE: tl.constexpr, REVERSE: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compose the maps of a sequence's segments into the state that each segment starts from. With REVERSE, for the
    backward, go from the last segment to the first, and by Mᵀ."""
    TILES: tl.constexpr = (V + BV - 1) // BV
    tile, lane = tl.program_id(0) % TILES, tl.program_id(0) // TILES
    n, h = lane // H, lane % H
    keys, columns = tl.arange(0, BK), tile * BV + tl.arange(0, BV)
    S = tl.zeros((BK, BV), tl.float32)
    if HAS_STATE:
        S = load_tile(initial_state + lane.to(tl.int64) * K * V, keys, columns, V, K, V)
    for step in range(segments):
        segment = segments - 1 - step if REVERSE else step
        at = (n * segments + segment).to(tl.int64) * H + h
        store_tile(starts + at * K * V, keys, columns, V, K, V, S)
        M = load_tile(maps + (2 * at + REVERSE) * K * K, keys, keys, K, K, K)
        N_ = load_tile(N + at * K * V, keys, columns, V, K, V)
        S = tl.dot(M, S, acc=N_, input_precision=PRECISION)
