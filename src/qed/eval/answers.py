"""What a model says after a prompt: greedy, many prompts at a time, any length in bounded memory.

Prompts of a batch are padded on the left, which changes nothing (`Sequences`), and read piece by piece: a recurrent
state has the same size after 32 or 32,768 tokens. Then all are continued token by token on the fast path.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from ..model.cache import QEDCache
from ..model.causal_lm import QEDForCausalLM
from ..model.decoding import continued
from ..model.sampling import Sampling

_log = logging.getLogger("qed")
PIECE_TOKENS = 65_536  # tokens of all prompts together that the model reads at once


class Answer(NamedTuple):
    """The new tokens after a prompt, and whether the model's numbers were finite after the last of them. If they were
    not, its logits say nothing: the likeliest token is then the first of the vocabulary."""

    tokens: list[int]
    finite: bool = True


@torch.no_grad()
def read(model: QEDForCausalLM, prompts: list[list[int]]) -> tuple[torch.Tensor, QEDCache]:
    """The last logits [B, vocabulary] after each prompt, and the cache from which to continue."""
    if not all(prompts):
        raise ValueError("a prompt: expected at least one token, got none")
    device = model.device
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    there = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, tokens in enumerate(prompts):
        ids[row, width - len(tokens) :] = torch.tensor(tokens)
        there[row, width - len(tokens) :] = 1
    piece = max(64, PIECE_TOKENS // len(prompts))
    cache = QEDCache()
    for start in range(0, width, piece):
        part, mask = (x[:, start : start + piece] for x in (ids, there))
        logits = model(
            part.to(device),
            attention_mask=None if bool(mask.all()) else mask.to(device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
    return logits[:, -1], cache


@torch.no_grad()
def answers(
    model: QEDForCausalLM,
    prompts: list[list[int]],
    *,
    new_tokens: int,
    ends: set[int],
    batch: int,
    finished: Callable[[list[int]], bool] | None = None,
) -> list[Answer]:
    """The new tokens after every prompt, up to the first end.

    Args:
        model: which generates.
        prompts: tokens of each; all are one batch.
        new_tokens: how many at most are generated after each.
        ends: tokens that end an answer, and do not belong to it.
        batch: to how many rows the batch is filled up on a GPU, where decoding is captured for a number of rows.
        finished: whether an answer so far has all that is asked for; where all have, no more tokens are generated.
    """
    count = len(prompts)
    if model.device.type == "cuda":
        prompts = prompts + [prompts[-1]] * (batch - count)
    logits, cache = read(model, prompts)
    parts, ended = [], torch.zeros(count, dtype=torch.bool)
    for part in continued(model, logits, cache, max_new_tokens=new_tokens, sampling=Sampling()):
        parts.append(part[:count].cpu())
        ended |= torch.isin(parts[-1], torch.tensor(sorted(ends))).any(1)
        if finished is not None:
            ended |= torch.tensor([finished(row) for row in torch.cat(parts, 1).tolist()])
        if bool(ended.all()):
            break
    rows = torch.cat(parts, 1).tolist()
    said = [row[: next((i for i, token in enumerate(row) if token in ends), len(row))] for row in rows]
    finite = _finite(logits, cache)[:count].tolist()
    if not all(finite):
        _log.warning(
            "the model's numbers are not finite in %d of %d answers, which say nothing", finite.count(False), count
        )
    return [Answer(*x) for x in zip(said, finite, strict=True)]


def _finite(logits: torch.Tensor, cache: QEDCache) -> torch.Tensor:
    """Whether all numbers are finite, for every row of a batch: those of the first logits, and of the states at the
    end, which what is not finite never leaves."""
    numbers = [logits, *(x for x in tree_leaves(list(cache.states.values())) if torch.is_tensor(x))]
    each = [x.isfinite().flatten(1).all(1) for x in numbers if x.is_floating_point() and x.numel()]
    return torch.stack(each).all(0)
