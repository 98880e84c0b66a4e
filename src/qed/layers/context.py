"""One sequence over several processes: each has a stretch of its tokens, in the order of their ranks.

A stretch is an affine map of the state (`ops/affine.py`). Every process finds its own map, all maps go round, and each
composes those before its own into the state it starts from; the convolution takes its first inputs from its neighbour.
Gradients go the same way back: what a process gathered, it owes a gradient to whom it came from.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops.affine import Affine


class _Gather(torch.autograd.Function):
    """x of every process, stacked. Backward: the gradients all processes have for mine, added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group, x = group, x.contiguous()
        found = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(found, x, group=group)
        return torch.stack(found)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:
        d = d.contiguous()
        dist.all_reduce(d, group=ctx.group)
        return d[dist.get_rank(ctx.group)], None


class Context:
    def __init__(self, group: Any = None):
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def before(self, x: Tensor) -> Tensor:
        """What the process before me has in the place of x; zeros for the first."""
        gathered: Tensor = _Gather.apply(x, self.group)
        return gathered[self.rank - 1] if self.rank else torch.zeros_like(x) + 0 * gathered[0]

    def start(self, mine: Affine) -> Tensor:
        """The state my stretch starts from, the sequence starting from zero."""
        M, N = _Gather.apply(mine.M, self.group), _Gather.apply(mine.N, self.group)
        state = torch.zeros_like(mine.N) + 0 * (M[0].sum() + N[0].sum())  # all take part in the backward
        for i in range(self.rank):
            state = Affine(M[i], N[i])(state)
        return state
