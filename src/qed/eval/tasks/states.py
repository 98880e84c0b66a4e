"""How large states become along a long text.

A state of fixed size can still hold numbers of any size. With an erase gate for each channel many steps together can
let a state grow without end, though no single step does (docs/design/algebra.md, section 6), most of all along a text
that repeats. Two texts are read: one line of RULER's noise again and again, and the beginning of a held-out corpus.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...data import tokenization
from ...data.needles import NOISE
from ..options import Options
from ..task import MeasuredTask, Measurement
from .corpus import corpus

if TYPE_CHECKING:
    from ...model.causal_lm import QEDForCausalLM

POINTS = 16  # how often the states are looked at
SHORTEST = 64 * POINTS  # tokens of a text


@torch.no_grad()
def norms(model: QEDForCausalLM, ids: Tensor, done: Callable[[], None] = lambda: None) -> list[dict[str, Any]]:
    """The Frobenius norm of every head's state at `POINTS` points of a text, evenly spaced, the last at its end.

    Args:
        model: to be measured.
        ids: tokens [T].
        done: is called after each point.
    """
    from ...layers import MixerState  # which takes its time to import
    from ...ops import value_checks

    found, cache = [], None
    ends = [len(ids) * (i + 1) // POINTS for i in range(POINTS)]
    for start, end in zip([0, *ends], ends, strict=False):
        part = ids[None, start:end].to(model.device)
        with value_checks(False):  # a state that is not finite is a result here
            output = model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        states = {layer: x for layer in range(len(model.model.layers)) if isinstance(x := cache.get(layer), MixerState)}
        # In float64, since a square overflows long before its number does.
        heads = {str(layer): x.recurrent[0].double().flatten(1).norm(dim=1).tolist() for layer, x in states.items()}
        found.append(
            {
                "tokens": end,
                "norms": {layer: [_number(x) for x in row] for layer, row in heads.items()},
                "finite": bool(output.logits.isfinite().all()),
            }
        )
        done()
    return found


def _number(x: float) -> float | None:
    """A number that JSON can hold; None for one that is not finite."""
    return x if math.isfinite(x) else None


def prepare(model: QEDForCausalLM, options: Options, tokenizer: str) -> Measurement:
    """Norms of all states along the noise and along a held-out corpus, of the longest of the lengths.

    Args:
        model: to be measured.
        options: of which `data` and `lengths` are read.
        tokenizer: the sha256 of the checkpoint's tokenizer, which the corpus must be of.
    """
    shards, length = corpus("states", options, tokenizer), max(options.lengths)
    folder = options.data["states"]
    if length < SHORTEST:
        raise ValueError(f"--lengths: expected {SHORTEST} tokens or more for task states, got {length}")
    if len(shards) < length:
        raise ValueError(f"--data: expected {length} tokens or more in {folder}, got {len(shards)}")
    if not any(model.config.layer_rules):
        raise ValueError("task states: expected a model with recurrent layers, got one of softmax layers alone")
    words = tokenization.load(str(folder / "tokenizer.json"))
    line = words.encode(NOISE + "\n", add_special_tokens=False).ids
    if words.token_to_id(getattr(words.model, "unk_token", None) or "") in line:
        raise ValueError(
            f"task states: expected a tokenizer that knows all words of {NOISE!r}; the checkpoint's does not"
        )
    texts = {
        "noise": torch.tensor((line * -(-length // len(line)))[:length]),
        "corpus": torch.as_tensor(shards.read(0, length).tolist()),
    }

    def run(done: Callable[[int], None]) -> dict[str, Any]:
        steps = iter(range(1, len(texts) * POINTS + 1))
        return {
            "length": length,
            "texts": {name: norms(model, x, lambda: done(next(steps))) for name, x in texts.items()},
        }

    about = {"length": length, "data": shards.index["shards"]}
    return Measurement(suffix=str(length), about=about, steps=len(texts) * POINTS, run=run)


def check(result: dict[str, Any]) -> None:
    """ValueError unless a result has norms of the same states at every point of every text."""
    texts = result.get("texts")
    if not isinstance(texts, dict) or not texts or not all(_are_points(x) for x in texts.values()):
        raise ValueError(f"expected norms of states, got {texts!r:.60}")


def _are_points(points: Any) -> bool:
    if not isinstance(points, list) or len(points) < 2 or not all(isinstance(x, dict) for x in points):
        return False
    tables = [x.get("norms") for x in points]
    if not all(isinstance(x, dict) and x and all(isinstance(row, list) and row for row in x.values()) for x in tables):
        return False
    numbers = [n for x in tables for row in x.values() for n in row]
    known = all(n is None or (type(n) in (int, float) and n >= 0) for n in numbers)
    shapes = {tuple((layer, len(row)) for layer, row in x.items()) for x in tables}
    ends = [x.get("tokens") for x in points]
    return known and len(shapes) == 1 and all(type(x) is int for x in ends) and "finite" in points[-1]


def table_rows(name: str, result: dict[str, Any]) -> list[tuple[str, ...]]:
    """The rows of a result, given its name: for each text how many heads double over its second half, the one that
    grows fastest, and what it and the logits are at the end."""
    rows: list[tuple[str, ...]] = []
    for text, points in result["texts"].items():
        middle, end = points[len(points) // 2 - 1], points[-1]
        heads = [
            (_doublings(before, after), layer, head, after)
            for layer, befores in middle["norms"].items()
            for head, (before, after) in enumerate(zip(befores, end["norms"][layer], strict=True))
        ]
        doublings, layer, head, after = max(heads, key=lambda x: x[0])
        growing = sum(x[0] >= 1 for x in heads)
        tokens = end["tokens"] - middle["tokens"]
        rows.append(
            (
                name,
                text,
                f"{growing} of {len(heads)}",
                f"layer {layer}, head {head}",
                "not finite" if after is None else f"{after:.3g}",
                f"{tokens / doublings:,.0f} tokens" if 1 <= doublings < math.inf else "",
                "finite" if end["finite"] else "not finite",
            )
        )
    return rows


def _doublings(before: float | None, after: float | None) -> float:
    """How often a norm doubles between two points; infinity where it ceases to be a number."""
    if before is None or after is None:
        return math.inf
    return math.log2(after / before) if before > 0 and after > 0 else 0.0


TASKS = (
    MeasuredTask(
        name="states",
        title="Norms of states",
        inputs=("data",),
        columns=("", "text", "growing", "fastest", "norm", "doubles every", "logits"),
        rows=table_rows,
        prepare=prepare,
        check=check,
    ),
)
