"""Loss as a function of where a token stands: does the state go on working past the training length?"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..data.shards import TokenShards
from ..model.cache import QEDCache
from ..model.causal_lm import QEDForCausalLM

PIECE = 2048


@torch.no_grad()
def losses(model: QEDForCausalLM, rows: Tensor) -> Tensor:
    """rows [B, L + 1] → the loss of predicting each of the last L tokens, [B, L] in float32; piece by piece."""
    device, cache, found = model.lm_head.weight.device, QEDCache(), []
    for start in range(0, rows.shape[1] - 1, PIECE):
        end = min(start + PIECE, rows.shape[1] - 1)
        given, wanted = rows[:, start:end].to(device), rows[:, start + 1 : end + 1].to(device)
        logits = model(given, past_key_values=cache, use_cache=True).logits.float()
        found.append(torch.nn.functional.cross_entropy(logits.mT, wanted, reduction="none").cpu())
    return torch.cat(found, 1)


def by_position(
    model: QEDForCausalLM, shards: TokenShards, *, length: int, rows: int, done: Callable[[int], None] = lambda _: None
) -> dict[str, Any]:
    """Mean loss in bins of positions, doubling in width, over rows of a held-out corpus from its beginning."""
    available = (len(shards) - 1) // length
    if available < 1:
        raise ValueError(f"--data: expected more than {length} tokens for one row, got {len(shards)}")
    rows = min(rows, available)
    edges = [0, *(2**i for i in range(6, 40) if 2**i < length), length]
    means = torch.zeros(rows, len(edges) - 1, dtype=torch.float64)
    for row in range(rows):
        tokens = torch.from_numpy(shards.read(row * length, length + 1))[None]
        found = losses(model, tokens)[0].double()
        means[row] = torch.stack([found[a:b].mean() for a, b in pairwise(edges)])
        done(row + 1)
    errors = means.std(0) / rows**0.5 if rows > 1 else torch.full_like(means[0], torch.nan)
    bins = [
        {"from": a, "to": b, "loss": loss, "standard_error": None if error != error else error}
        for (a, b), loss, error in zip(pairwise(edges), means.mean(0).tolist(), errors.tolist(), strict=True)
    ]
    widths = torch.tensor([b - a for a, b in pairwise(edges)], dtype=torch.float64)
    return {"length": length, "rows": rows, "loss": float((means.mean(0) * widths).sum() / length), "bins": bins}
