"""How sequences are cut for the kernels, and the memory in which kernels leave results for each other.

An allocation takes several microseconds on the host, as long as a launch. So what is needed equally long is allocated
together, as one tensor for each precision, and the kernels get parts of it. The parts depend on shapes alone. They lie
in an order in which all begin at multiples of 16 bytes, if K is a multiple of 4, and nothing is between them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...ops.packing import chunk_bound, sequence_count
from .settings import CHUNK, multiprocessors

SHORTEST_SEGMENT = 8  # in chunks


def chunk_count(q: Tensor, cu_seqlens: Tensor | None) -> int:
    """Return for how many chunks memory is allocated: for all there are, or, if sequences are packed, for as many as
    there can be."""
    batch, tokens = q.shape[:2]
    return chunk_bound(batch, tokens, sequence_count(q, cu_seqlens), CHUNK, cu_seqlens is not None)


class Segments(NamedTuple):
    """Into how many segments of how many chunks every sequence is cut. This depends on shapes and on the GPU alone."""

    each: int
    chunks: int
    lanes: int  # sequences × segments × heads

    @staticmethod
    def of(q: Tensor, cu_seqlens: Tensor | None) -> Segments:
        """Return one segment for each sequence, or more where sequences are few and long."""
        (_, tokens, heads, K), each = q.shape, 1
        chunks, lanes, slots = -(-tokens // CHUNK), sequence_count(q, cu_seqlens) * heads, multiprocessors(q.device)
        if cu_seqlens is None and K <= 128 and 0 < lanes * 4 <= slots:
            each = max(1, min(slots // lanes, chunks // SHORTEST_SEGMENT))
        length = max(1, -(-chunks // each))
        each = max(1, -(-chunks // length))  # so that no segment is empty
        return Segments(each, length, lanes * each)


class Parts(NamedTuple):
    """What the kernels of the forward leave for each other and for the backward, each as a vector of numbers."""

    a_tilde: Tensor  # [chunks, H, C, K], as the next two
    q_tilde: Tensor
    k_bar: Tensor
    P: Tensor  # [chunks, H, C, C], as T
    T: Tensor
    gamma: Tensor  # [chunks, H, K], in float32 as the next one
    lowest: Tensor  # [chunks, H]: the most that a channel of a chunk decays, which decides how the chunk is cut
    starts: Tensor | None  # for the backward: S₀ᵀ of every chunk, [chunks, H, V, K]
    R: Tensor | None  # for the backward: Rᵀ of every chunk, [chunks, H, V, C]
    maps: Tensor | None  # where sequences are cut: M and Mᵀ of every segment, [segments, H, 2, K, K], in float32

    @property
    def terms(self) -> tuple[Tensor, ...]:
        """What `chunk_terms` writes and the states are computed from, in the order in which kernels take it."""
        return self.a_tilde, self.q_tilde, self.k_bar, self.gamma, self.P, self.T


class Layout(NamedTuple):
    """The sizes of the parts, in the inputs' precision and in float32."""

    low: list[int]
    wide: list[int]
    save: bool

    @staticmethod
    def of(q: Tensor, u: Tensor, chunks: int, segments: Segments, save: bool) -> Layout:
        """Return the sizes of the parts for a call.

        Args:
            q: queries [B, T, H, K].
            u: write vectors [B, T, H, V].
            chunks: how many chunks there are.
            segments: how sequences are cut.
            save: whether there are parts for the backward.
        """
        (H, K), V = q.shape[2:], u.shape[3]
        each = chunks * H
        low = [each * CHUNK * K] * 3 + [each * CHUNK * CHUNK] * 2 + [each * V * CHUNK, each * V * K] * save
        wide = [2 * segments.lanes * K * K] * (segments.each > 1) + [each * K, each]
        return Layout(low, wide, save)

    def empty(self, q: Tensor) -> list[Tensor]:
        """Return uninitialised memory for all parts."""
        return [q.new_empty(sum(self.low)), q.new_empty(sum(self.wide), dtype=torch.float32)]

    def parts(self, low: Tensor, wide: Tensor) -> Parts:
        """Return the parts of the memory that `empty` returned."""
        a_tilde, q_tilde, k_bar, P, T, *kept = low.split_with_sizes(self.low)
        *maps, gamma, lowest = wide.split_with_sizes(self.wide)
        R, starts = kept if self.save else (None, None)
        return Parts(a_tilde, q_tilde, k_bar, P, T, gamma, lowest, starts, R, maps[0] if maps else None)


def saved_like(q: Tensor, u: Tensor, cu_seqlens: Tensor | None) -> list[Tensor]:
    """Return uninitialised memory for what the backward starts from.

    Args:
        q, u, cu_seqlens: as in `chunkwise.saved_like`.
    """
    return Layout.of(q, u, chunk_count(q, cu_seqlens), Segments.of(q, cu_seqlens), save=True).empty(q)


def scratch_like(parts: Parts) -> tuple[Tensor, ...]:
    """Return uninitialised memory for what the kernels of the backward leave for each other: dP and dA [chunks, H, C,
    C], and the gradient of every chunk's final state, dSᵀ [chunks, H, V, K]."""
    assert parts.starts is not None
    sizes = [parts.P.numel(), parts.P.numel(), parts.starts.numel()]
    return parts.P.new_empty(sum(sizes)).split_with_sizes(sizes)


def states_like(q: Tensor, u: Tensor, segments: Segments) -> Tensor:
    """Return uninitialised memory for a state of every segment.

    Args:
        q: queries [B, T, H, K].
        u: write vectors [B, T, H, V].
        segments: how sequences are cut.
    """
    H, V = u.shape[2:]
    return q.new_empty(segments.lanes // H, H, q.shape[-1], V, dtype=torch.float32)


def decay_gradient_like(q: Tensor, g: Tensor | None, tiles: int) -> Tensor:
    """Return uninitialised memory for the gradient of g: one sum for every tile of K if g has one number for a head.

    Args:
        q: queries [B, T, H, K].
        g: log-decays, or None, for which nothing is allocated.
        tiles: how many programs share the channels of a head.
    """
    if g is None:
        return q.new_empty(0)
    if g.shape[-1] == q.shape[-1]:
        return torch.empty_like(g)
    return q.new_empty(tiles, *q.shape[:3], dtype=torch.float32)
