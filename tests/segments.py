"""Sequences cut into segments that run side by side, composed by their affine maps; and padded batches packed and back.
The theorems of segments and packing are stated with these."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qed.ops import erase_write
from qed.ops.affine import Affine, segment


def segmented_erase_write(
    *, segments: int, scale: float = 1.0, initial_state: Tensor | None = None, impl: str = "auto", **inputs: Any
) -> tuple[Tensor, Tensor]:
    """`erase_write` with T cut into `segments`: the serial pass's result, T / segments long."""
    batch, tokens = inputs["q"].shape[:2]
    length = -(-tokens // segments)

    def cut(x: Tensor) -> Tensor:
        """[B, T, ...] → [B × segments, length, ...]. Zeros fill up the end: they neither decay, erase nor write."""
        padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, segments * length - tokens))
        return padded.unflatten(1, (segments, length)).flatten(0, 1)

    parts = {name: None if x is None else cut(x) for name, x in inputs.items()}
    maps = segment(*(parts[name] for name in ("k", "a", "u", "g")), impl=impl)
    by_segment = Affine(*(x.unflatten(0, (batch, segments)) for x in maps))
    state = torch.zeros_like(by_segment.N[:, 0]) if initial_state is None else initial_state
    starts = []
    for i in range(segments):
        starts.append(state)
        state = Affine(by_segment.M[:, i], by_segment.N[:, i])(state)
    o, _ = erase_write(**parts, scale=scale, initial_state=torch.stack(starts, 1).flatten(0, 1), impl=impl)
    return o.unflatten(0, (batch, segments)).flatten(1, 2)[:, :tokens], state


class Packing(NamedTuple):
    """A padded batch's real tokens, by flat position; a mask's row is one sequence."""

    tokens: Tensor
    cu_seqlens: Tensor
    shape: tuple[int, int]

    @staticmethod
    def from_mask(mask: Tensor) -> Packing:
        cu_seqlens = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0))
        return Packing(mask.reshape(-1).nonzero().squeeze(1), cu_seqlens, (mask.shape[0], mask.shape[1]))

    def pack(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1).index_select(0, self.tokens).unsqueeze(0)

    def unpack(self, x: Tensor) -> Tensor:
        batch, tokens = self.shape
        flat = x.new_zeros(batch * tokens, *x.shape[2:]).index_copy(0, self.tokens, x.squeeze(0))
        return flat.unflatten(0, self.shape)
