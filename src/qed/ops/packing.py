"""Which tokens form a chunk, and which chunks can run side by side.

A batch [B, T, ...] and a packed batch [1, total, ...] with `cu_seqlens` are the same thing here: flat tokens
plus sequence offsets. Every sequence is cut into chunks of C tokens; *step* n holds chunk n of every sequence
long enough to have one. Sequences are ordered longest first into *lanes*, so those still alive at step n are a
prefix, and one buffer of states serves them all. A *slab* is a few steps of a few lanes, bounded in size.

`Packing` is the other direction: a padded batch with a mask becomes a packed one, and back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor


def sequence_count(q: Tensor, cu_seqlens: Tensor | None) -> int:
    """Number of sequences N, the leading dimension of the state."""
    return q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def chunk_bound(batch: int, tokens: int, sequences: int, chunk: int, packed: bool) -> int:
    """An upper bound on the number of chunks that depends on shapes alone (exact when not packed)."""
    if packed:
        return (tokens + sequences * (chunk - 1)) // chunk
    return batch * -(-tokens // chunk)


class Step(NamedTuple):
    """One step of a slab."""

    chunks: slice  # its rows among the slab's chunks × heads
    lanes: slice  # the rows of the state buffer that it carries on


@dataclass(frozen=True, kw_only=True)
class Slab:
    """A few steps of a few lanes, worked on together. Chunks are numbered step by step, lane by lane."""

    first_chunk: int
    steps: tuple[Step, ...]
    chunk: int
    rows: Tensor  # [chunks * H * C] row of each token and head in a tensor viewed as [tokens * H, ...]
    padding: Tensor | None  # [chunks * H * C] bool, True where a chunk reaches past its sequence; None if nowhere

    def gather(self, x: Tensor, out: Tensor) -> Tensor:
        """[B, T, H, D] → `out` [chunks * H, C, D], zeros where there is no token."""
        flat, rows = x.reshape(-1, x.shape[-1]), out.view(-1, x.shape[-1])
        if x.dtype == out.dtype:
            torch.index_select(flat, 0, self.rows, out=rows)
        else:
            rows.copy_(flat.index_select(0, self.rows))
        if self.padding is not None:
            rows.masked_fill_(self.padding[:, None], 0)
        return out

    def scatter(self, chunked: Tensor, out: Tensor) -> None:
        """The inverse of `gather`: write [chunks * H, C, D] into the contiguous [B, T, H, D] `out`."""
        values, rows = chunked.reshape(self.rows.shape[0], -1), self.rows
        if self.padding is not None:
            values, rows = values[~self.padding], rows[~self.padding]
        out.view(-1, out.shape[-1]).index_copy_(0, rows, values.to(out.dtype))


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """All chunks of a batch. Lane i carries sequence `order[i]`, from token `starts[i]`, for `lengths[i]` tokens."""

    order: list[int]
    starts: list[int]
    lengths: list[int]
    chunk: int
    heads: int
    device: torch.device

    @staticmethod
    def of(q: Tensor, cu_seqlens: Tensor | None, chunk: int) -> Schedule:
        """From shapes alone; with `cu_seqlens`, from its values, which a GPU has to be waited for."""
        batch, tokens, heads = q.shape[:3]
        offsets = [n * tokens for n in range(batch + 1)] if cu_seqlens is None else cu_seqlens.tolist()
        lengths = [end - start for start, end in pairwise(offsets)]
        order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
        return Schedule(
            order=order,
            starts=[offsets[n] for n in order],
            lengths=[lengths[n] for n in order],
            chunk=chunk,
            heads=heads,
            device=q.device,
        )

    @property
    def chunks(self) -> int:
        return sum(-(-length // self.chunk) for length in self.lengths)

    def slabs(self, token_heads: int) -> Iterator[Slab]:
        """Cut lanes, then steps, into slabs of at most `token_heads` tokens × heads (at least a lane and a step)."""
        first_chunk, size = 0, max(1, token_heads // (self.heads * self.chunk))  # in chunks
        for first in range(0, len(self.order), size):
            lengths = self.lengths[first : first + size]
            alive = [sum(n > at for n in lengths) for at in range(0, max(lengths, default=0), self.chunk)]
            begin = 0
            while begin < len(alive):
                end = begin + max(1, size // alive[begin])
                yield self._slab(first_chunk, first, begin, alive[begin:end])
                first_chunk += sum(alive[begin:end])
                begin = end

    def _slab(self, first_chunk: int, first_lane: int, first_step: int, alive: list[int]) -> Slab:
        ends = list(accumulate(count * self.heads for count in alive))
        state = first_lane * self.heads
        steps = [Step(slice(a, b), slice(state, state + b - a)) for a, b in pairwise([0, *ends])]
        where = [(first_lane + i, first_step + n) for n, count in enumerate(alive) for i in range(count)]
        start = torch.tensor([self.starts[lane] + step * self.chunk for lane, step in where])
        left = torch.tensor([self.lengths[lane] - step * self.chunk for lane, step in where])
        position = torch.arange(self.chunk)
        beyond = position >= left[:, None]  # [chunks, C]: only a sequence's last chunk can be ragged
        token = (start[:, None] + position).masked_fill_(beyond, 0)
        rows = token[:, None, :] * self.heads + torch.arange(self.heads)[:, None]  # [chunks, H, C]
        padding = beyond[:, None, :].expand_as(rows).reshape(-1) if bool(beyond.any()) else None
        return Slab(
            first_chunk=first_chunk,
            steps=tuple(steps),
            chunk=self.chunk,
            rows=rows.reshape(-1).to(self.device),
            padding=None if padding is None else padding.to(self.device),
        )


@dataclass(frozen=True, kw_only=True)
class Packing:
    """A padded batch's real tokens. Left, right and interior padding all vanish: a mask row is one sequence."""

    tokens: Tensor  # [total] flat positions of the real tokens in [B * T]
    cu_seqlens: Tensor  # [B + 1]
    shape: tuple[int, int]  # (B, T)

    @staticmethod
    def from_mask(mask: Tensor) -> Packing:
        """`mask` [B, T], true (or 1) at real tokens. Reads the mask on the host: its sum sizes the packed batch."""
        if mask.dim() != 2:
            raise ValueError(f"mask: expected shape [B, T], got {list(mask.shape)}")
        mask = mask.bool()
        cu_seqlens = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0))
        return Packing(
            tokens=mask.reshape(-1).nonzero().squeeze(1),
            cu_seqlens=cu_seqlens,
            shape=(mask.shape[0], mask.shape[1]),
        )

    def pack(self, x: Tensor) -> Tensor:
        """[B, T, ...] → [1, total, ...]"""
        return x.flatten(0, 1).index_select(0, self.tokens).unsqueeze(0)

    def unpack(self, x: Tensor) -> Tensor:
        """[1, total, ...] → [B, T, ...], zeros at the padding."""
        batch, tokens = self.shape
        flat = x.new_zeros(batch * tokens, *x.shape[2:]).index_copy(0, self.tokens, x.squeeze(0))
        return flat.unflatten(0, self.shape)
