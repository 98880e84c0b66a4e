"""Documents that practise the needle tasks, to be mixed into a corpus: models of a few million parameters, trained for
minutes, do not learn to retrieve from plain text alone.

Each document is a short S-NIAH prompt over the corpus's own sentences or over noise, with one to six needles, and ends
with all of them asked for and answered. Keys are pairs of the corpus's words. Evaluation has its own keys, values and
haystacks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from .needles import NEEDLE, NOISE, PROMPT, value

HEAD, QUESTION, ANSWER = (
    PROMPT.partition("{context}")[0],
    PROMPT.partition("{context}")[2].partition("? ")[0] + "? ",
    PROMPT.partition("{context}")[2].partition("? ")[2],
)
NUMBERS = 0.75  # of documents; the others hide uuids, which are longer
NOISY = 0.5  # of haystacks
SHORTEST, LONGEST = 350, 1900  # characters of a document
NEEDLES = 6  # at most


@dataclass(frozen=True, kw_only=True)
class Practice:
    """Mixes practice documents into a corpus, until they are this share of all its characters."""

    share: float

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ValueError(f"--practice: expected a share between 0 and 1, got {self.share}")

    @property
    def about(self) -> dict[str, Any]:
        """What decides the documents, besides the corpus."""
        return {"practice": self.share, "format": 1}

    def __call__(self, texts: Iterator[str]) -> Iterator[str]:
        owed = 0.0
        for index, text in enumerate(texts):
            yield text
            owed += len(text) * self.share / (1 - self.share)
            draw = Random(f"practice/{index}")
            sentences = re.split(r"(?<=[.!?])\s+", text)
            words = re.findall(r"\b[a-z]{3,12}\b", text)
            while owed > 0 and len(words) > 1:
                made = document(draw, sentences, words)
                owed -= len(made)
                yield made


def document(draw: Random, sentences: list[str], words: list[str]) -> str:
    """One document. Lengths are log-uniform: short documents are where retrieval is learned first.

    Args:
        draw: where everything random comes from.
        sentences: of the corpus's document, for a haystack.
        words: of the corpus's document, for keys.
    """
    kind = "numbers" if draw.random() < NUMBERS else "uuids"
    length = math.exp(draw.uniform(math.log(SHORTEST), math.log(LONGEST)))
    one, each = kind[:-1], 170 if kind == "numbers" else 240  # characters that a needle and its answer take
    count = draw.randint(1, max(1, min(NEEDLES, int((length - 300) / each))))
    keys = [f"{draw.choice(words)}-{draw.choice(words)}" for _ in range(count)]
    facts = {key: value(kind, draw) for key in keys}
    room = int(length) - len(HEAD) - len(QUESTION) - each * len(facts)
    parts, gap = _noise(room) if draw.random() < NOISY else _talk(room, sentences, draw)
    for key, fact in facts.items():
        parts.insert(draw.randint(0, len(parts)), NEEDLE.format(kind=kind, key=key, value=fact))
    asked = list(facts)
    draw.shuffle(asked)
    answers = [f"{ANSWER.format(one=one, key=key)} {facts[key]}." for key in asked]
    head, question = HEAD.format(one=one), QUESTION.format(one=one, key=asked[0])
    return head + gap.join(parts) + question + " ".join(answers)


def _noise(room: int) -> tuple[list[str], str]:
    return [NOISE] * max(0, room // len(NOISE)), "\n"


def _talk(room: int, sentences: list[str], draw: Random) -> tuple[list[str], str]:
    """Consecutive sentences from somewhere."""
    parts: list[str] = []
    place = draw.randrange(len(sentences))
    while room > 0 and place < len(sentences):
        parts.append(sentences[place][:room])
        room -= len(sentences[place]) + 1
        place += 1
    return parts, " "
