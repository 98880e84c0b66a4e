"""Rows that no corpus has: made when they are asked for, with a target of its own at every token.

    generated:tracking:s5    words of a group; the target of a letter is the product so far (`groups.py`)
    generated:recall:64      pairs of keys and values, from 4 to 64 of them, then questions (`recall.py`)

Such a name stands wherever a folder of `qed prepare` could. A row is a function of the source, its stream and its
number: training at a seed has one stream, validation another, so that nothing is kept on disk and nothing restored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from ..choices import check_choice
from . import recall, tokenization
from .groups import GROUPS, Table

PREFIX = "generated:"
HELD_OUT = "held out"  # the stream of rows that no training sees
LEAST_PAIRS, MOST_PAIRS = 4, 512
RECALL_WORDS = 2048  # the vocabulary of recall, half of it keys
OTHER = "<|other|>"
SPECIAL = (tokenization.END, OTHER)  # the first words of every tokenizer here
SHOWN = 8  # rows that tell whether two versions of the code make the same ones


def is_generated(data: str) -> bool:
    """Whether the name of training data asks for rows that are made."""
    return data.startswith(PREFIX)


class Kind(NamedTuple):
    """What a source makes.

    Attributes:
        words: the vocabulary beyond the two special words.
        draw: inputs and targets [B, T] of rows with these random generators and numbers; a target is −100 where none
            is wanted, and both are numbers of words.
        cycle: after so many rows the numbers of targets repeat.
        targets: the number of targets of so many rows as a cycle has, given the tokens of a row.
        task: the evaluation task that asks the same.
    """

    words: list[str]
    draw: Callable[[list[np.random.Generator], Sequence[int], int], tuple[np.ndarray, np.ndarray]]
    cycle: int
    targets: Callable[[int], int]
    task: str


def _tracking(name: str) -> Kind:
    check_choice(f"data: {PREFIX}tracking:GROUP", name, GROUPS)
    table = Table(GROUPS[name])

    def draw(randoms: list[np.random.Generator], numbers: Sequence[int], tokens: int) -> tuple[np.ndarray, np.ndarray]:
        words = np.stack([random.integers(len(table.letters), size=tokens) for random in randoms])
        return table.letters[words], table.products(words)

    return Kind(table.names, draw, cycle=1, targets=lambda tokens: tokens, task=f"tracking_{name}")


def numbers_of_pairs(most: int) -> list[int]:
    """The loads of recall: 4 pairs, and twice as many again and again, up to `most`."""
    return [LEAST_PAIRS << i for i in range(most.bit_length()) if LEAST_PAIRS << i <= most]


def _recall(name: str) -> Kind:
    allowed = [str(x) for x in numbers_of_pairs(MOST_PAIRS)]
    check_choice(f"data: {PREFIX}recall:PAIRS", name, allowed)
    loads = numbers_of_pairs(int(name))

    def draw(randoms: list[np.random.Generator], numbers: Sequence[int], tokens: int) -> tuple[np.ndarray, np.ndarray]:
        rows = [
            recall.row(random, tokens, loads[number % len(loads)], RECALL_WORDS)
            for random, number in zip(randoms, numbers, strict=True)
        ]
        inputs, targets = (np.stack(x) for x in zip(*rows, strict=True))
        return inputs, targets

    half = RECALL_WORDS // 2
    words = [f"k{i}" if i < half else f"v{i - half}" for i in range(RECALL_WORDS)]

    def targets_of(tokens: int) -> int:
        return sum(tokens - 2 * pairs for pairs in loads)

    return Kind(words, draw, cycle=len(loads), targets=targets_of, task="recall_load")


KINDS: dict[str, Callable[[str], Kind]] = {"tracking": _tracking, "recall": _recall}


class Generated:
    """The rows of one source and stream. It stands in for a corpus where a run is trained and validated."""

    def __init__(self, data: str, stream: str = HELD_OUT):
        """ValueError if there is no such source. `stream` tells rows of one training or of validation apart."""
        kind, _, name = data.removeprefix(PREFIX).partition(":")
        if not is_generated(data):
            raise ValueError(f"data: expected {' or '.join(f'{PREFIX}{x}:…' for x in KINDS)}, got {data!r}")
        check_choice("data: generated:KIND", kind, KINDS)
        self.data, self.stream, self.kind = data, stream, KINDS[kind](name)

    @property
    def vocab_size(self) -> int:
        """The number of words, with the special ones."""
        return len(SPECIAL) + len(self.kind.words)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The words as a tokenizer, so that a model of them is exported and evaluated like any other."""
        vocabulary = {word: i for i, word in enumerate((*SPECIAL, *self.kind.words))}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=OTHER))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.decoder = decoders.WordPiece(prefix="@@", cleanup=False)
        return tokenizer

    @cached_property
    def index(self) -> dict[str, Any]:
        """What the index of a corpus says of its tokens."""
        return {"vocab_size": self.vocab_size, "tokenizer_sha256": tokenization.identity(self.tokenizer)}

    @cached_property
    def identity(self) -> str:
        """The sha256 of the source's name and of its first held-out rows: another code of the task has another one."""
        rows = Generated(self.data).rows(range(SHOWN), 4 * MOST_PAIRS)
        return hashlib.sha256(self.data.encode() + rows.numpy().tobytes()).hexdigest()

    def windows(self, tokens: int) -> None:
        """How many different rows of so many tokens there are: no end of them."""
        return None

    def targets(self, rows: int, tokens: int) -> int:
        """The number of targets in so many rows from any step's first on; ValueError if it is not always the same."""
        if rows % self.kind.cycle:
            raise ValueError(
                f"batch_tokens, validation_tokens: expected multiples of {self.kind.cycle} rows, so that every number "
                f"of pairs is as frequent, got {rows} rows"
            )
        return rows // self.kind.cycle * self.kind.targets(tokens)

    def rows(self, numbers: Sequence[int], tokens: int) -> Tensor:
        """Rows [B, tokens + 1, 2] of these numbers. The last dimension has the token, and the target of the one before
        it; a corpus has the same token in both."""
        randoms = [np.random.default_rng(self._seed(number)) for number in numbers]
        inputs, targets = self.kind.draw(randoms, numbers, tokens)
        rows = np.full((len(inputs), tokens + 1, 2), recall.IGNORED)
        rows[:, :-1, 0], rows[:, -1, 0] = inputs + len(SPECIAL), 0
        rows[:, 1:, 1] = np.where(targets == recall.IGNORED, targets, targets + len(SPECIAL))
        return torch.from_numpy(rows)

    def _seed(self, number: int) -> list[int]:
        digest = hashlib.sha256(f"{self.data}/{self.stream}/{number}".encode()).digest()
        return np.frombuffer(digest[:16], np.uint32).tolist()


def given_and_wanted(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and targets [B, T] of rows: of tokens [B, T + 1] the next ones, of [B, T + 1, 2] those of their own."""
    tokens, targets = (rows, rows) if rows.dim() == 2 else rows.unbind(-1)
    return tokens[:, :-1], targets[:, 1:]
