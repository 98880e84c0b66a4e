"""A corpus without a file: talk, facts to remember, and questions that recall them.

    The baker forgot a blue lamp. Remember kinu kuhi. Her brother painted the harbour. Recall kinu kuhi.

Document i of a seed is a function of the two: nothing is stored, and any part can be made again. Its words are few, so
that one token a word (`--tokenizer words:512`) is enough, and a tiny model can learn to recall within minutes: most of
a document are questions, anywhere after their facts. `question` is the test: one at the end of a passage of any length,
which holds a fact for every 32 words.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

ONSETS = ["b", "br", "d", "dr", "f", "g", "gl", "h", "k", "kr", "l", "m", "n", "p", "pl", "r", "s", "st", "t", "v", "z"]
VOWELS = ["a", "e", "i", "o", "u", "ai", "ea", "oo"]
SUBJECTS = ["the baker", "a neighbour", "the teacher", "her brother", "the gardener", "a traveller"]
VERBS = ["passed", "saw", "described", "forgot", "painted", "repaired", "sold", "found"]
OBJECTS = ["the bridge", "a box", "the harbour", "two letters", "the wall", "a lamp"]
SHORTEST, LONGEST = 12, 120  # words of a document, full stops among them
SPACING = 32  # words for each fact
QUESTIONS = 4  # for each fact of a document


def _words(count: int) -> list[str]:
    draw, unique = random.Random(0), dict[str, None]()
    while len(unique) < count:
        unique["".join(draw.choice(ONSETS) + draw.choice(VOWELS) for _ in range(2))] = None
    return list(unique)


KEYS, VALUES = _words(192)[:128], _words(192)[128:]


def talk(draw: random.Random) -> str:
    """A sentence without a fact."""
    text = f"{draw.choice(SUBJECTS)} {draw.choice(VERBS)} {draw.choice(OBJECTS)}."
    return text[0].upper() + text[1:]


def size(sentences: list[str]) -> int:
    """How many words sentences have, full stops among them."""
    return sum(sentence.count(" ") + 2 for sentence in sentences)


def passage(draw: random.Random, words: int, taken: int = 0) -> tuple[list[str], dict[str, str]]:
    """Sentences, and the facts that are told among them, each once.

    Args:
        draw: where everything random comes from.
        words: of the passage, which decide how many facts it has.
        taken: words that are left free for questions.
    """
    facts = {key: draw.choice(VALUES) for key in draw.sample(KEYS, min(len(KEYS), 1 + words // SPACING))}
    told = [f"Remember {key} {value}." for key, value in facts.items()]
    room, sentences = words - taken - size(told), []
    while room > 0:
        sentences.append(talk(draw))
        room -= size(sentences[-1:])
    for sentence in told:
        sentences.insert(draw.randint(0, len(sentences)), sentence)
    return sentences, facts


def document(index: int, seed: int = 0) -> str:
    """The document of a number and a seed."""
    draw = random.Random(f"{seed}/{index}")
    words = round(math.exp(draw.uniform(math.log(SHORTEST), math.log(LONGEST))))
    questions = QUESTIONS * (1 + words // SPACING)
    sentences, facts = passage(draw, words, taken=4 * questions)
    for _ in range(questions):
        key, value = draw.choice(list(facts.items()))
        told = sentences.index(f"Remember {key} {value}.")
        sentences.insert(draw.randint(told + 1, len(sentences)), f"Recall {key} {value}.")
    return " ".join(sentences)


def documents(count: int, seed: int = 0) -> Iterator[str]:
    """The first documents of a seed."""
    return (document(i, seed) for i in range(count))


def question(draw: random.Random, words: int) -> tuple[str, str, float]:
    """A prompt of at most so many words, its answer, and the fact's depth in per cent."""
    sentences, facts = passage(draw, words, taken=2)
    while size(sentences) + 2 > words:
        sentences.pop(next(i for i in reversed(range(len(sentences))) if not sentences[i].startswith("Remember")))
    key, value = draw.choice(list(facts.items()))
    depth = 100 * sentences.index(f"Remember {key} {value}.") / len(sentences)
    return " ".join([*sentences, f"Recall {key}"]), value, depth
