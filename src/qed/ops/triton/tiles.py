"""What the kernels share: where a chunk's tokens lie, decays between tokens, and the inverse of I + A.

Decays. With G the running sum of g inside a chunk, a pair i > j needs exp(G_i − G_j) in every channel, and the sum over
channels has to be a matrix product, so the exponential must fall apart into a factor of i and one of j.

- Between sub-blocks of SUB tokens, as in `decay.py`, blocks of sub-blocks are halved again and again: where i lies in
  the second half of a block and j in the first, both factors are decays, to the block's middle and from it. A token's
  decay from its sub-block's start (rows) or to its end (keys) is the same at every level, so a level only needs one
  more factor for every sub-block.
- Inside a sub-block the middle of its decay c is the reference for all pairs: exp(G_i − c) · exp(c − G_j). One of the
  two may be large, by no more than exp(80), because no g counts below −160 / SUB. For float32, SUB = 8: exp(−20) = 2e-9
  is below its rounding of whatever it multiplies. For 16-bit numbers, SUB = 16: exp(−10) = 5e-5 is below theirs.

Products are of the whole chunk with itself, masked to the pairs they are for: every operand is a full tile. Exponents
are powers of two (g times log₂e). g = −inf is a clamped g like others, and −inf − (−inf) never arises.
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
    """g as [C / SUB, SUB, BK] in powers of two, clamped, from width K, 1 (one decay per head) or 0 (none)."""
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
    """(I + A)⁻¹ of a strictly lower triangular A. With D the inverses of its diagonal blocks of some size, those of
    twice the size are D − D M D, M the lower left quarters of A: dense products, since D is block diagonal."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    D = tl.where(i == j, 1.0, tl.where(i ^ j == 1, -A, 0.0))
    for level in range(1, LOG_C):
        M = tl.where((i >> level) ^ (j >> level) == 1, A, 0.0)
        D -= tl.dot(D, tl.dot(M, D, input_precision=PRECISION), input_precision=PRECISION)
    return D
