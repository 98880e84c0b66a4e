"""S-NIAH: a needle in a haystack (RULER), drawn in RULER's order from Python's `random`, before any model reads it.

| task | haystack | value | keys |
|---|---|---|---|
| niah_single_1 | one line of noise, again and again | number | 1 |
| niah_single_2 | essays | number | 1 |
| niah_single_3 | essays | uuid | 1 |
| niah_multikey_1 | essays | number | 4, one asked for |

A length is nominal: 128 tokens of it are for the answer, and the haystack grows in steps, so prompts are shorter, and a
prompt's own length is kept with it. "linear" sizing is RULER's until June 2025 (and lm-eval's), "binary" its later one.
"""

from __future__ import annotations

import json
import lzma
import re
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import TypeAlias

from .keys import Keys

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
PROMPT = (
    "A special magic {one} is hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "{one} afterwards.\n{context}\nWhat is the special magic {one} for {key} mentioned in the provided text? "
    "The special magic {one} for {key} mentioned in the provided text is"
)
DEPTHS = [round(100 * i / 39) for i in range(40)]  # per cent of the sentences
NEW_TOKENS = 128
SHORTEST = 256
SIZINGS = ("linear", "binary")
TOGETHER = 32  # samples counted at once
Draw: TypeAlias = Callable[[int], tuple[str, str, float]]  # of a size: prompt, answer, depth


@dataclass(frozen=True, kw_only=True)
class Task:
    haystack: str  # "noise" or "essay"
    kind: str  # "numbers" or "uuids"
    keys: int = 1


TASKS = {
    "niah_single_1": Task(haystack="noise", kind="numbers"),
    "niah_single_2": Task(haystack="essay", kind="numbers"),
    "niah_single_3": Task(haystack="essay", kind="uuids"),
    "niah_multikey_1": Task(haystack="essay", kind="numbers", keys=4),
}


@dataclass(frozen=True, kw_only=True)
class Sample:
    prompt: str
    answer: str
    tokens: int  # of the prompt, without any that the tokenizer would add
    depth: float  # of the needle asked for, per cent of the haystack


@dataclass(kw_only=True)
class Haystack:
    """Words of essays, or nothing for noise; and how text is parted into sentences."""

    text: str = ""
    split: Callable[[str], list[str]] = field(default=lambda text: re.split(r"(?<=[.!?])\s+", text))

    def __post_init__(self) -> None:
        self.words = self.text.split()
        self.sentences = lru_cache(maxsize=8)(self._sentences)

    def _sentences(self, count: int) -> list[str]:
        """Of the first `count` words, over again where there are fewer."""
        if not self.words:
            raise ValueError("--essays: expected text for a haystack, got none")
        repeats = -(-count // len(self.words))
        text = " ".join((self.words * max(1, repeats))[:count]).strip()
        return self.split(text) if text else []


def punkt(text: str) -> list[str]:
    """RULER's own way; needs nltk and its data."""
    from nltk.tokenize import sent_tokenize

    return list(sent_tokenize(text))


def essays(path: Path | None) -> str:
    """A .json (or .json.xz) with a "text", or a .txt (or .txt.xz)."""
    if path is None:
        raise ValueError("--essays: expected a file of essays for this task's haystack, got none")
    if not path.is_file():
        raise ValueError(f"--essays: expected a file, got {path}")
    try:
        raw = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
        text = raw.decode("utf-8")
        if ".json" in path.suffixes:
            text = json.loads(text)["text"]
    except (lzma.LZMAError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f'--essays: expected text, or JSON with a "text", got {path}: {_short(error)}') from error
    if not isinstance(text, str):
        raise ValueError(f'--essays: expected JSON with a "text", got {path}, whose "text" is none')
    if not text.split():
        raise ValueError(f"--essays: expected text for a haystack, got {path}, which has none")
    return text


def _short(error: Exception) -> str:
    """What is wrong, without the file's content."""
    return f"no {error}" if isinstance(error, KeyError) else str(error)


def splitter() -> tuple[Callable[[str], list[str]] | None, str]:
    """RULER's sentences (nltk's punkt) where they are installed; otherwise by punctuation. Results name which."""
    try:
        punkt("One. Two.")
    except (ImportError, LookupError):
        return None, "punctuation"
    return punkt, "punkt"


def draw(task: Task, size: int, keys: Keys, haystack: Haystack, random: Random) -> tuple[str, str, float]:
    """Prompt, answer and depth, with `size` words or lines of haystack."""
    names, values, needles = [], [], []
    for _ in range(task.keys):
        names.append(random.choice(keys))
        values.append(value(task.kind, random))
        needles.append(NEEDLE.format(kind=task.kind, key=names[-1], value=values[-1]))
    order = list(range(task.keys))
    Random(42).shuffle(order)
    if task.haystack == "noise":
        lines, count = [NOISE] * size, max(size, 1)
        places = sorted(random.sample(range(count), task.keys), reverse=True)
        depths = [100 * place / count for place in places]
        for place, which in zip(places, order, strict=True):
            lines.insert(place, needles[which])
        context = "\n".join(lines)
    else:
        sentences = haystack.sentences(size)
        depths = sorted(float(x) for x in random.sample(DEPTHS, task.keys))
        places = [int(len(sentences) * (depth / 100)) for depth in depths]
        parts = []
        for start, end, which in zip([0, *places], places, order, strict=False):
            parts += [" ".join(sentences[start:end]), needles[which]]
        context = " ".join([*parts, " ".join(sentences[places[-1] :])])
    (asked,) = random.sample(range(task.keys), 1)
    prompt = PROMPT.format(one=task.kind[:-1], context=context, key=names[asked])
    return prompt, values[asked], depths[order.index(asked)]


def value(kind: str, random: Random) -> str:
    if kind == "numbers":
        return str(random.randint(1_000_000, 9_999_999))
    return str(uuid.UUID(int=random.getrandbits(128), version=4))


def step(task: Task, length: int) -> int:
    """By how much the haystack grows: words, or lines."""
    if task.haystack == "essay":
        return 500
    return 25 if length >= 4096 else 5


def size_linear(draw_one: Draw, count: Callable[[str], int], length: int, by: int) -> int:
    size, tokens = by, 0
    while tokens + NEW_TOKENS < length:
        prompt, answer, _ = draw_one(size)
        tokens = count(prompt + answer)
        if tokens + NEW_TOKENS > length:
            return size - by
        size += by
    return size


def size_binary(draw_one: Draw, count: Callable[[str], int], length: int, by: int) -> int:
    each = count(draw_one(by)[0]) / by
    low, high, best = by, max(int(length / each * 3), 2 * by), by
    while low <= high:
        middle = (low + high) // 2
        if count(draw_one(middle)[0]) + NEW_TOKENS <= length:
            best, low = middle, middle + 1
        else:
            high = middle - 1
    return best


def generate(
    task: Task,
    length: int,
    *,
    samples: int,
    keys: Keys,
    haystack: Haystack,
    count: Callable[[list[str]], list[int]],
    seed: int = 42,
    sizing: str = "linear",
) -> Iterator[Sample]:
    """`count` says how many tokens texts are. No prompt with its 128 new tokens is longer than `length`."""
    if sizing not in SIZINGS:
        raise ValueError(f"--sizing: expected one of {', '.join(SIZINGS)}, got {sizing!r}")
    random, by = Random(seed), step(task, length)

    def draw_one(size: int) -> tuple[str, str, float]:
        return draw(task, size, keys, haystack, random)

    def count_one(text: str) -> int:
        return count([text])[0]

    def sample(size: int) -> Sample:
        """With as many steps of haystack fewer as it takes."""
        while True:
            prompt, answer, depth = draw_one(size)
            tokens = count_one(prompt)
            if tokens + NEW_TOKENS <= length:
                return Sample(prompt=prompt, answer=answer, tokens=tokens, depth=depth)
            if size <= 0:
                raise ValueError(
                    f"--lengths: expected room for the question and {NEW_TOKENS} new tokens, {tokens + NEW_TOKENS} "
                    f"without any haystack, got {length}"
                )
            size = max(0, size - by)

    size = {"linear": size_linear, "binary": size_binary}[sizing](draw_one, count_one, length, by)
    left = samples
    while left:
        # Most fit: several are drawn and counted at once, and where one does not fit, the stream goes back to it.
        states, drawn = [], []
        for _ in range(min(left, TOGETHER)):
            states.append(random.getstate())
            drawn.append(draw_one(size))
        tokens = count([prompt for prompt, _, _ in drawn])
        for state, (prompt, answer, depth), each in zip(states, drawn, tokens, strict=True):
            left -= 1
            if each + NEW_TOKENS > length:
                random.setstate(state)
                yield sample(size)
                break
            yield Sample(prompt=prompt, answer=answer, tokens=each, depth=depth)


def correct(prediction: str, answer: str) -> bool:
    """RULER's string_match_all with one reference: the answer anywhere in what was generated."""
    cleaned = re.sub(r"[\x00-\x1f]", "\n", prediction.strip()).strip()
    return answer.lower() in cleaned.lower()


def first_correct(prediction: str, answer: str) -> bool:
    """Whether the first value generated is the answer: the first run of digits, whole, for a number; the first word of
    letters, digits and hyphens with a digit in it for a uuid, so that one that is cut short or too long is an answer,
    and a wrong one. RULER credits later guesses too."""
    word = r"\d+" if answer.isdigit() else r"[a-z\d-]*\d[a-z\d-]*"
    first = re.search(word, prediction.lower())
    return first is not None and first.group() == answer.lower()
