"""Associative recall under load: how many of n pairs a state holds, for n = 4, 8, 16 … up to a quarter of the row.

Rows are those of training (`data/generated.py`), from streams of their own, and all of one length, whatever their load.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...data.generated import PREFIX, RECALL_WORDS, SPECIAL, Generated, numbers_of_pairs
from ...data.recall import IGNORED, row
from ..counted import packed_bits, unpacked_bits
from ..options import Options
from ..task import MeasuredTask, Measurement

if TYPE_CHECKING:
    from torch import Tensor

    from ...model.causal_lm import QEDForCausalLM

ROWS = 16  # for each number of pairs, unless --samples says otherwise


def rows(length: int, pairs: int, seed: int, count: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets [count, length] of rows with so many pairs.

    Args:
        length: tokens of a row.
        pairs: in each.
        seed: of everything random.
        count: of rows.
    """
    made = [row(np.random.default_rng([seed, pairs, i]), length, pairs, RECALL_WORDS) for i in range(count)]
    tokens, targets = (torch.from_numpy(np.stack(x)) for x in zip(*made, strict=True))
    return tokens + len(SPECIAL), torch.where(targets == IGNORED, targets, targets + len(SPECIAL))


def prepare(model: QEDForCausalLM, options: Options, tokenizer: str) -> Measurement:
    """The answers to every question in rows of the longest of the lengths, by the number of pairs.

    Args:
        model: whose tokens must be those of recall.
        options: of which `lengths`, `samples`, `seed` and `batch` are read.
        tokenizer: the sha256 of the checkpoint's tokenizer.
    """
    length = max(options.lengths)
    loads = numbers_of_pairs(length // 4)
    if not loads or tokenizer != Generated(f"{PREFIX}recall:{loads[0]}").index["tokenizer_sha256"]:
        raise ValueError(
            "recall_load: expected a model trained on generated:recall and rows of 16 tokens or more, "
            f"got rows of {length}" + (" and another tokenizer" if loads else "")
        )
    asked = {n: rows(length, n, options.seed, options.samples or ROWS) for n in loads}
    everything = b"".join(x.numpy().tobytes() for pair in asked.values() for x in pair)

    @torch.no_grad()
    def run(done: Callable[[int], None]) -> dict[str, Any]:
        right = {}
        for i, (n, (tokens, targets)) in enumerate(asked.items()):
            parts = zip(tokens.split(options.batch), targets.split(options.batch), strict=True)
            said = [
                (model(given.to(model.device), use_cache=False).logits.argmax(-1).cpu() == wanted)[wanted != IGNORED]
                for given, wanted in parts
            ]
            right[n] = torch.cat(said).numpy()
            done(i + 1)
        return result_of(length, right)

    about = {"length": length, "seed": options.seed, "prompts": hashlib.sha256(everything).hexdigest()}
    return Measurement(suffix=str(length), about=about, steps=len(loads), run=run)


def result_of(length: int, right: dict[int, np.ndarray]) -> dict[str, Any]:
    """The result of answers, each of which is right or not, by the number of pairs."""
    loads = [{"pairs": n, "right": int(x.sum()), "asked": len(x)} for n, x in right.items()]
    return {"length": length, "loads": loads, "answers": packed_bits(np.concatenate(list(right.values())))}


def check(result: dict[str, Any]) -> None:
    """ValueError unless the counts of a result are those of its answers."""
    loads = result.get("loads")
    if not isinstance(loads, list) or not all(_is_load(x) for x in loads) or not loads:
        raise ValueError(f"expected counts by the number of pairs, got {loads!r:.60}")
    bits = unpacked_bits(result.get("answers"), sum(x["asked"] for x in loads))
    ends = np.cumsum([x["asked"] for x in loads])[:-1]
    again = result_of(result["length"], {x["pairs"]: y for x, y in zip(loads, np.split(bits, ends), strict=True)})
    if again["loads"] != loads:
        raise ValueError(f"expected the counts of its answers, {again['loads']}, got {loads!r:.200}")


def _is_load(x: Any) -> bool:
    return isinstance(x, dict) and all(type(x.get(name)) is int for name in ("pairs", "right", "asked"))


TASKS = (
    MeasuredTask(
        name="recall_load",
        title="Recall under load",
        columns=("pairs", "correct", "of"),
        rows=lambda name, result: [
            (str(x["pairs"]), f"{x['right'] / x['asked']:.1%}", str(x["asked"])) for x in result["loads"]
        ],
        prepare=prepare,
        check=check,
    ),
)
