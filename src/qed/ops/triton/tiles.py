"""What the kernels share: where a chunk's tokens lie, decays between tokens, and the inverse of I + A.

Decays. With G the running sum of g inside a chunk, a pair i > j needs exp(G_i − G_j) in every channel, and the sum over
channels has to be a matrix product, so the exponential must fall apart into a factor of i and one of j.

- A chunk is one block, or several sub-blocks of SUB tokens. Pairs in one block are taken about its centre, half way
  down its decay: exp(G_i − c) · exp(c − G_j). One of the two may be large, by no more than exp(±REACH / 2) if a block's
  whole decay is no less than exp(−REACH). What is wanted is small again; pairs i < j, which are not, may overflow, and
  are masked by choice, never by a factor of zero. REACH is 110 for 16-bit numbers: exp(−55) times a gradient of 1e-14
  is still a normal number. For float32 it is 80: the rounding of G itself would show.
- Where a chunk decays further, it is cut: into halves, if neither passes exp(−REACH). Where one does, SUB is such that
  no sub-block can, because no g counts below −80 / SUB. For float32, SUB = 4: exp(−20) = 2e-9 is below its rounding of
  whatever it multiplies. For 16-bit numbers, SUB = 8: exp(−10) = 5e-5 is below theirs.
- Between sub-blocks, as in `decay.py`, blocks of them are halved again and again: where i lies in the second half and
  j in the first, both factors are decays, from the middle and to it. A token's own factor, from its centre, is the
  same at every level; a level only adds one for every sub-block.

Most chunks are whole (when a model starts to learn, all: its decays reach exp(−104)). So each kernel with pairs is
launched three times, for all chunks as one block (SUB = C) and, with what it stores replaced, for those that
are halved and those that are cut further. One launch with both would compile, and be wrong (Triton 3.6, Hopper).

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
def segment_place(
    n, tokens, segments, segment_chunks, offsets, chunk_offsets, PACKED: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """First token of a segment in the flat batch, its length, and its first chunk. A packed sequence is one segment."""
    if PACKED:
        start = tl.load(offsets + n).to(tl.int64)
        length = (tl.load(offsets + n + 1).to(tl.int64) - start).to(tl.int32)
        first = tl.load(chunk_offsets + n).to(tl.int64)
    else:
        before = n % segments * segment_chunks
        start = (n // segments).to(tl.int64) * tokens + before * C
        length = tl.minimum(tokens - before * C, segment_chunks * C)
        first = (n // segments).to(tl.int64) * tl.cdiv(tokens, C) + before
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
    g, place, rows, columns, length, H: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, LEAST: tl.constexpr
):  # fmt: skip
    """g [C, BK] in powers of two, none below LEAST, from width K, 1 (one decay per head) or 0 (none)."""
    C: tl.constexpr = rows.shape[0]
    BK: tl.constexpr = columns.shape[0]
    if WIDTH == 0:
        each = tl.zeros((C, BK), tl.float32)
    elif WIDTH == 1:
        each = tl.load(g + place + rows.to(tl.int64) * H, mask=rows < length, other=0.0).to(tl.float32)
        each = tl.broadcast_to(each[:, None], (C, BK))
    else:
        each = load_tile(g + place * K, rows, columns, H * K, length, K).to(tl.float32)
    return tl.maximum(each, LEAST) * LOG2_E


@triton.jit
def centred(each, SUB: tl.constexpr):
    """G as a part of every token and one of its sub-block's centre, [C, BK] and [C / SUB, BK]; the sub-blocks' running
    sum up to their end; the sum from a centre to the chunk's end (a difference of large sums would not do); the chunk's
    [BK]."""
    blocks = tl.reshape(each, (each.shape[0] // SUB, SUB, each.shape[1]))
    total = tl.sum(blocks, 1)
    own = flat(tl.cumsum(blocks, 1) - 0.5 * total[:, None, :])
    upto = tl.cumsum(total, 0)
    rest = tl.cumsum(total, 0, reverse=True) - 0.5 * total
    return own, upto - 0.5 * total, upto, rest, tl.sum(total, 0)


@triton.jit
def as_operand(x, CENTRED: tl.constexpr, PRECISION: tl.constexpr):
    """Rounded to what a matrix product takes of it. The gradient of G is a difference of sums over the same pairs, in
    which what products leave of a number must be what stands outside of them."""
    x = x.to(CENTRED)
    if PRECISION == "tf32" and tl.float32 == CENTRED:  # the upper 19 bits: round to the nearest such number
        x = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return x


@triton.jit
def whole_enough(lowest, REACH: tl.constexpr):
    """Whether a chunk can be one block: by what its channel of most decay decays in all."""
    return tl.load(lowest) >= -REACH * LOG2_E


@triton.jit
def to_be_cut(
    lowest, g, place, length, H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, WIDTH: tl.constexpr,
    LEAST: tl.constexpr, REACH: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Whether this is how a chunk is cut: into halves, LEVELS = 1, or further."""
    cut = not whole_enough(lowest, REACH)
    if HALVES and cut:
        each = step_decays(g, place, tl.arange(0, C), tl.arange(0, BK), length, H, K, WIDTH, LEAST)
        halved = tl.min(tl.sum(tl.reshape(each, (2, C // 2, BK)), 1)) >= -REACH * LOG2_E
        cut = halved == (LEVELS == 1)
    return cut


@triton.jit
def level_factors(centre, upto, level, SUB: tl.constexpr):
    """What a level's rows have decayed from the middle of their block of 2·2^level sub-blocks to their centre, and its
    columns from theirs to the middle. [C, BK] twice, zero where a token is on the other side."""
    sub = tl.arange(0, centre.shape[0])
    if centre.shape[0] == 2:
        mid = tl.sum(tl.where(sub[:, None] == 0, upto, 0.0), 0)[None, :]
    else:
        last_before_mid = (sub >> (level + 1) << (level + 1)) + (1 << level) - 1
        mid = tl.gather(upto, tl.broadcast_to(last_before_mid[:, None], upto.shape), 0)
    second = ((sub >> level) % 2 == 1)[:, None]
    row = tl.where(second, tl.exp2(centre - mid), 0.0)
    column = tl.where(second, 0.0, tl.exp2(mid - centre))
    return per_token(row, SUB), per_token(column, SUB)


@triton.jit
def per_token(x, SUB: tl.constexpr):
    """[C / SUB, BK] → [C, BK]"""
    return flat(tl.broadcast_to(x[:, None, :], (x.shape[0], SUB, x.shape[1])))


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
