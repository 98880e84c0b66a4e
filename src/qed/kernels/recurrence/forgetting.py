"""Chunks with a step that forgets, g = −inf: their pairs of tokens are computed one distance after the other.

`tiles.py` says which chunks these are. A pair i = j + apart needs the decays of tokens j + 1 … i, which are summed one
by one as the distance grows. No difference is taken, so −inf and NaN come out right. There are no matrix products over
pairs here, and the code is not made for speed, because few chunks have such a step.
"""

import triton
import triton.language as tl

from .tiles import FORGOTTEN, inverse, load_tile, step_decays, store_decay_gradient, store_tile


@triton.jit
def decays_of(g, place, rows, columns, length, H: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr):
    """Every token's decay since the chunk's start, [C, BK], its decay after the token to the chunk's end, [C, BK], and
    the decay of the whole chunk, [BK]."""
    each = step_decays(g, place, rows, columns, length, H, K, WIDTH)
    later = step_decays(g, place, rows + 1, columns, length, H, K, WIDTH)
    return tl.exp2(tl.cumsum(each, 0)), tl.exp2(tl.cumsum(later, 0, reverse=True)), tl.exp2(tl.sum(each, 0))


@triton.jit
def forgetting_terms(
    q, k, a, g, a_tilde, q_tilde, k_bar, gamma, P, T, place, block, length, scale,
    H: tl.constexpr, K: tl.constexpr, G_WIDTH: tl.constexpr,
    C: tl.constexpr, LOG_C: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What `chunk_terms` computes, for a chunk that forgets."""
    rows = tl.arange(0, C)
    i, j = rows[:, None], rows[None, :]
    pairs_a, pairs_q = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
    for first in range(0, K, BK):
        columns = first + tl.arange(0, BK)
        before, after, through = decays_of(g, place, rows, columns, length, H, K, G_WIDTH)
        a_ = load_tile(a + place * K, rows, columns, H * K, length, K).to(tl.float32)
        q_ = load_tile(q + place * K, rows, columns, H * K, length, K).to(tl.float32) * scale
        k_ = load_tile(k + place * K, rows, columns, H * K, length, K)
        tl.store(gamma + block * K + columns, through, mask=columns < K)
        store_tile(a_tilde + block * C * K, rows, columns, K, C, K, a_ * before)
        store_tile(q_tilde + block * C * K, rows, columns, K, C, K, q_ * before)
        store_tile(k_bar + block * C * K, rows, columns, K, C, K, k_ * after)
        between = tl.zeros((C, BK), tl.float32)
        for apart in range(C):
            earlier = tl.maximum(rows - apart, 0)  # where there is none, the pair is not taken
            decayed = load_tile(k + place * K, earlier, columns, H * K, length, K) * tl.exp2(between)
            here = i == j + apart
            pairs_a += tl.where(here, tl.sum(a_ * decayed, 1)[:, None], 0.0)
            pairs_q += tl.where(here, tl.sum(q_ * decayed, 1)[:, None], 0.0)
            between += step_decays(g, place, earlier, columns, length, H, K, G_WIDTH)
    store_tile(P + block * C * C, rows, rows, C, C, C, pairs_q)
    store_tile(T + block * C * C, rows, rows, C, C, C, inverse(tl.where(i > j, pairs_a, 0.0), C, LOG_C, PRECISION))


@triton.jit
def forgetting_gradients(
    q, k, a, g, do, E, R, starts, d_ends, dP, dA, dq, dk, da, dg, place, block, length, tile, all_tokens, scale,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, G_WIDTH: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What `chunk_gradients` computes, for a chunk that forgets."""
    rows, keys, columns = tl.arange(0, C), tile * BK + tl.arange(0, BK), tl.arange(0, BV)
    before, after, through = decays_of(g, place, rows, keys, length, H, K, G_WIDTH)
    S = load_tile(starts + block * K * V, columns, keys, K, V, K)  # S₀ᵀ; the next two are transposed too
    dS = load_tile(d_ends + block * K * V, columns, keys, K, V, K)
    R_ = load_tile(R + block * C * V, columns, rows, C, V, C)
    k_ = load_tile(k + place * K, rows, keys, H * K, length, K).to(tl.float32)
    d = tl.dot(tl.trans(R_), dS, input_precision=PRECISION) * after
    # The logarithm of a key's decay to the chunk's end is G at the last token minus G at the key's own token.
    d_whole = tl.sum(S.to(tl.float32) * dS.to(tl.float32), 0) * through + tl.sum(k_ * d, 0)
    between = tl.zeros((C, BK), tl.float32)
    for apart in range(C):
        later = rows + apart
        pair = (block * C + later) * C + rows
        on_q = tl.load(dP + pair, mask=later < C, other=0.0).to(tl.float32) * scale
        on_a = tl.load(dA + pair, mask=later < C, other=0.0).to(tl.float32)
        between += tl.where(apart > 0, step_decays(g, place, later, keys, length, H, K, G_WIDTH), 0.0)
        found = on_q[:, None] * load_tile(q + place * K, later, keys, H * K, length, K)
        found += on_a[:, None] * load_tile(a + place * K, later, keys, H * K, length, K)
        d += found * tl.exp2(between)
    store_tile(dk + place * K, rows, keys, H * K, length, K, d)
    dG = -(k_ * d)

    for which in range(2):
        is_q = which == 0
        x, read, pairs = tl.where(is_q, q, a), tl.where(is_q, do, E), tl.where(is_q, dP, dA)
        x_ = load_tile(x + place * K, rows, keys, H * K, length, K).to(tl.float32)
        read_ = load_tile(read + place * V, rows, columns, H * V, length, V)
        d = tl.dot(read_, S, input_precision=PRECISION) * tl.where(is_q, before, -before)
        between = tl.zeros((C, BK), tl.float32)
        for apart in range(C):
            earlier = tl.maximum(rows - apart, 0)  # where there is none, the pair is not taken
            on_k = tl.load(pairs + (block * C + rows) * C + earlier, mask=rows >= apart, other=0.0).to(tl.float32)
            decayed = load_tile(k + place * K, earlier, keys, H * K, length, K) * tl.exp2(between)
            d += tl.where((rows >= apart)[:, None], on_k[:, None] * decayed, 0.0)
            between += step_decays(g, place, earlier, keys, length, H, K, G_WIDTH)
        d *= tl.where(is_q, scale, 1.0)
        dG += x_ * d
        store_tile(tl.where(is_q, dq, da) + place * K, rows, keys, H * K, length, K, d)

    # A factor that is exactly 0 has no gradient.
    forgotten = step_decays(g, place, rows, keys, length, H, K, G_WIDTH) < FORGOTTEN
    dg_ = tl.where(forgotten, 0.0, tl.cumsum(dG, 0, reverse=True) + d_whole[None, :])
    store_decay_gradient(dg, dg_, place, rows, keys, length, tile, all_tokens, H, K, G_WIDTH)
