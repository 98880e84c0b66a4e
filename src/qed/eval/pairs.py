"""Recall among many pairs, from the built-in corpus: the needle task of models too small for S-NIAH.

A passage tells a fact, a key and its value, for every 32 words, and asks for one of them at its end. Longer passages
have more facts to keep apart, and more talk to ignore.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

from ..data.synthetic import question
from .niah import Sample

TASK = "pairs"
NEW_TOKENS = 4
SHORTEST = 32


def generate(length: int, *, samples: int, count: Callable[[list[str]], list[int]], seed: int = 42) -> Iterator[Sample]:
    """`count` says how many tokens texts are. No prompt with its new tokens is longer than `length`."""
    draw = Random(seed)
    for _ in range(samples):
        prompt, answer, depth = question(draw, length - NEW_TOKENS)
        (tokens,) = count([prompt])
        if tokens + NEW_TOKENS > length:
            raise ValueError(f"--tokenizer: {TASK} expects one token a word (words:N), got {tokens} tokens of {length}")
        yield Sample(prompt=prompt, answer=answer, tokens=tokens, depth=depth)


def correct(prediction: str, answer: str) -> bool:
    """The first word, and nothing else, counts."""
    return prediction.replace(".", " ").split()[:1] == [answer]
