"""Finds where the chunks of packed sequences lie, and in which order sequences are taken, on the device, so that the
host does not wait for `cu_seqlens`.

Wrong offsets stop the program here, with a device-side assertion, before another kernel uses them.
"""

import triton
import triton.language as tl


@triton.jit(debug=True)  # without it there would be no assertions
def chunk_table(
    offsets,  # in: [sequences + 1]
    # out: the first token and the number of tokens of every chunk [chunks], 0 for chunks past the last sequence's end;
    # every sequence's first chunk, and the sequences in the order in which they are taken [sequences]
    chunk_starts, chunk_lengths, first, order,
    tokens, sequences, chunks,
    C: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Chunk c belongs to sequence n if the sequences before n have at most c chunks in all, and with n more than c.

    The sequences with most chunks are taken first, since a program goes through one of them, and a long one that
    starts last would be waited for. A sequence's place is the number of those that come before it.

    A program looks at BC chunks and at the sequences with the same numbers."""
    tl.device_assert(tl.load(offsets) == 0, "cu_seqlens: expected to start at 0")
    tl.device_assert(tl.load(offsets + sequences) == tokens, "cu_seqlens: expected to end at T")
    numbers = tl.program_id(0) * BC + tl.arange(0, BC)
    own_begin = tl.load(offsets + numbers, mask=numbers < sequences, other=0)
    own_end = tl.load(offsets + numbers + 1, mask=numbers < sequences, other=0)
    own_count = ((own_end - own_begin + (C - 1)) // C).to(tl.int32)
    owner = tl.zeros((BC,), tl.int32)
    before = tl.zeros((BC,), tl.int32)  # chunks of the sequences before the owner
    place = tl.zeros((BC,), tl.int32)
    ended = 0
    for start in range(0, sequences, BN):
        n = start + tl.arange(0, BN)
        begin = tl.load(offsets + n, mask=n < sequences, other=0)
        end = tl.load(offsets + n + 1, mask=n < sequences, other=0)
        tl.device_assert(begin <= end, "cu_seqlens: expected never to decrease")
        count = ((end - begin + (C - 1)) // C).to(tl.int32)
        ends = ended + tl.cumsum(count, 0)
        is_before = (ends[None, :] <= numbers[:, None]) & (n < sequences)[None, :]
        owner += tl.sum(is_before.to(tl.int32), 1)
        before += tl.sum(tl.where(is_before, count[None, :], 0), 1)
        longer = count[None, :] > own_count[:, None]
        as_long = (count[None, :] == own_count[:, None]) & (n[None, :] < numbers[:, None])
        place += tl.sum(((longer | as_long) & (n < sequences)[None, :]).to(tl.int32), 1)
        tl.store(first + n, ends - count, mask=n < tl.where(tl.program_id(0) == 0, sequences, 0))
        ended += tl.sum(count, 0)
    tl.store(order + place, numbers, mask=numbers < sequences)
    owned = owner < sequences
    begin = tl.load(offsets + owner, mask=owned, other=0)
    end = tl.load(offsets + owner + 1, mask=owned, other=0)
    at = begin + (numbers - before) * C
    tl.store(chunk_starts + numbers, at.to(tl.int32), mask=numbers < chunks)
    length = tl.where(owned, tl.minimum(end - at, C), 0)
    tl.store(chunk_lengths + numbers, length.to(tl.int32), mask=numbers < chunks)
