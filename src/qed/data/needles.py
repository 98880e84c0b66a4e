"""The words of RULER's needles in a haystack, which its tasks (`eval/tasks/niah.py`) and documents that practise them
(`practice.py`) share."""

from __future__ import annotations

import uuid
from random import Random

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
PROMPT = (
    "A special magic {one} is hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "{one} afterwards.\n{context}\nWhat is the special magic {one} for {key} mentioned in the provided text? "
    "The special magic {one} for {key} mentioned in the provided text is"
)


def value(kind: str, random: Random) -> str:
    """A value to hide: of "numbers" one of seven digits, of "uuids" a random uuid."""
    if kind == "numbers":
        return str(random.randint(1_000_000, 9_999_999))
    return str(uuid.UUID(int=random.getrandbits(128), version=4))
