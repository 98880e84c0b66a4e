"""One sequence spread over several processes: each has a stretch of its tokens, in the order of their ranks.

A stretch is an affine map of the state (`ops/affine.py`). Every process computes the map of its own stretch, all maps
are gathered, and each process composes those before its own into the state that its stretch starts from. The
convolution gets its first inputs from the process before. Gradients go the same way back: each process sends the
gradient of what it gathered to the process it came from.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops.affine import Affine


class _Gather(torch.autograd.Function):
    """x of every process, stacked. The backward adds up the gradients that all processes have for this one's x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group, x = group, x.contiguous()
        gathered = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, x, group=group)
        return torch.stack(gathered)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:
        d = d.contiguous()
        dist.all_reduce(d, group=ctx.group)
        return d[dist.get_rank(ctx.group)], None


class Context:
    """The processes that share a sequence, as one of them sees it; `group` is torch's process group, None for all."""

    def __init__(self, group: Any = None):
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def before(self, x: Tensor) -> Tensor:
        """Return x of the process before this one; zeros for the first process."""
        gathered: Tensor = _Gather.apply(x, self.group)
        return gathered[self.rank - 1] if self.rank else torch.zeros_like(x) + 0 * gathered[0]

    def start(self, mine: Affine) -> Tensor:
        """Return the state that this process's stretch starts from, where the sequence starts from zero and `mine` is
        the map of the stretch."""
        M, N = _Gather.apply(mine.M, self.group), _Gather.apply(mine.N, self.group)
        state = torch.zeros_like(mine.N) + 0 * (M[0].sum() + N[0].sum())  # so that all take part in the backward
        for i in range(self.rank):
            state = Affine(M[i], N[i])(state)
        return state
