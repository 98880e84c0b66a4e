"""One token for every sequence: the state is read once and written once.

    S ← (I − k aᵀ) Diag(exp g) S + k uᵀ        o = scale · Sᵀ q        grid: columns of V × (sequences × heads)

Columns of the state do not depend on each other, so every program has some of them to itself from load to store, and
the new state may be written over the old one.
"""

import triton
import triton.language as tl

from .tiles import LOG2_E, load_tile, store_tile


@triton.jit
def decode_step(
    q, k, a, u, g, state,  # in: [lanes, K], u [lanes, V], g [lanes, G_WIDTH], state [lanes, K, V]
    o, new_state, scale,  # out: o [lanes, V]
    K: tl.constexpr, V: tl.constexpr, G_WIDTH: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Compute o and the new state for BV columns of one lane (a sequence and a head)."""
    TILES: tl.constexpr = (V + BV - 1) // BV
    tile, lane = tl.program_id(0) % TILES, (tl.program_id(0) // TILES).to(tl.int64)
    keys, columns = tl.arange(0, BK), tile * BV + tl.arange(0, BV)
    S = load_tile(state + lane * K * V, keys, columns, V, K, V)
    q_ = tl.load(q + lane * K + keys, mask=keys < K, other=0.0).to(tl.float32) * scale
    k_ = tl.load(k + lane * K + keys, mask=keys < K, other=0.0).to(tl.float32)
    a_ = tl.load(a + lane * K + keys, mask=keys < K, other=0.0).to(tl.float32)
    u_ = tl.load(u + lane * V + columns, mask=columns < V, other=0.0).to(tl.float32)
    if G_WIDTH == 1:
        S *= tl.exp2(tl.load(g + lane).to(tl.float32) * LOG2_E)
    elif G_WIDTH > 1:
        S *= tl.exp2(tl.load(g + lane * K + keys, mask=keys < K, other=0.0).to(tl.float32) * LOG2_E)[:, None]
    residual = u_ - tl.sum(a_[:, None] * S, 0)
    S += k_[:, None] * residual[None, :]
    store_tile(new_state + lane * K * V, keys, columns, V, K, V, S)
    out = tl.sum(q_[:, None] * S, 0)
    tl.store(o + lane * V + columns, out.to(o.dtype.element_ty), mask=columns < V)
