"""Multi-query associative recall: rows that first tell pairs of a key and a value, and then ask for values.

    k₁ v₁ k₂ v₂ … kₙ vₙ  then queries, each once, among random tokens: … kᵢ → vᵢ …

Keys are of the first half of the vocabulary, values of its second, without repetition. A query's place is an even
offset after the pairs, drawn without replacement with probability ∝ i^(0.01 − 1) for the i-th, as in zoology.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

POWER = 0.01
IGNORED = -100  # the target of a token after which nothing is asked


class Setting(NamedTuple):
    """How long rows are, how many pairs each has, and how many rows there are."""

    length: int
    pairs: int
    examples: int


def examples(setting: Setting, seed: int | np.random.Generator, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets [examples, length]; targets are −100 except at queries.

    Args:
        setting: length, pairs and number of rows.
        seed: of everything random.
        vocabulary: tokens that there are; keys are of its first half, values of its second.
    """
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
    targets = np.full((count, length), IGNORED)
    np.put_along_axis(tokens, places, keys, axis=1)
    np.put_along_axis(targets, places, values, axis=1)
    return torch.from_numpy(tokens), torch.from_numpy(targets)
