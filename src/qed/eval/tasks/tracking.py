"""State tracking: the running product of a word in a finite group, asked at every letter, far past training.

Words are drawn as in training (`data/generated.py`), from the held-out stream. Beside them there are the powers: for
every generator g the word g g g …. On a power nothing but the state tells two places apart, and theory is strict there:
a layer whose transitions have no negative eigenvalue ends in one answer, and one whose eigenvalues are real ends in two
by turns, whatever it has learned.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ...data.generated import PREFIX, SPECIAL, Generated, given_and_wanted
from ...data.groups import GROUPS, Table
from ..counted import packed_bits, unpacked_bits
from ..options import Options
from ..task import MeasuredTask, Measurement

if TYPE_CHECKING:
    from ...model.causal_lm import QEDForCausalLM

WORDS = 24  # unless --samples says otherwise
FIRST = 32  # letters of the first bin; every other one reaches twice as far


def edges(length: int) -> list[int]:
    """Where bins of places begin and end: 0, 32, 64, 128 and so on, and the length."""
    return [0, *(FIRST << i for i in range(40) if FIRST << i < length), length]


def powers(group: str, length: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets [generators, length] of the words that repeat one generator."""
    table = Table(GROUPS[group])
    words = np.arange(1, len(table.letters))[:, None].repeat(length, axis=1)
    tokens, targets = table.letters[words], table.products(words)
    return torch.from_numpy(tokens) + len(SPECIAL), torch.from_numpy(targets) + len(SPECIAL)


def words(group: str, length: int, count: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets [generators + count, length]: the powers, then words that are drawn.

    Args:
        group: a name of the table of groups.
        length: letters of a word.
        count: how many words are drawn.
    """
    drawn = given_and_wanted(Generated(f"{PREFIX}tracking:{group}").rows(range(count), length))
    tokens, targets = (torch.cat(x) for x in zip(powers(group, length), drawn, strict=True))
    return tokens, targets


def counted(right: np.ndarray) -> list[dict[str, int]]:
    """How many answers are right in each bin of places, of rows [B, length]."""
    return [
        {"from": a, "to": b, "right": int(right[:, a:b].sum()), "asked": right[:, a:b].size}
        for a, b in pairwise(edges(right.shape[1]))
    ]


def result_of(group: str, right: np.ndarray) -> dict[str, Any]:
    """The result of answers [generators + words, length], each of which is right or not."""
    generators = len(GROUPS[group].generators)
    about = {"length": right.shape[1], "words": len(right) - generators}
    return about | {
        "bins": counted(right[generators:]),
        "powers": counted(right[:generators]),
        "answers": packed_bits(right),
    }


def prepare(model: QEDForCausalLM, options: Options, tokenizer: str, *, group: str) -> Measurement:
    """Answers at every letter of words of the longest of the lengths: `options.samples` words or 24, and the powers.

    Args:
        model: whose tokens must be the group's elements.
        options: of which `lengths`, `samples` and `batch` are read.
        tokenizer: the sha256 of the checkpoint's tokenizer.
        group: a name of the table of groups.
    """
    own = Generated(f"{PREFIX}tracking:{group}").index["tokenizer_sha256"]
    if tokenizer != own:
        raise ValueError(f"tracking_{group}: expected a model whose tokens are elements of {group}, got another's")
    length = max(options.lengths)
    tokens, targets = words(group, length, options.samples or WORDS)
    prompts = hashlib.sha256(torch.stack([tokens, targets]).numpy().tobytes()).hexdigest()

    @torch.no_grad()
    def run(done: Callable[[int], None]) -> dict[str, Any]:
        right = []
        for given, wanted in zip(tokens.split(options.batch), targets.split(options.batch), strict=True):
            likeliest = model(given.to(model.device), use_cache=False).logits.argmax(-1).cpu()
            right.append((likeliest == wanted).numpy())
            done(sum(map(len, right)))
        return result_of(group, np.concatenate(right))

    return Measurement(suffix=str(length), about={"length": length, "prompts": prompts}, steps=len(tokens), run=run)


def check(result: dict[str, Any], *, group: str) -> None:
    """ValueError unless the counts of a result are those of its answers."""
    length, count = result.get("length"), result.get("words")
    if type(length) is not int or type(count) is not int or min(length, count) < 1:
        raise ValueError(f"expected the number of words and their length, got {count!r} and {length!r}")
    rows = len(GROUPS[group].generators) + count
    right = unpacked_bits(result.get("answers"), rows * length).reshape(rows, length)
    again = result_of(group, right)
    for part in ("bins", "powers"):
        if result.get(part) != again[part]:
            raise ValueError(f"expected {part} as its answers have them, {again[part]}, got {result.get(part)!r:.200}")


def table_rows(name: str, result: dict[str, Any]) -> list[tuple[str, ...]]:
    """A row for every bin of places."""
    return [
        (name.partition("-")[0], f"{x['from'] + 1}–{x['to']}", f"{x['right'] / x['asked']:.1%}", str(x["asked"]))
        for x in result["bins"]
    ]


TASKS = tuple(
    MeasuredTask(
        name=f"tracking_{group}",
        title=row.title,
        columns=("", "letters", "correct", "of"),
        rows=table_rows,
        prepare=partial(prepare, group=group),
        check=partial(check, group=group),
    )
    for group, row in GROUPS.items()
)
