"""Loss as a function of where a token stands, which tells whether the state still works past the training length.

A row of the corpus is read whole, or with --max-length in windows that slide over it: the difference is what the model
gains from what it read before the window. In bits a byte of text, models of different tokenizers compare.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...data import tokenization
from ...data.shards import TokenShards
from ..options import Options
from ..task import MeasuredTask, Measurement
from .corpus import corpus

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from ...model.causal_lm import QEDForCausalLM

ROWS = 64  # unless --samples says otherwise


def losses(model: QEDForCausalLM, ids: list[int], window: int | None = None, batch: int = 64) -> Tensor:
    """The loss [L], in float32, of predicting each of the last L tokens of L + 1.

    Args:
        model: to be measured.
        ids: the tokens.
        window: how many tokens before it a prediction sees at most; None for all that there are. Windows move on by
            half of their length, so that a prediction past the first window sees at least half of one.
        batch: as `scores` takes it.
    """
    from ..scoring import Text, scores

    if window is None or window >= len(ids) - 1:
        texts = [Text(ids, 1)]
    else:
        step = window // 2
        texts = [Text(ids[: window + 1], 1)]
        for start in range(step, len(ids) - window - 1 + step, step):
            part = ids[start : start + window + 1]
            texts.append(Text(part, window - step + 1))
    found = dict(scores(model, texts, batch=batch))
    return -torch.cat([found[i].log_probability for i in range(len(texts))])


def bytes_before(tokenizer: Tokenizer, ids: list[int], edges: list[int]) -> list[int] | None:
    """How many bytes of text stand in so many tokens from the beginning; None where a token stands for an unknown word.

    Args:
        tokenizer: which made the tokens; those that separate documents are no text.
        ids: the tokens.
        edges: how many of them, for each number that is returned.
    """
    unknown = tokenizer.token_to_id(getattr(tokenizer.model, "unk_token", None) or "")
    if unknown is not None and unknown in ids:
        return None
    return [len(tokenizer.decode(ids[:edge], skip_special_tokens=True).encode()) for edge in edges]


def by_position(
    model: QEDForCausalLM,
    shards: TokenShards,
    *,
    length: int,
    rows: int,
    tokenizer: Tokenizer,
    window: int | None = None,
    done: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """Mean loss in bins of positions, doubling in width, over rows of a held-out corpus from its beginning, in nats a
    token and in bits a byte of text.

    Args:
        model: to be measured.
        shards: the corpus.
        length: tokens of a row.
        rows: how many, at most.
        tokenizer: of the corpus, for its bytes.
        window: how many tokens a prediction sees at most; None for all before it.
        done: is called with the number of rows done after each.
    """
    available = (len(shards) - 1) // length
    if available < 1:
        raise ValueError(f"--data: expected more than {length} tokens for one row, got {len(shards)}")
    rows = min(rows, available)
    edges = [0, *(2**i for i in range(6, 40) if 2**i < length), length]
    sums, sizes = (torch.zeros(rows, len(edges) - 1, dtype=torch.float64) for _ in range(2))
    for row in range(rows):
        ids = shards.read(row * length, length + 1).tolist()
        row_losses = losses(model, ids, window).double()
        sums[row] = torch.stack([row_losses[a:b].sum() for a, b in pairwise(edges)])
        texts = bytes_before(tokenizer, ids, [edge + 1 for edge in edges])  # the first token is not predicted
        sizes[row] = torch.nan if texts is None else torch.tensor(texts, dtype=torch.float64).diff()
        done(row + 1)
    widths = torch.tensor([b - a for a, b in pairwise(edges)], dtype=torch.float64)
    means = sums / widths
    errors = means.std(0) / rows**0.5 if rows > 1 else torch.full_like(means[0], torch.nan)
    bins = [
        {"from": a, "to": b, "loss": loss, "standard_error": _number(error), "bits_per_byte": _number(bits)}
        for (a, b), loss, error, bits in zip(
            pairwise(edges), means.mean(0).tolist(), errors, sums.sum(0) / sizes.sum(0) / math.log(2), strict=True
        )
    ]
    whole = {
        "loss": float(sums.sum() / rows / length),
        "bits_per_byte": _number(sums.sum() / sizes.sum() / math.log(2)),
    }
    return {"length": length, "rows": rows, **whole, "bins": bins}


def _number(value: Tensor) -> float | None:
    """A number that JSON can hold; None for what is not known."""
    return float(value) if torch.isfinite(value) else None


def prepare(model: QEDForCausalLM, options: Options, tokenizer: str) -> Measurement:
    """Loss by position at the longest of the lengths, over `options.samples` rows of the corpus, or 64.

    Args:
        model: to be measured.
        options: of which `data`, `lengths`, `samples` and `max_length`, the window, are read.
        tokenizer: the sha256 of the checkpoint's tokenizer, which the corpus must be of.
    """
    shards, length, window = corpus("positions", options, tokenizer), max(options.lengths), options.max_length
    folder = options.data["positions"]
    rows = min(options.samples or ROWS, (len(shards) - 1) // length)
    if rows < 1:
        raise ValueError(f"--data: expected more than {length} tokens for one row in {folder}, got {len(shards)}")
    if window is not None and window >= length:
        raise ValueError(f"--max-length: expected a window shorter than the {length} tokens of a row, got {window}")
    words = tokenization.load(str(folder / "tokenizer.json"))
    about = {"length": length, "rows": rows, "data": shards.index["shards"]}
    return Measurement(
        suffix=str(length) if window is None else f"{length}-{window}",
        about=about if window is None else about | {"max_length": window},
        steps=rows,
        run=lambda done: by_position(
            model, shards, length=length, rows=rows, tokenizer=words, window=window, done=done
        ),
    )


def check(result: dict[str, Any]) -> None:
    """ValueError unless a result has losses by position."""
    bins = result.get("bins")
    if not isinstance(bins, list) or not all(_is_bin(x) for x in bins):
        raise ValueError(f"expected losses by position, got {bins!r:.60}")


def _is_bin(x: Any) -> bool:
    return isinstance(x, dict) and all(isinstance(x.get(name), int | float) for name in ("from", "to", "loss"))


def table_rows(name: str, result: dict[str, Any]) -> list[tuple[str, ...]]:
    """The rows of a result, given its name: one for each bin, and the whole."""

    def row(where: str, x: dict[str, Any]) -> tuple[str, ...]:
        bits = x.get("bits_per_byte")
        return name, where, f"{x['loss']:.4f}", "unknown words" if bits is None else f"{bits:.4f}"

    return [*(row(f"{x['from']}–{x['to']}", x) for x in result["bins"]), row("all", result)]


TASKS = (
    MeasuredTask(
        name="positions",
        title="Loss by position",
        inputs=("data",),
        columns=("", "position", "loss", "bits per byte"),
        rows=table_rows,
        prepare=prepare,
        check=check,
    ),
)
