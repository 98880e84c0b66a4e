"""Associative recall under load: rows that tell pairs of a key and a value, and then ask for the values of keys.

    k₁ v₁ k₂ v₂ … kₙ vₙ  then a question at every token, kᵢ → vᵢ, drawn among the pairs again and again

Keys are of the first half of the vocabulary, values of its second, without repetition within a row. This is MQAR
without the random tokens between questions and with as many questions as the row has room for: the same state is asked
for, from a hundred targets in a row instead of a few.
"""

from __future__ import annotations

import numpy as np

IGNORED = -100  # the target of a token after which nothing is asked


def row(random: np.random.Generator, length: int, pairs: int, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and targets [length] of one row; targets are −100 while the pairs are told.

    Args:
        random: what draws the pairs and the questions.
        length: tokens of the row.
        pairs: how many are told, at most a quarter of the tokens.
        vocabulary: words that there are; keys are of its first half, values of its second.
    """
    if 4 * pairs > length:
        raise ValueError(f"pairs: expected at most a quarter of {length} tokens, got {pairs}")
    half = vocabulary // 2
    keys, values = (random.choice(half, pairs, replace=False) for _ in range(2))
    asked = random.integers(pairs, size=length - 2 * pairs)
    told = np.stack([keys, values + half], axis=1).ravel()
    targets = np.concatenate([np.full(2 * pairs, IGNORED), values[asked] + half])
    return np.concatenate([told, keys[asked]]), targets
