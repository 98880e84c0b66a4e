"""Which tokens form a chunk, and which chunks can run side by side.

A batch [B, T, ...] and a packed batch [1, total, ...] with `cu_seqlens` are the same thing here: flat tokens
plus sequence offsets. Every sequence is cut into chunks of C tokens; *step* n holds chunk n of every sequence
long enough to have one. Sequences are ordered longest first, so the lanes that are still alive at step n are a
prefix of that order, and one buffer of states serves them all.

`Packing` is the other direction: a padded batch with a mask becomes a packed one, and back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

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


@dataclass(frozen=True, kw_only=True)
class Slab:
    """Consecutive steps that are worked on together.

    `lanes[i]` is the number of sequences alive at the i-th step; chunks are numbered step by step, lane by lane,
    and `first_chunk` is the number of this slab's first one.
    """

    first_chunk: int
    lanes: tuple[int, ...]
    chunk: int
    rows: Tensor  # [chunks * H * C] row of each token and head in a tensor viewed as [tokens * H, ...]
    padding: Tensor | None  # [chunks * H * C] bool, True where a chunk reaches past its sequence; None if nowhere

    @property
    def chunks(self) -> int:
        return sum(self.lanes)

    def steps(self, heads: int) -> list[slice]:
        """Every step's range in chunks × heads; its length is also what is alive of the state buffer."""
        ends = list(accumulate(alive * heads for alive in self.lanes))
        return [slice(start, end) for start, end in pairwise([0, *ends])]

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
        """The inverse of `gather`: write [chunks, H, C, D]-ordered rows into the contiguous [B, T, H, D] `out`."""
        values, rows = chunked.reshape(self.rows.shape[0], -1), self.rows
        if self.padding is not None:
            values, rows = values[~self.padding], rows[~self.padding]
        out.view(-1, out.shape[-1]).index_copy_(0, rows, values.to(out.dtype))


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """All chunks of a batch, step by step. `order[lane]` is the sequence that lane carries."""

    order: Tensor  # [N]
    starts: Tensor  # [N] first token of each lane's sequence
    lengths: Tensor  # [N]
    lanes: tuple[int, ...]  # sequences alive at each step
    chunk: int
    heads: int

    @staticmethod
    def of(q: Tensor, cu_seqlens: Tensor | None, chunk: int) -> Schedule:
        batch, tokens, heads = q.shape[:3]
        if cu_seqlens is None:
            offsets = torch.arange(batch + 1, device=q.device) * tokens
        else:
            offsets = cu_seqlens.to(q.device, torch.int64)
        lengths = offsets.diff()
        order = lengths.argsort(descending=True, stable=True)
        lengths = lengths[order]
        counts = ((lengths + chunk - 1) // chunk).tolist()  # the one host read; shapes alone if not packed
        lanes = tuple(sum(c > step for c in counts) for step in range(max(counts, default=0)))
        return Schedule(order=order, starts=offsets[order], lengths=lengths, lanes=lanes, chunk=chunk, heads=heads)

    def slabs(self, token_heads: int) -> Iterator[Slab]:
        """Cut the steps into slabs of about `token_heads` tokens times heads (at least one step each)."""
        first_step, first_chunk = 0, 0
        while first_step < len(self.lanes):
            lanes = [self.lanes[first_step]]
            for alive in self.lanes[first_step + 1 :]:
                if (sum(lanes) + alive) * self.heads * self.chunk > token_heads:
                    break
                lanes.append(alive)
            yield self._slab(first_step, first_chunk, tuple(lanes))
            first_step += len(lanes)
            first_chunk += sum(lanes)

    def _slab(self, first_step: int, first_chunk: int, lanes: tuple[int, ...]) -> Slab:
        device = self.starts.device
        lane = torch.cat([torch.arange(alive, device=device) for alive in lanes])
        step = torch.cat([torch.full((alive,), first_step + i, device=device) for i, alive in enumerate(lanes)])
        position = step[:, None] * self.chunk + torch.arange(self.chunk, device=device)  # [chunks, C] in its sequence
        beyond = position >= self.lengths[lane, None]
        token = (self.starts[lane, None] + position).masked_fill(beyond, 0)
        rows = token[:, None, :] * self.heads + torch.arange(self.heads, device=device)[:, None]  # [chunks, H, C]
        # Only a sequence's last chunk can be ragged, so most slabs need no mask; this reads a device value.
        ragged = bool(beyond.any())
        padding = beyond[:, None, :].expand_as(rows).reshape(-1) if ragged else None
        return Slab(first_chunk=first_chunk, lanes=lanes, chunk=self.chunk, rows=rows.reshape(-1), padding=padding)


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
