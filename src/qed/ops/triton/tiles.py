"""What the kernels share: where a chunk's tokens lie, decays between tokens, and the inverse of I + A.

Decays. With G the running sum of g inside a chunk, a pair i > j needs exp(G_i − G_j) in every channel, and the sum
over channels has to be a matrix product. As in `decay.py` the chunk is halved again and again: where i lies in the
second half of a block and j in the first, with mid the last token of the first,

    exp(G_i − G_j) = exp(G_i − G_mid) · exp(G_mid − G_j),

two factors in [0, 1]. One factor per token, exp(−|G − G_mid|), serves a level's rows and columns alike; a dense
product of the chunk with itself, masked to the pairs the level is for, keeps every operand a full tile.

All exponents are in powers of two (g arrives times log₂e) and no g counts below `WEAKEST`: exp(−20) = 2e-9 is below
float32's rounding of whatever it multiplies, and −inf − (−inf) never arises.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def chunk_place(chunk, tokens, offsets, sequence_of, chunk_offsets, PACKED: tl.constexpr, C: tl.constexpr):
    """First token of a chunk in the flat batch, and how many of its C tokens exist (0 if there is no such chunk)."""
    if PACKED:
        n = tl.load(sequence_of + chunk)
        at = (chunk - tl.load(chunk_offsets + n)) * C
        start = tl.load(offsets + n)
        left = tl.load(offsets + n + 1) - start - at
    else:
        per_sequence = tl.cdiv(tokens, C)
        n = chunk // per_sequence
        at = (chunk % per_sequence) * C
        start = n.to(tl.int64) * tokens
        left = (tokens - at).to(tl.int64)
    return start.to(tl.int64) + at, tl.minimum(left, C).to(tl.int32)


@triton.jit
def sequence_place(n, tokens, offsets, chunk_offsets, PACKED: tl.constexpr, C: tl.constexpr):
    """First token of a sequence in the flat batch, its length, and its first chunk."""
    if PACKED:
        start = tl.load(offsets + n).to(tl.int64)
        length = (tl.load(offsets + n + 1).to(tl.int64) - start).to(tl.int32)
        first = tl.load(chunk_offsets + n).to(tl.int64)
    else:
        start = n.to(tl.int64) * tokens
        length = tokens
        first = n.to(tl.int64) * tl.cdiv(tokens, C)
    return start, length, first


@triton.jit
def load_tile(x, rows, columns, stride, n_rows, n_columns):
    """[rows, columns] of a matrix of contiguous rows; zeros outside it."""
    inside = (rows[:, None] < n_rows) & (columns[None, :] < n_columns)
    return tl.load(x + rows[:, None].to(tl.int64) * stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def store_tile(x, rows, columns, stride, n_rows, n_columns, value):
    inside = (rows[:, None] < n_rows) & (columns[None, :] < n_columns)
    where = x + rows[:, None].to(tl.int64) * stride + columns[None, :]
    tl.store(where, value.to(x.dtype.element_ty), mask=inside)


@triton.jit
def step_decays(
    g, place, rows, columns, length, H: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, SUB: tl.constexpr
):  # fmt: skip
    """g as [C / SUB, SUB, BK] in powers of two, from width K, 1 (one decay per head) or 0 (none)."""
    C: tl.constexpr = rows.shape[0]
    BK: tl.constexpr = columns.shape[0]
    if WIDTH == 0:
        each = tl.zeros((C, BK), tl.float32)
    elif WIDTH == 1:
        each = tl.load(g + place + rows.to(tl.int64) * H, mask=rows < length, other=0.0).to(tl.float32)
        each = tl.broadcast_to(each[:, None], (C, BK))
    else:
        each = load_tile(g + place * K, rows, columns, H * K, length, K).to(tl.float32)
    return tl.reshape(tl.maximum(each, -160.0 / SUB) * LOG2_E, (C // SUB, SUB, BK))


@triton.jit
def level_factors(total, upto, level):
    """By how much a level's rows and columns have decayed beyond their sub-block's start and end: from the middle of
    their block of 2·2^level sub-blocks, and to it. [C / SUB, 1, BK] twice, zero where a sub-block is on the other
    side. `total` is the decay of every sub-block, `upto` that of all up to its end."""
    sub = tl.arange(0, total.shape[0])
    last_before_mid = (sub >> (level + 1) << (level + 1)) + (1 << level) - 1
    mid = tl.gather(upto, tl.broadcast_to(last_before_mid[:, None], upto.shape), 0)
    second = ((sub >> level) % 2 == 1)[:, None]
    row = tl.where(second, tl.exp2(tl.minimum(upto - total - mid, 0.0)), 0.0)
    column = tl.where(second, 0.0, tl.exp2(tl.minimum(mid - upto, 0.0)))
    return row[:, None, :], column[:, None, :]


@triton.jit
def load_blocks(x, rows, columns, stride, n_rows, n_columns, SUB: tl.constexpr):
    """`load_tile` in float32 as [C / SUB, SUB, BK]."""
    found = load_tile(x, rows, columns, stride, n_rows, n_columns).to(tl.float32)
    return tl.reshape(found, (rows.shape[0] // SUB, SUB, columns.shape[0]))


@triton.jit
def flat(x):
    """[C / SUB, SUB, BK] → [C, BK]"""
    return tl.reshape(x, (x.shape[0] * x.shape[1], x.shape[2]))


@triton.jit
def inverse(A, C: tl.constexpr, LOG_C: tl.constexpr, PRECISION: tl.constexpr):
    """(I + A)⁻¹ of a strictly lower triangular A. With D the inverses of the diagonal blocks of HALF tokens, those of
    twice the size are D − D M D, M the lower left quarters of A: dense products, since D is block diagonal."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    D = tl.where(i == j, 1.0, tl.where(i ^ j == 1, -A, 0.0))
    for level in range(1, LOG_C):
        M = tl.where((i >> level) ^ (j >> level) == 1, A, 0.0)
        D -= tl.dot(D, tl.dot(M, D, input_precision=PRECISION), input_precision=PRECISION)
    return D
