"""Associative recall under a growing load: a row tells pairs one by one, and asks for the values of those told so far.

    k₁ v₁ kₐ k_b  k₂ v₂ k_c k_d  …  kₙ vₙ k_y k_z        the target of a question kᵢ is vᵢ

After each pair there are two questions, drawn among all pairs told so far, so that one row asks at every load from one
pair to a quarter of its tokens. Keys are of the first half of the vocabulary, values of its second, without repetition
within a row. This is multi-query associative recall (MQAR) at all loads at once: what a state learns to hold first is
at the beginning of every row.
"""

from __future__ import annotations

import numpy as np

IGNORED = -100  # the target of a token after which nothing is asked
SLOT = 4  # tokens for each pair: its key, its value and two questions


def row(random: np.random.Generator, length: int, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and targets [length] of one row; targets are −100 where a pair is told.

    Args:
        random: what draws the pairs and the questions.
        length: tokens of the row, a multiple of four.
        vocabulary: words that there are; keys are of its first half, values of its second.
    """
    pairs, half = length // SLOT, vocabulary // 2
    if length % SLOT or not 1 <= pairs <= half:
        raise ValueError(f"sequence: expected a multiple of {SLOT} tokens, at most {SLOT * half}, got {length}")
    keys, values = (random.choice(half, pairs, replace=False) for _ in range(2))
    asked = (random.random((pairs, 2)) * np.arange(1, pairs + 1)[:, None]).astype(np.int64)
    tokens = np.stack([keys, values + half, keys[asked[:, 0]], keys[asked[:, 1]]], axis=1)
    targets = np.full((pairs, SLOT), IGNORED)
    targets[:, 2:] = values[asked] + half
    return tokens.ravel(), targets.ravel()
