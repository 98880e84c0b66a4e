"""Cross-entropy of a linear read-out, without all logits in memory.

    loss = Σ_t [logsumexp(W h_t) − (W h_t)_{target}]

Tokens go through in pieces; each piece's gradient is taken at once and its logits are dropped.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

PIECE = 4096  # tokens
IGNORED = -100


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        wanted = hidden.requires_grad or weight.requires_grad
        low = weight.to(hidden.dtype)
        d_hidden = torch.empty_like(hidden) if wanted else None
        d_weight = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32)) if wanted else None
        wide = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        for first in range(0, hidden.shape[0], PIECE):
            rows = slice(first, first + PIECE)
            counts = targets[rows] != IGNORED
            picked = targets[rows].clamp(min=0)[:, None]
            logits = (hidden[rows] @ low.T).to(wide)
            largest = logits.logsumexp(-1, keepdim=True)
            total += ((largest - logits.gather(-1, picked))[:, 0] * counts).sum()
            if d_hidden is not None and d_weight is not None:
                d = logits.sub_(largest).exp_()
                d.scatter_add_(-1, picked, -torch.ones_like(picked, dtype=wide))
                d = (d * counts[:, None]).to(hidden.dtype)
                d_hidden[rows] = d @ low
                d_weight += d.T @ hidden[rows]
        if wanted:
            ctx.save_for_backward(d_hidden, d_weight)
        return total

    @staticmethod
    def backward(ctx: Any, d_total: Tensor) -> tuple[Tensor, Tensor, None]:
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * d_total.to(d_hidden.dtype), d_weight * d_total, None


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The sum over tokens: hidden [N, D], weight [V, D], targets [N], −100 where none is wanted."""
    return _LinearCrossEntropy.apply(hidden, weight, targets)
