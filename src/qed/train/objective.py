"""What training minimises: the cross-entropy of the next token, without all logits in memory.

    loss = Σ_t [logsumexp(W h_t) − (W h_t)_{target}]

Tokens are taken in pieces; the gradient of a piece is computed at once and its logits are dropped. Logits are in the
dtype of the hidden states, sums over the vocabulary in at least float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ..data.generated import given_and_wanted
from ..data.recall import IGNORED
from ..model.causal_lm import QEDForCausalLM

PIECE = 8192  # tokens


def _piece(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Map logits [N, V] and targets [N] to the sum of losses and its gradient, which is like logits."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    counts = targets != IGNORED
    picked = targets.clamp(min=0)[:, None]
    normalizer = wide.logsumexp(-1, keepdim=True)
    loss = torch.where(counts, (normalizer - wide.gather(-1, picked))[:, 0], 0).sum()
    hit = torch.arange(logits.shape[-1], device=logits.device) == picked
    d = torch.where(counts[:, None], (wide - normalizer).exp() - hit.to(wide.dtype), 0)
    return loss, d.to(logits.dtype)


@lru_cache
def _piece_on(device: str) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Compile the function on a GPU, where it then takes two passes over the logits instead of ten."""
    return torch.compile(_piece, dynamic=False) if device == "cuda" else _piece


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        wanted = hidden.requires_grad or weight.requires_grad
        low, wide = weight.to(hidden.dtype), torch.promote_types(hidden.dtype, torch.float32)
        d_hidden = torch.empty_like(hidden) if wanted else None
        d_weight = torch.zeros_like(weight, dtype=wide) if wanted else None
        total = torch.zeros((), dtype=wide, device=hidden.device)
        for first in range(0, hidden.shape[0], PIECE):
            rows = slice(first, first + PIECE)
            loss, d = _piece_on(hidden.device.type)(hidden[rows] @ low.T, targets[rows])
            total += loss
            if d_hidden is not None and d_weight is not None:
                torch.mm(d, low, out=d_hidden[rows])
                d_weight += d.T @ hidden[rows]
        if wanted:
            ctx.save_for_backward(d_hidden, d_weight)
        return total

    @staticmethod
    def backward(ctx: Any, d_total: Tensor) -> tuple[Tensor, Tensor, None]:
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * d_total.to(d_hidden.dtype), d_weight * d_total, None


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of the logits W h, summed over tokens.

    Args:
        hidden: [N, D], the last hidden states.
        weight: [V, D], the read-out.
        targets: [N], the next tokens, −100 where no loss is wanted.
    """
    return _LinearCrossEntropy.apply(hidden, weight, targets)


class SummedLoss(nn.Module):
    """A model together with its loss: the module that is called in training, and so the one that processes wrap."""

    def __init__(self, model: QEDForCausalLM):
        super().__init__()
        self.model = model

    def forward(self, rows: Tensor) -> Tensor:
        """Map rows of tokens [B, T + 1] to the sum of the losses of all but the first token of each, and rows with
        targets of their own, [B, T + 1, 2], to the sum of the losses of those that there are."""
        given, wanted = given_and_wanted(rows)
        hidden = self.model.model(given, use_cache=False).last_hidden_state.flatten(0, 1)
        wanted = wanted.flatten()
        if rows.dim() == 3 and not (hidden.is_cuda and torch.cuda.is_current_stream_capturing()):
            there = wanted != IGNORED  # a graph has fixed shapes, and computes the others' logits for nothing
            hidden, wanted = hidden[there], wanted[there]
        with torch.autocast(hidden.device.type, enabled=False):
            return linear_cross_entropy(hidden, self.model.lm_head.weight, wanted)
