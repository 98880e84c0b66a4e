"""Finds which of the packed sequences every chunk belongs to, on the device, so that the host does not wait for
`cu_seqlens`.

Wrong offsets stop the program here, with a device-side assertion, before another kernel uses them.
"""

import triton
import triton.language as tl


@triton.jit(debug=True)  # without it there would be no assertions
def chunk_table(
    offsets,  # in: [sequences + 1]
    sequence_of, first,  # out: [chunks], with chunks past the last sequence's end among them, and [sequences]
    tokens, sequences, chunks,
    C: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Chunk c belongs to sequence n if the sequences before n have at most c chunks in all, and with n more than c."""
    tl.device_assert(tl.load(offsets) == 0, "cu_seqlens: expected to start at 0")
    tl.device_assert(tl.load(offsets + sequences) == tokens, "cu_seqlens: expected to end at T")
    numbers = tl.program_id(0) * BC + tl.arange(0, BC)
    owner = tl.zeros((BC,), tl.int32)
    ended = 0
    for start in range(0, sequences, BN):
        n = start + tl.arange(0, BN)
        begin = tl.load(offsets + n, mask=n < sequences, other=0)
        end = tl.load(offsets + n + 1, mask=n < sequences, other=0)
        tl.device_assert(begin <= end, "cu_seqlens: expected never to decrease")
        count = ((end - begin + (C - 1)) // C).to(tl.int32)
        ends = ended + tl.cumsum(count, 0)
        owner += tl.sum(((ends[None, :] <= numbers[:, None]) & (n < sequences)[None, :]).to(tl.int32), 1)
        tl.store(first + n, ends - count, mask=n < tl.where(tl.program_id(0) == 0, sequences, 0))
        ended += tl.sum(count, 0)
    tl.store(sequence_of + numbers, tl.minimum(owner, sequences - 1), mask=numbers < chunks)
