"""What the kernels share: where a chunk's tokens lie, decays between tokens, and the inverse of I + A.

Decays. With G the running sum of g inside a chunk, a pair i > j needs exp(G_i − G_j) in every channel, and the sum over
channels has to be a matrix product, so the exponential must be split into a factor of i and one of j.

- A chunk is one block, or several sub-blocks of SUB tokens. Pairs in one block are computed relative to its centre c,
  half way down its decay: exp(G_i − c) · exp(c − G_j). One of the two factors may be large, but no larger than
  exp(REACH / 2) if the whole block decays by no less than exp(−REACH). Their product is small again for the pairs that
  are needed, i > j. Products of other pairs may overflow, so these are masked with `where`, never by a factor of zero.
  REACH is 110 for 16-bit numbers, because exp(−55) times a gradient of 1e-14 is still a normal number. For float32 it
  is 80, because beyond that the rounding of G itself would show.
- Where a chunk decays further, it is cut into RATIO parts. With B the running sum at a part's beginning, a pair of
  tokens in parts I > J needs exp(G_i − B_I) · exp(B_I − B_{J+1}) · exp(B_{J+1} − G_j): three decays. The middle one,
  over the parts that lie between, is again split into a factor of I and one of J relative to a centre. This is possible
  because each part's decay is bounded there from below by exp(−REACH / RATIO), which is less than the precision shows:
  1e-6 for 16-bit numbers (RATIO = 8), 2e-9 for float32 (RATIO = 4). So one product computes all pairs of different
  parts, however far they decay.
- Pairs in one part are computed in the same way, with the part cut again (float32, LEVELS = 2), or relative to its
  centre, when the part is a sub-block. A sub-block decays no further than exp(−REACH), because in a chunk that is cut
  every g is bounded from below by −REACH / SUB: exp(−13.75) = 1e-6 for 16-bit numbers, SUB = 8, and exp(−20) = 2e-9
  for float32, SUB = 4.
- A step that *forgets* has a decay below 2^FORGOTTEN, for which not even float64 has a normal number: g = −inf, and
  the large negative numbers that people write for it. Models' own decays stay far above, however strong they are. The
  factor of such a step is exactly 0, which no difference of sums gives. A chunk with such a step computes its pairs one
  distance after the other instead (`forgetting.py`), which is exact and many times slower. Other chunks do not pay for
  it.

Each kernel with pairs is launched twice: for the chunks that are one block (SUB = C, LEVELS = 0), and for those that
are cut. When training starts, decays reach exp(−104) in a chunk, and in 16 bits every chunk is one block; later many
may be cut.

Products are of the whole chunk with itself, masked to the pairs they are for: every operand is a full tile. Exponents
are powers of two (g times log₂e). −inf − (−inf) never arises, because what is −inf is bounded before it is summed. NaN
is not bounded: a NaN in g makes its whole chunk NaN, and through the state everything after it.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
FORGOTTEN = tl.constexpr(-1022.0)  # in powers of two: the smallest normal float64


@triton.jit
def chunk_place(chunk, tokens, chunk_starts, chunk_lengths, PACKED: tl.constexpr, C: tl.constexpr):
    """The first token of a chunk in the flat batch, and how many of its C tokens exist (0 if there is no such
    chunk). For packed sequences both were looked up beforehand (`table.py`), so that a program waits for one load."""
    if PACKED:
        start, length = tl.load(chunk_starts + chunk).to(tl.int64), tl.load(chunk_lengths + chunk)
    else:
        per_sequence = tl.cdiv(tokens, C)
        at = (chunk % per_sequence) * C
        start = (chunk // per_sequence).to(tl.int64) * tokens + at
        length = tl.minimum(tokens - at, C)
    return start, length


@triton.jit
def segment_place(
    n, tokens, segments, segment_chunks, offsets, chunk_offsets, PACKED: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """The first token of a segment in the flat batch, its length, and its first chunk. A packed sequence is one
    segment."""
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
def lane_place(
    lane, order, tokens, segments, segment_chunks, offsets, chunk_offsets,
    H: tl.constexpr, PACKED: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The lane (a segment's number times H, plus its head) that a program works on, its head, and its segment's place.
    Packed sequences are taken in the order in which `order` has them, the longest first."""
    n, h = lane // H, lane % H
    if PACKED:
        n = tl.load(order + n)
        lane = n * H + h
    start, length, first = segment_place(n, tokens, segments, segment_chunks, offsets, chunk_offsets, PACKED, C)
    return lane, h, start, length, first


@triton.jit
def load_tile(x, rows, columns, stride, n_rows, n_columns):
    """Load some rows and columns of a matrix whose rows are contiguous; there are zeros outside it."""
    inside = (rows[:, None] < n_rows) & (columns[None, :] < n_columns)
    return tl.load(x + rows[:, None].to(tl.int64) * stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def store_tile(x, rows, columns, stride, n_rows, n_columns, value):
    """Store some rows and columns of a matrix whose rows are contiguous; what is outside it is left out."""
    inside = (rows[:, None] < n_rows) & (columns[None, :] < n_columns)
    where = x + rows[:, None].to(tl.int64) * stride + columns[None, :]
    tl.store(where, value.to(x.dtype.element_ty), mask=inside)


@triton.jit
def store_decay_gradient(
    dg, value, place, rows, keys, length, tile, all_tokens, H: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Store the gradient [C, BK] of a decay per channel; or, with one decay per head, its sum over the tile's
    channels."""
    if WIDTH == 1:
        where = dg + (tile.to(tl.int64) * all_tokens * H + place) + rows.to(tl.int64) * H
        tl.store(where, tl.sum(value, 1), mask=rows < length)
    else:
        store_tile(dg + place * K, rows, keys, H * K, length, K, value)


@triton.jit
def step_decays(g, place, rows, columns, length, H: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr):
    """g [C, BK] in powers of two, from a g of width K, 1 (one decay per head) or 0 (none)."""
    C: tl.constexpr = rows.shape[0]
    BK: tl.constexpr = columns.shape[0]
    if WIDTH == 0:
        each = tl.zeros((C, BK), tl.float32)
    elif WIDTH == 1:
        each = tl.load(g + place + rows.to(tl.int64) * H, mask=rows < length, other=0.0).to(tl.float32)
        each = tl.broadcast_to(each[:, None], (C, BK))
    else:
        each = load_tile(g + place * K, rows, columns, H * K, length, K).to(tl.float32)
    return each * LOG2_E


@triton.jit
def bounded(each, LEAST: tl.constexpr):
    """The decays of a chunk that is cut, in powers of two: none is below LEAST, which is in the unit of g. NaN
    stays."""
    return tl.maximum(each, LEAST * LOG2_E, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def forgets(most):
    """Whether some step of a chunk forgets, from what `most_decay` gave. Such a chunk is one of those that are cut."""
    return most == float("-inf")


@triton.jit
def centred(each, SUB: tl.constexpr):
    """G as the sum of two parts: every token's, relative to its sub-block's centre [C, BK], and the centre's own [C /
    SUB, BK]. Then each sub-block's decay; the decay from each centre to the chunk's end, summed by itself because a
    difference of large sums would not be exact enough; and the decay of the whole chunk [BK]."""
    blocks = tl.reshape(each, (each.shape[0] // SUB, SUB, each.shape[1]))
    total = tl.sum(blocks, 1)
    own = flat(tl.cumsum(blocks, 1) - 0.5 * total[:, None, :])
    rest = tl.cumsum(total, 0, reverse=True) - 0.5 * total
    return own, tl.cumsum(total, 0) - 0.5 * total, total, rest, tl.sum(total, 0)


@triton.jit
def as_operand(x, CENTRED: tl.constexpr, PRECISION: tl.constexpr):
    """x rounded as a matrix product rounds its operands. The gradient of G is a difference of sums over the same pairs,
    so the numbers must be the same inside matrix products and outside of them."""
    x = x.to(CENTRED)
    if PRECISION == "tf32" and tl.float32 == CENTRED:  # the upper 19 bits: round to the nearest such number
        x = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return x


@triton.jit
def whole_enough(most, REACH: tl.constexpr):
    """Whether a chunk can be one block, from how far the channel that decays most decays over the chunk."""
    return most >= -REACH * LOG2_E


@triton.jit
def most_decay(
    g, place, length, H: tl.constexpr, K: tl.constexpr, ALL_K: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """How far the channel that decays most decays over the chunk, in powers of two; −inf if one of its steps
    forgets."""
    each = step_decays(g, place, tl.arange(0, C), tl.arange(0, ALL_K), length, H, K, WIDTH)
    return tl.min(tl.sum(tl.where(each < FORGOTTEN, float("-inf"), each), 0))


@triton.jit
def level_factors(total, level: tl.constexpr, RATIO: tl.constexpr, REACH: tl.constexpr, SUB: tl.constexpr):
    """The factors of rows and of columns at one level, [C, BK] twice, from the decays of sub-blocks. Rows decay from
    their part's beginning to their sub-block's centre, columns from their sub-block's centre to their part's end; each
    factor has its share of the decay over the parts between them."""
    BK: tl.constexpr = total.shape[1]
    PARTS: tl.constexpr = RATIO ** (level + 1)
    if total.shape[0] == PARTS:
        part, to_centre, to_end = total, 0.5 * total, 0.5 * total
    else:
        each = tl.reshape(total, (PARTS, total.shape[0] // PARTS, BK))
        part = tl.sum(each, 1)
        to_centre = flat(tl.cumsum(each, 1) - 0.5 * each)
        to_end = flat(tl.cumsum(each, 1, reverse=True) - 0.5 * each)
    part = tl.maximum(part, -REACH / RATIO * LOG2_E)
    if level == 0:
        before, half = tl.cumsum(part, 0) - part, 0.5 * tl.sum(part, 0)[None, :]
    else:
        within = tl.reshape(part, (PARTS // RATIO, RATIO, BK))
        before = flat(tl.cumsum(within, 1) - within)
        half = per_token(0.5 * tl.sum(within, 1), RATIO)
    row = to_centre + per_token(before - half, total.shape[0] // PARTS)
    column = to_end + per_token(half - before - part, total.shape[0] // PARTS)
    return per_token(tl.exp2(row), SUB), per_token(tl.exp2(column), SUB)


@triton.jit
def in_other_parts(i, j, level: tl.constexpr, RATIO: tl.constexpr, C: tl.constexpr):
    """Whether a pair belongs to a level: both tokens are in one part of the level above, and j is in an earlier part of
    this level than i."""
    SIZE: tl.constexpr = C // RATIO ** (level + 1)
    return (i // SIZE > j // SIZE) & (i // (SIZE * RATIO) == j // (SIZE * RATIO))


@triton.jit
def per_token(x, SUB: tl.constexpr):
    """Repeat every sub-block's row for each of its tokens: [C / SUB, BK] → [C, BK]."""
    return flat(tl.broadcast_to(x[:, None, :], (x.shape[0], SUB, x.shape[1])))


@triton.jit
def flat(x):
    """Merge sub-blocks and their tokens: [C / SUB, SUB, BK] → [C, BK]."""
    return tl.reshape(x, (x.shape[0] * x.shape[1], x.shape[2]))


@triton.jit
def inverse(A, C: tl.constexpr, LOG_C: tl.constexpr, PRECISION: tl.constexpr):
    """(I + A)⁻¹ of a strictly lower triangular A. If D has the inverses of the diagonal blocks of some size, the
    inverses of blocks of twice the size are D − D M D, where M has the lower-left quarters of these blocks of A. All
    products are dense ones of whole tiles, since D is block diagonal."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    D = tl.where(i == j, 1.0, tl.where(i ^ j == 1, -A, 0.0))
    for level in range(1, LOG_C):
        M = tl.where((i >> level) ^ (j >> level) == 1, A, 0.0)
        D -= tl.dot(D, tl.dot(M, D, input_precision=PRECISION), input_precision=PRECISION)
    return D
