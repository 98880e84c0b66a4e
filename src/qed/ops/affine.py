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
