"""Associative recall under load: which share of questions is answered while a row tells more and more pairs.

Rows are those of training (`data/recall.py`), from the held-out stream. Answers are counted by how many pairs had been
told: up to 4, 8, 16 and so on, to a quarter of the row's tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...data.generated import PREFIX, SPECIAL, Generated, given_and_wanted
from ...data.recall import IGNORED
from ..counted import packed_bits, unpacked_bits
from ..options import Options
from ..task import MeasuredTask, Measurement

if TYPE_CHECKING:
    from ...model.causal_lm import QEDForCausalLM

ROWS = 32  # unless --samples says otherwise
FIRST = 4  # pairs of the first bin; every other one reaches twice as far


def edges(pairs: int) -> list[int]:
    """Where bins of loads begin and end: 0, 4, 8, 16 and so on, and the most pairs."""
    return [0, *(FIRST << i for i in range(40) if FIRST << i < pairs), pairs]


def prepare(model: QEDForCausalLM, options: Options, tokenizer: str) -> Measurement:
    """The answers to every question in rows of the longest of the lengths, by the number of pairs told before.

    Args:
        model: whose tokens must be those of recall.
        options: of which `lengths`, `samples` and `batch` are read.
        tokenizer: the sha256 of the checkpoint's tokenizer.
    """
    length = max(options.lengths)
    source = Generated(f"{PREFIX}recall:{model.config.vocab_size - len(SPECIAL)}")
    if tokenizer != source.index["tokenizer_sha256"]:
        raise ValueError("recall_load: expected a model trained on generated:recall:WORDS, got one of other tokens")
    tokens, targets = given_and_wanted(source.rows(range(options.samples or ROWS), length))
    prompts = hashlib.sha256(torch.stack([tokens, targets]).numpy().tobytes()).hexdigest()

    @torch.no_grad()
    def run(done: Callable[[int], None]) -> dict[str, Any]:
        right: list[np.ndarray] = []
        for given, wanted in zip(tokens.split(options.batch), targets.split(options.batch), strict=True):
            likeliest = model(given.to(model.device), use_cache=False).logits.argmax(-1).cpu()
            questions = (wanted != IGNORED)[0]  # at the same places of every row
            right.append((likeliest == wanted)[:, questions].numpy())
            done(sum(map(len, right)))
        return result_of(np.concatenate(right))

    about = {"length": length, "prompts": prompts}
    return Measurement(suffix=str(length), about=about, steps=len(tokens), run=run)


def result_of(right: np.ndarray) -> dict[str, Any]:
    """The result of answers [rows, questions], each of which is right or not; two questions follow every pair."""
    rows, questions = right.shape
    loads = [
        {"from": a, "to": b, "right": int(right[:, 2 * a : 2 * b].sum()), "asked": right[:, 2 * a : 2 * b].size}
        for a, b in pairwise(edges(questions // 2))
    ]
    return {"rows": rows, "pairs": questions // 2, "loads": loads, "answers": packed_bits(right)}


def check(result: dict[str, Any]) -> None:
    """ValueError unless the counts of a result are those of its answers."""
    rows, pairs = result.get("rows"), result.get("pairs")
    if type(rows) is not int or type(pairs) is not int or min(rows, pairs) < 1:
        raise ValueError(f"expected the numbers of rows and pairs, got {rows!r} and {pairs!r}")
    again = result_of(unpacked_bits(result.get("answers"), 2 * rows * pairs).reshape(rows, 2 * pairs))
    if result.get("loads") != again["loads"]:
        raise ValueError(f"expected the counts of its answers, {again['loads']}, got {result.get('loads')!r:.200}")


TASKS = (
    MeasuredTask(
        name="recall_load",
        title="Recall under load",
        columns=("pairs told", "correct", "of"),
        rows=lambda name, result: [
            (f"{x['from'] + 1}–{x['to']}", f"{x['right'] / x['asked']:.1%}", str(x["asked"])) for x in result["loads"]
        ],
        prepare=prepare,
        check=check,
    ),
)
