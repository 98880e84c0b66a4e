"""MQAR: multi-query associative recall, at zoology's settings.

    k₁ v₁ k₂ v₂ … kₙ vₙ  then queries, each once, among random tokens: … kᵢ → vᵢ …

Keys are tokens 1 … 4095 and values 4096 … 8191, without repetition. A query's place is an even offset after the pairs,
drawn without replacement with probability ∝ i^(0.01 − 1) for the i-th. Settings are zoology's; the random stream is our
own, so examples are other draws of the same distribution.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..model.causal_lm import QEDForCausalLM

VOCABULARY, POWER = 8192, 0.01


class Setting(NamedTuple):
    length: int
    pairs: int
    examples: int


TRAIN = (
    *(Setting(64, 4, 100_000), Setting(128, 8, 20_000), Setting(256, 16, 20_000)),
    *(Setting(256, 32, 20_000), Setting(256, 64, 20_000)),
)
TEST = (
    *(Setting(64, 4, 1000), Setting(64, 8, 1000), Setting(64, 16, 1000), Setting(128, 32, 1000)),
    *(Setting(256, 64, 1000), Setting(512, 128, 1000), Setting(1024, 256, 1000)),
)


def examples(setting: Setting, seed: int, vocabulary: int = VOCABULARY) -> tuple[Tensor, Tensor]:
    """Tokens and targets [examples, length]; targets are −100 except at queries."""
    length, pairs, count = setting
    room = (length - 2 * pairs) // 2
    if pairs > room:
        raise ValueError(f"pairs: expected at most a quarter of {length} tokens, got {pairs}")
    random, half = np.random.default_rng(seed), vocabulary // 2
    keys = np.stack([random.choice(half - 1, pairs, replace=False) + 1 for _ in range(count)])
    values = np.stack([random.choice(half, pairs, replace=False) + half for _ in range(count)])
    tokens = random.integers(vocabulary, size=(count, length))
    tokens[:, 0 : 2 * pairs : 2], tokens[:, 1 : 2 * pairs : 2] = keys, values
    # The largest of log p plus Gumbel noise, in order, are draws without replacement.
    weight = (POWER - 1) * np.log(np.arange(1, room + 1))
    gaps = np.argsort(-(weight + random.gumbel(size=(count, room))), axis=1)[:, :pairs]
    places = 2 * pairs + 2 * gaps
    targets = np.full((count, length), -100)
    np.put_along_axis(tokens, places, keys, axis=1)
    np.put_along_axis(targets, places, values, axis=1)
    return torch.from_numpy(tokens), torch.from_numpy(targets)


@torch.no_grad()
def accuracy(model: QEDForCausalLM, tokens: Tensor, targets: Tensor, batch: int = 32) -> float:
    """Of all queries."""
    if model.config.vocab_size < int(tokens.max()) + 1:
        raise ValueError(f"mqar: expected a model of {VOCABULARY} tokens, got {model.config.vocab_size}")
    device, right, asked = model.lm_head.weight.device, 0, 0
    for rows, wanted in zip(tokens.split(batch), targets.split(batch), strict=True):
        found = model(rows.to(device), use_cache=False).logits.argmax(-1).cpu()
        there = wanted != -100
        right, asked = right + int((found == wanted)[there].sum()), asked + int(there.sum())
    return right / asked
