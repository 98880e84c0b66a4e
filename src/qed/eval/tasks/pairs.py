"""Recall among many pairs, from the built-in corpus: the needle task of models too small for S-NIAH.

A passage tells a fact, a key and its value, for every 32 words, and asks for one of them at its end. Longer passages
have more facts to keep apart, and more talk to ignore.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from ...data.synthetic import question
from ..task import Count, Draws, NeedleTask, Sample

NEW_TOKENS = 4


def generate(length: int, samples: int, count: Count, seed: int = 42) -> Iterator[Sample]:
    """Samples, of which no prompt with its new tokens is longer than `length`.

    Args:
        length: in tokens.
        samples: how many.
        count: how many tokens texts are.
        seed: of everything random.
    """
    draw = Random(seed)
    for _ in range(samples):
        prompt, answer, depth = question(draw, length - NEW_TOKENS)
        (tokens,) = count([prompt])
        if tokens + NEW_TOKENS > length:
            raise ValueError(f"--tokenizer: pairs expects one token a word (words:N), got {tokens} tokens of {length}")
        yield Sample(prompt=prompt, answer=answer, tokens=tokens, depth=depth)


def correct(prediction: str, answer: str) -> bool:
    """Whether the first word, which alone counts, is the answer."""
    return prediction.replace(".", " ").split()[:1] == [answer]


TASKS = (
    NeedleTask(
        name="pairs",
        title="Pairs",
        draws=lambda options: Draws(samples=generate),
        shortest=32,
        new_tokens=NEW_TOKENS,
        correct=correct,
    ),
)
