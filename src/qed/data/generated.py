"""Rows that no corpus has: made when they are asked for, with a target of its own at every token.

    generated:tracking:s5    words of a group; the target of a letter is the product so far (`groups.py`)
    generated:recall:1024    pairs of keys and values in 1,024 words, and questions about them (`recall.py`)

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
OTHER = "<|other|>"
SPECIAL = (tokenization.END, OTHER)  # the first words of every tokenizer here
SHOWN = 64, 8  # rows and their tokens that tell whether two versions of the code make the same ones


def is_generated(data: str) -> bool:
    """Whether the name of training data asks for rows that are made."""
    return data.startswith(PREFIX)


class Kind(NamedTuple):
    """What a source makes.

    Attributes:
        words: the vocabulary beyond the two special words.
        draw: inputs and targets [B, T] of rows with these random generators and so many tokens; both are numbers of
            words, and a target is −100 where none is wanted.
        targets: the number of targets of a row, given its tokens.
        task: the evaluation task that asks the same.
    """

    words: list[str]
    draw: Callable[[list[np.random.Generator], int], tuple[np.ndarray, np.ndarray]]
    targets: Callable[[int], int]
    task: str


def _tracking(name: str) -> Kind:
    check_choice(f"data: {PREFIX}tracking:GROUP", name, GROUPS)
    table = Table(GROUPS[name])

    def draw(randoms: list[np.random.Generator], tokens: int) -> tuple[np.ndarray, np.ndarray]:
        words = np.stack([random.integers(len(table.letters), size=tokens) for random in randoms])
        return table.letters[words], table.products(words)

    return Kind(table.names, draw, targets=lambda tokens: tokens, task=f"tracking_{name}")


def _recall(name: str) -> Kind:
    words = int(name) if name.isdecimal() else 0
    if words < 4 or words % 2:
        raise ValueError(f"data: expected {PREFIX}recall:WORDS, an even number of 4 or more, got {name!r}")

    def draw(randoms: list[np.random.Generator], tokens: int) -> tuple[np.ndarray, np.ndarray]:
        inputs, targets = zip(*(recall.row(random, tokens, words) for random in randoms), strict=True)
        return np.stack(inputs), np.stack(targets)

    names = [f"{kind}{i}" for kind in "kv" for i in range(words // 2)]
    return Kind(names, draw, targets=lambda tokens: tokens // 2, task="recall_load")


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
        rows = Generated(self.data).rows(range(SHOWN[0]), SHOWN[1])
        return hashlib.sha256(self.data.encode() + rows.numpy().tobytes()).hexdigest()

    def windows(self, tokens: int) -> None:
        """How many different rows of so many tokens there are: no end of them."""
        return None

    def targets(self, rows: int, tokens: int) -> int:
        """The number of targets in so many rows."""
        return rows * self.kind.targets(tokens)

    def rows(self, numbers: Sequence[int], tokens: int) -> Tensor:
        """Rows [B, tokens + 1, 2] of these numbers. The last dimension has the token, and the target of the one before
        it; a corpus has the same token in both."""
        randoms = [np.random.default_rng(self._seed(number)) for number in numbers]
        inputs, targets = self.kind.draw(randoms, tokens)
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
