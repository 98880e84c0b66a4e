"""A segment of tokens is an affine map of the state: S → M S + N.

    M = Π_t (I − k_t a_tᵀ) Diag(exp g_t)          N = the state the segment reaches from zero

Affine maps compose, so a long sequence need not be computed from one end to the other: find the maps of all segments
in parallel, compose them to get the state that each segment starts from, and run all segments in parallel. Sequences
that are spread over processes are run this way (`layers/context.py`), and in the kernels a few long ones
(`kernels/recurrence/forward.py`).
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
        """Return the map of this segment followed by `later`."""
        return Affine(_product(later.M, self.M), later(self.N))


def segment(k: Tensor, a: Tensor, u: Tensor, g: Tensor | None = None, *, impl: str = "auto") -> Affine:
    """Return the map of a whole segment, M [B, H, K, K] and N [B, H, K, V].

    One pass computes both, with a state that is widened to [M | N]: M starts from the identity and gets no writes, N
    starts from zero.

    Args:
        k, a: keys and erase vectors [B, T, H, K].
        u: write vectors [B, T, H, V].
        g, impl: as in `erase_write`.
    """
    batch, _, heads, width = k.shape
    dtype = torch.promote_types(k.dtype, torch.float32)
    start = torch.eye(width, width + u.shape[-1], dtype=dtype, device=k.device).expand(batch, heads, -1, -1)
    writes = torch.cat([u.new_zeros(*u.shape[:-1], width), u], -1)
    _, end = erase_write(torch.zeros_like(k), k, a, writes, g, initial_state=start, impl=impl)
    return Affine(end[..., :width], end[..., width:])
