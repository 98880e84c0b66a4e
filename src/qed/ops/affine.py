"""A segment of tokens is an affine map of the state: S → M S + N.

    M = Π_t (I − k_t a_tᵀ) Diag(exp g_t)          N = the state the segment reaches from zero

Affine maps compose, so a long sequence need not be walked in one line: find every segment's map at once, compose
them to get the state each one starts from, and run all segments side by side. Long prefill with a small batch,
sequences spread over processes and prefix caching are callers of these few lines.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .api import erase_write
from .precision import without_autocast


@without_autocast
def _product(M: Tensor, x: Tensor) -> Tensor:
    return M @ x


class Affine(NamedTuple):
    """S → M S + N, with M [..., H, K, K] and N [..., H, K, V]."""

    M: Tensor
    N: Tensor

    def __call__(self, state: Tensor) -> Tensor:
        return _product(self.M, state) + self.N

    def then(self, later: Affine) -> Affine:
        """This segment followed by `later`."""
        return Affine(_product(later.M, self.M), later(self.N))


def segment(k: Tensor, a: Tensor, u: Tensor, g: Tensor | None = None, *, impl: str = "auto") -> Affine:
    """The map of a whole segment: k, a [B, T, H, K], u [B, T, H, V], g as in `erase_write` → M, N of [B, H, ·, ·].

    One pass over a state widened to [M | N]: M starts at the identity and is written nothing, N starts at zero.
    """
    batch, _, heads, width = k.shape
    dtype = torch.promote_types(k.dtype, torch.float32)
    start = torch.eye(width, width + u.shape[-1], dtype=dtype, device=k.device).expand(batch, heads, -1, -1)
    writes = torch.cat([u.new_zeros(*u.shape[:-1], width), u], -1)
    _, end = erase_write(torch.zeros_like(k), k, a, writes, g, initial_state=start, impl=impl)
    return Affine(end[..., :width], end[..., width:])


def segmented_erase_write(
    q: Tensor,
    k: Tensor,
    a: Tensor,
    u: Tensor,
    g: Tensor | None = None,
    *,
    segments: int,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """`erase_write` with T cut into `segments` that run side by side: the serial pass's result, T / segments long.

    It costs about three times the arithmetic, and pays when batch × heads alone cannot fill the machine.
    """
    batch, tokens = q.shape[:2]
    if not 1 <= segments <= max(1, tokens):
        raise ValueError(f"segments: expected 1 to T = {tokens}, got {segments}")
    length = -(-tokens // segments)

    def cut(x: Tensor) -> Tensor:
        """[B, T, ...] → [B × segments, length, ...]. Zeros fill up the end: they neither decay, erase nor write."""
        padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, segments * length - tokens))
        return padded.unflatten(1, (segments, length)).flatten(0, 1)

    q, k, a, u = (cut(x) for x in (q, k, a, u))
    g = None if g is None else cut(g)
    maps = segment(k, a, u, g, impl=impl)
    by_segment = Affine(*(x.unflatten(0, (batch, segments)) for x in maps))
    state = torch.zeros_like(by_segment.N[:, 0]) if initial_state is None else initial_state
    starts = []
    for i in range(segments):
        starts.append(state)
        state = Affine(by_segment.M[:, i], by_segment.N[:, i])(state)
    o, _ = erase_write(q, k, a, u, g, scale=scale, initial_state=torch.stack(starts, 1).flatten(0, 1), impl=impl)
    return o.unflatten(0, (batch, segments)).flatten(1, 2)[:, :tokens], state
