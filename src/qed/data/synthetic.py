"""A corpus without a file: short documents that hide facts in talk and ask for them at the end.

Document i of a seed is a function of the two: nothing is stored, and any part can be made again. Words are made of
syllables, so that a tokenizer trained on it has something to learn, and keys never run out.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

ONSETS = ["b", "br", "d", "dr", "f", "g", "gl", "h", "k", "kr", "l", "m", "n", "p", "pl", "r", "s", "st", "t", "v", "z"]
VOWELS = ["a", "e", "i", "o", "u", "ai", "ea", "oo"]
SUBJECTS = ["the baker", "a quiet neighbour", "the old teacher", "her brother", "the gardener", "a traveller"]
VERBS = ["walked past", "looked at", "talked about", "forgot", "painted", "repaired", "described", "waited for"]
OBJECTS = ["the bridge", "a wooden box", "the harbour", "two letters", "the garden wall", "a blue lamp"]
TIMES = ["in the morning", "after the rain", "on a Sunday", "before noon", "late in the year", "that evening"]


def word(draw: random.Random) -> str:
    return "".join(draw.choice(ONSETS) + draw.choice(VOWELS) for _ in range(draw.randint(2, 3)))


def sentence(draw: random.Random) -> str:
    text = f"{draw.choice(SUBJECTS)} {draw.choice(VERBS)} {draw.choice(OBJECTS)} {draw.choice(TIMES)}."
    return text[0].upper() + text[1:]


def document(index: int, seed: int = 0) -> str:
    """One to eight facts among 4 to 40 sentences, then a question for each in another order."""
    draw = random.Random(f"{seed}/{index}")
    lines = [sentence(draw) for _ in range(draw.randint(4, 40))]
    facts = {word(draw): str(draw.randint(1000, 9999)) for _ in range(draw.randint(1, 8))}
    for key, value in facts.items():
        lines.insert(draw.randint(0, len(lines)), f"The number of {key} is {value}.")
    asked = list(facts)
    draw.shuffle(asked)
    questions = [f"What is the number of {key}? It is {facts[key]}." for key in asked]
    return " ".join([*lines, *questions])


def documents(count: int, seed: int = 0) -> Iterator[str]:
    return (document(i, seed) for i in range(count))
