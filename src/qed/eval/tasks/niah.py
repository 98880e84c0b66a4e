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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from random import Random
from typing import TypeAlias

from ...data.needles import NEEDLE, NOISE, PROMPT, value
from ..options import SIZINGS, Options
from ..records import text_digest
from ..task import Count, Draws, NeedleTask, Sample
from . import keys as key_lists
from .keys import Keys

DEPTHS = [round(100 * i / 39) for i in range(40)]  # per cent of the sentences
NEW_TOKENS = 128
SHORTEST = 256
TOGETHER = 32  # samples counted at once
Draw: TypeAlias = Callable[[int], tuple[str, str, float]]  # of a size: prompt, answer, depth


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """What is hidden in what, as RULER configures a task."""

    haystack: str  # "noise" or "essay"
    kind: str  # "numbers" or "uuids"
    keys: int = 1


CONFIGURATIONS = {
    "niah_single_1": Configuration(haystack="noise", kind="numbers"),
    "niah_single_2": Configuration(haystack="essay", kind="numbers"),
    "niah_single_3": Configuration(haystack="essay", kind="uuids"),
    "niah_multikey_1": Configuration(haystack="essay", kind="numbers", keys=4),
}


@dataclass(kw_only=True)
class Haystack:
    """The words of essays, or none for noise; and how a text is split into sentences."""

    text: str = ""
    split: Callable[[str], list[str]] = field(default=lambda text: re.split(r"(?<=[.!?])\s+", text))

    def __post_init__(self) -> None:
        self.words = self.text.split()
        self.sentences = lru_cache(maxsize=8)(self._sentences)

    def _sentences(self, count: int) -> list[str]:
        """The sentences of the first `count` words, which are repeated where there are fewer."""
        if not self.words:
            raise ValueError("--essays: expected text for a haystack, got none")
        repeats = -(-count // len(self.words))
        text = " ".join((self.words * max(1, repeats))[:count]).strip()
        return self.split(text) if text else []


def punkt(text: str) -> list[str]:
    """The sentences of a text as RULER splits it; needs nltk and its data."""
    from nltk.tokenize import sent_tokenize

    return list(sent_tokenize(text))


def essays(path: Path | None) -> str:
    """The text of a .txt or .txt.xz, or that under "text" in a .json or .json.xz."""
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
    """RULER's way to split a text into sentences (nltk's punkt) where it is installed, None where punctuation must do;
    and the name of the way, which is kept with frozen prompts."""
    try:
        punkt("One. Two.")
    except (ImportError, LookupError):
        return None, "punctuation"
    return punkt, "punkt"


def draw(task: Configuration, size: int, keys: Keys, haystack: Haystack, random: Random) -> tuple[str, str, float]:
    """A prompt, its answer and the depth of its needle, in per cent.

    Args:
        task: what is hidden in what.
        size: words of essays or lines of noise in the haystack.
        keys: what the needles' keys are chosen from.
        haystack: the essays; noise does not look at it.
        random: where everything random comes from, in RULER's order.
    """
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


def step(task: Configuration, length: int) -> int:
    """By how many words of essays, or lines of noise, the haystack grows."""
    if task.haystack == "essay":
        return 500
    return 25 if length >= 4096 else 5


def size_linear(draw_one: Draw, count: Callable[[str], int], length: int, by: int) -> int:
    """The size of haystack a step before the first that is too long.

    Args:
        draw_one: draws a prompt of a size.
        count: the tokens of a text.
        length: tokens of a prompt with its new ones, at most.
        by: the step by which sizes grow.
    """
    size, tokens = by, 0
    while tokens + NEW_TOKENS < length:
        prompt, answer, _ = draw_one(size)
        tokens = count(prompt + answer)
        if tokens + NEW_TOKENS > length:
            return size - by
        size += by
    return size


def size_binary(draw_one: Draw, count: Callable[[str], int], length: int, by: int) -> int:
    """The largest size of haystack that a binary search finds to fit.

    Args:
        draw_one: draws a prompt of a size.
        count: the tokens of a text.
        length: tokens of a prompt with its new ones, at most.
        by: the smallest size.
    """
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
    task: Configuration,
    length: int,
    *,
    samples: int,
    keys: Keys,
    haystack: Haystack,
    count: Count,
    seed: int = 42,
    sizing: str = "linear",
) -> Iterator[Sample]:
    """Samples, of which no prompt with its 128 new tokens is longer than `length`.

    Args:
        task: what is hidden in what.
        length: in tokens.
        samples: how many.
        keys: what the needles' keys are chosen from.
        haystack: the essays; noise does not look at it.
        count: how many tokens texts are.
        seed: of everything random.
        sizing: how the size of the haystack is found, "linear" or "binary".
    """
    if sizing not in SIZINGS:
        raise ValueError(f"--sizing: expected one of {', '.join(SIZINGS)}, got {sizing!r}")
    random, by = Random(seed), step(task, length)

    def draw_one(size: int) -> tuple[str, str, float]:
        return draw(task, size, keys, haystack, random)

    def count_one(text: str) -> int:
        return count([text])[0]

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
                yield _fitting(draw_one, count_one, length, size, by)
                break
            yield Sample(prompt=prompt, answer=answer, tokens=each, depth=depth)


def _fitting(draw_one: Draw, count: Callable[[str], int], length: int, size: int, by: int) -> Sample:
    """One sample, with as many steps of haystack fewer than `size` as it takes to fit."""
    while True:
        prompt, answer, depth = draw_one(size)
        tokens = count(prompt)
        if tokens + NEW_TOKENS <= length:
            return Sample(prompt=prompt, answer=answer, tokens=tokens, depth=depth)
        if size <= 0:
            raise ValueError(
                f"--lengths: expected room for the question and {NEW_TOKENS} new tokens, {tokens + NEW_TOKENS} "
                f"without any haystack, got {length}"
            )
        size = max(0, size - by)


def draws(task: Configuration, options: Options) -> Draws:
    """Reads the keys and, where the haystack is made of them, the essays that options name."""
    text, sentences, haystack = "", "none", Haystack()
    keys = key_lists.load(options.words)
    if task.haystack == "essay":
        text = essays(options.essays)
        split, sentences = splitter()
        haystack = Haystack(text=text) if split is None else Haystack(text=text, split=split)

    def samples(length: int, number: int, count: Count, seed: int) -> Iterator[Sample]:
        drawn = partial(generate, task, length, samples=number, keys=keys, haystack=haystack)
        return drawn(count=count, seed=seed, sizing=options.sizing)

    kept = {"essays": text_digest(text) if text else None, "sentences": sentences}
    return Draws(samples=samples, about={"sizing": options.sizing, "keys": keys.identity(), **kept})


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


def _row(name: str, title: str) -> NeedleTask:
    task = CONFIGURATIONS[name]
    return NeedleTask(
        name=name,
        title=title,
        inputs=("words", "essays") if task.haystack == "essay" else ("words",),
        draws=partial(draws, task),
        shortest=SHORTEST,
        new_tokens=NEW_TOKENS,
        correct=correct,
        first_correct=first_correct,
    )


TASKS = (
    _row("niah_single_1", "S-NIAH-1"),
    _row("niah_single_2", "S-NIAH-2"),
    _row("niah_single_3", "S-NIAH-3"),
    _row("niah_multikey_1", "MK-NIAH-1"),
)
