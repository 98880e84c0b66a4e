"""Which tokens form a chunk, and which chunks can run side by side.

A batch [B, T, ...] and a packed batch [1, total, ...] with `cu_seqlens` are the same thing here: flat tokens
plus sequence offsets. Every sequence is cut into chunks of C tokens; *step* n holds chunk n of every sequence
long enough to have one. Each sequence is a *lane*, and lanes are ordered longest first. The sequences that still have
a chunk at step n are then the first lanes, so one buffer of states serves them all. A *slab* is a few steps of a few
lanes, bounded in size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .validation import offsets_of


def sequence_count(q: Tensor, cu_seqlens: Tensor | None) -> int:
    """Return the number of sequences N, the leading dimension of the state."""
    return q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def chunk_bound(batch: int, tokens: int, sequences: int, chunk: int, packed: bool) -> int:
    """Return an upper bound on the number of chunks that depends on shapes alone; it is exact if nothing is packed.

    Args:
        batch: B, the number of rows.
        tokens: T, the tokens of each row.
        sequences: N, the number of sequences.
        chunk: tokens of a chunk.
        packed: whether the sequences are packed along T.
    """
    if packed:
        return (tokens + sequences * (chunk - 1)) // chunk
    return batch * -(-tokens // chunk)


class Step(NamedTuple):
    """One step of a slab."""

    chunks: slice  # its rows among the slab's chunks × heads
    lanes: slice  # the rows of the state buffer that it moves on by one chunk
    kept: slice | None  # its rows among the start states kept for the backward, if its own are kept


class Grid(NamedTuple):
    """Where a slab's tokens lie when its chunks are whole and evenly spaced: in one strided view, so that gathering
    them is a plain copy."""

    first: int  # row of the first token and head in a tensor viewed as [tokens * H, ...]
    shape: tuple[int, ...]  # steps, lanes, H, C
    strides: tuple[int, ...]  # of the same, in rows

    def _view(self, x: Tensor) -> Tensor:
        width = x.shape[-1]
        strides = (*(stride * width for stride in self.strides), 1)
        return x.as_strided((*self.shape, width), strides, x.storage_offset() + self.first * width)

    def gather(self, x: Tensor, out: Tensor) -> None:
        """Copy the slab's tokens of x into `out`; see `Slab.gather`."""
        out.unflatten(0, self.shape[:3]).copy_(self._view(x))

    def scatter(self, chunked: Tensor, out: Tensor) -> None:
        """Copy the slab's chunks to their tokens in `out`; see `Slab.scatter`."""
        self._view(out).copy_(chunked.unflatten(0, self.shape[:3]))


class Rows(NamedTuple):
    """Where a slab's tokens lie in general: every token and head has a row of its own."""

    rows: Tensor  # [chunks * H * C] row of each token and head in a tensor viewed as [tokens * H, ...]
    padding: Tensor  # [chunks * H * C] bool, True where a chunk reaches past its sequence

    def gather(self, x: Tensor, out: Tensor) -> None:
        """Copy the slab's tokens of x into `out`; see `Slab.gather`."""
        tokens = x.view(-1, x.shape[-1]).index_select(0, self.rows).masked_fill_(self.padding[:, None], 0)
        out.copy_(tokens.view(out.shape))

    def scatter(self, chunked: Tensor, out: Tensor) -> None:
        """Copy the slab's chunks to their tokens in `out`; see `Slab.scatter`."""
        there = ~self.padding
        values = chunked.reshape(there.shape[0], -1)[there].to(out.dtype)
        out.view(-1, out.shape[-1]).index_copy_(0, self.rows[there], values)


@dataclass(frozen=True, kw_only=True)
class Slab:
    """A few steps of a few lanes, worked on together. Chunks are numbered step by step, lane by lane."""

    first_chunk: int
    chunks: int
    steps: tuple[Step, ...]
    places: Grid | Rows

    def gather(self, x: Tensor, out: Tensor) -> Tensor:
        """Copy the slab's tokens from the contiguous x [B, T, H, D] into `out` [chunks * H, C, D], with zeros where
        there is no token, and return `out`."""
        self.places.gather(x, out)
        return out

    def scatter(self, chunked: Tensor, out: Tensor) -> None:
        """The inverse of `gather`: write [chunks * H, C, D] into the contiguous [B, T, H, D] `out`."""
        self.places.scatter(chunked, out)


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
        """Return the schedule of a batch. It follows from shapes alone; with `cu_seqlens` it follows from their values,
        and if these are on a GPU, the host waits for it.

        Args:
            q: queries [B, T, H, K], of which only the shape and the device count.
            cu_seqlens: offsets [N + 1] of packed sequences, or None.
            chunk: tokens of a chunk.
        """
        batch, tokens, heads = q.shape[:3]
        offsets = [n * tokens for n in range(batch + 1)] if cu_seqlens is None else offsets_of(cu_seqlens, tokens)
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

    def chunks(self, each: int = 1) -> int:
        """Return into how many groups of up to `each` chunks all sequences are cut."""
        return sum(-(-length // (each * self.chunk)) for length in self.lengths)

    def slabs(self, token_heads: int, every: int) -> Iterator[Slab]:
        """Cut lanes, then steps, into slabs of at most `token_heads` tokens × heads, but of at least one lane and
        `every` steps. The start states of one step in `every` are kept, beginning with the first step of each slab."""
        chunk = kept = 0
        size = max(every, token_heads // (self.heads * self.chunk))  # in chunks
        lanes = size // every
        for lane in range(0, len(self.order), lanes):
            lengths = self.lengths[lane : lane + lanes]
            alive = [sum(n > at for n in lengths) for at in range(0, max(lengths, default=0), self.chunk)]
            begin = 0
            while begin < len(alive):
                end = begin + size // alive[begin] // every * every
                yield self._slab(chunk, kept, lane, begin, alive[begin:end], every)
                chunk += sum(alive[begin:end])
                kept += sum(alive[begin:end:every])
                begin = end

    def _slab(self, chunk: int, kept: int, lane: int, step: int, alive: list[int], every: int) -> Slab:
        """Return the slab of the steps from `step` on and the lanes from `lane` on; `alive` says how many lanes each
        step has. `chunk` and `kept` count the chunks and the kept start states of the slabs before."""
        steps, at, heads = [], 0, self.heads
        for n, count in enumerate(alive):
            rows = count * heads
            state = slice(kept * heads, kept * heads + rows) if n % every == 0 else None
            steps.append(Step(slice(at, at + rows), slice(lane * heads, lane * heads + rows), state))
            at += rows
            kept += 0 if state is None else count
        places = self._grid(lane, step, alive) or self._chunk_rows(lane, step, alive)
        return Slab(first_chunk=chunk, chunks=sum(alive), steps=tuple(steps), places=places)

    def _grid(self, lane: int, step: int, alive: list[int]) -> Grid | None:
        lanes, end = range(lane, lane + alive[0]), (step + len(alive)) * self.chunk
        starts = [self.starts[i] for i in lanes]
        gaps = {b - a for a, b in pairwise(starts)}
        if len(gaps) > 1 or min(gaps, default=0) < 0 or any(self.lengths[i] < end for i in lanes):
            return None
        heads, apart = self.heads, next(iter(gaps), 0)
        return Grid(
            first=(starts[0] + step * self.chunk) * heads,
            shape=(len(alive), len(lanes), heads, self.chunk),
            strides=(self.chunk * heads, apart * heads, 1, heads),
        )

    def _chunk_rows(self, lane: int, step: int, alive: list[int]) -> Rows:
        where = [(lane + i, step + n) for n, count in enumerate(alive) for i in range(count)]
        start = torch.tensor([self.starts[i] + n * self.chunk for i, n in where])
        left = torch.tensor([self.lengths[i] - n * self.chunk for i, n in where])
        position = torch.arange(self.chunk)
        beyond = position >= left[:, None]  # [chunks, C]: only a sequence's last chunk can be shorter
        token = (start[:, None] + position).masked_fill_(beyond, 0)
        rows = token[:, None, :] * self.heads + torch.arange(self.heads)[:, None]  # [chunks, H, C]
        padding = beyond[:, None, :].expand_as(rows)
        return Rows(rows.reshape(-1).to(self.device), padding.reshape(-1).to(self.device))
