"""Loss as a function of where a token stands, which tells whether the state still works past the training length."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...data.shards import TokenShards
from ..options import Options
from ..task import MeasuredTask, Measurement

if TYPE_CHECKING:
    from ...model.causal_lm import QEDForCausalLM

PIECE = 2048  # tokens that the model reads at once
ROWS = 64  # unless --samples says otherwise


@torch.no_grad()
def losses(model: QEDForCausalLM, rows: Tensor) -> Tensor:
    """The loss [B, L], in float32, of predicting each of the last L tokens of rows [B, L + 1], read piece by piece."""
    device, cache, pieces = model.device, None, []
    for start in range(0, rows.shape[1] - 1, PIECE):
        end = min(start + PIECE, rows.shape[1] - 1)
        given, wanted = rows[:, start:end].to(device), rows[:, start + 1 : end + 1].to(device)
        said = model(given, past_key_values=cache, use_cache=True)
        cache, logits = said.past_key_values, said.logits.float()
        pieces.append(torch.nn.functional.cross_entropy(logits.mT, wanted, reduction="none").cpu())
    return torch.cat(pieces, 1)


def by_position(
    model: QEDForCausalLM, shards: TokenShards, *, length: int, rows: int, done: Callable[[int], None] = lambda _: None
) -> dict[str, Any]:
    """Mean loss in bins of positions, doubling in width, over rows of a held-out corpus from its beginning.

    Args:
        model: to be measured.
        shards: the corpus.
        length: tokens of a row.
        rows: how many, at most.
        done: is called with the number of rows done after each.
    """
    available = (len(shards) - 1) // length
    if available < 1:
        raise ValueError(f"--data: expected more than {length} tokens for one row, got {len(shards)}")
    rows = min(rows, available)
    edges = [0, *(2**i for i in range(6, 40) if 2**i < length), length]
    means = torch.zeros(rows, len(edges) - 1, dtype=torch.float64)
    for row in range(rows):
        tokens = torch.from_numpy(shards.read(row * length, length + 1))[None]
        row_losses = losses(model, tokens)[0].double()
        means[row] = torch.stack([row_losses[a:b].mean() for a, b in pairwise(edges)])
        done(row + 1)
    errors = means.std(0) / rows**0.5 if rows > 1 else torch.full_like(means[0], torch.nan)
    bins = [
        {"from": a, "to": b, "loss": loss, "standard_error": None if error != error else error}
        for (a, b), loss, error in zip(pairwise(edges), means.mean(0).tolist(), errors.tolist(), strict=True)
    ]
    widths = torch.tensor([b - a for a, b in pairwise(edges)], dtype=torch.float64)
    return {"length": length, "rows": rows, "loss": float((means.mean(0) * widths).sum() / length), "bins": bins}


def prepare(model: QEDForCausalLM, options: Options, tokenizer: str) -> Measurement:
    """Loss by position at the longest of the lengths, over `options.samples` rows of the corpus, or 64.

    Args:
        model: to be measured.
        options: of which `data`, `lengths` and `samples` are read.
        tokenizer: the sha256 of the checkpoint's tokenizer, which the corpus must be of.
    """
    folder = options.data.get("positions")
    if folder is None:
        raise ValueError("--data: expected positions=FOLDER of `qed prepare`, got none")
    shards, length = TokenShards(folder), max(options.lengths)
    if shards.index["tokenizer_sha256"] != tokenizer:
        raise ValueError(f"--data: expected tokens of the checkpoint's tokenizer, got another's in {folder}")
    rows = min(options.samples or ROWS, (len(shards) - 1) // length)
    if rows < 1:
        raise ValueError(f"--data: expected more than {length} tokens for one row in {folder}, got {len(shards)}")
    return Measurement(
        suffix=str(length),
        about={"length": length, "rows": rows, "data": shards.index["shards"]},
        steps=rows,
        run=lambda done: by_position(model, shards, length=length, rows=rows, done=done),
    )


def check(result: dict[str, Any]) -> None:
    """ValueError unless a result has losses by position."""
    bins = result.get("bins")
    if not isinstance(bins, list) or not all(_is_bin(x) for x in bins):
        raise ValueError(f"expected losses by position, got {bins!r:.60}")


def _is_bin(x: Any) -> bool:
    return isinstance(x, dict) and all(isinstance(x.get(name), int | float) for name in ("from", "to", "loss"))


TASKS = (
    MeasuredTask(
        name="positions",
        title="Loss by position",
        inputs=("data",),
        columns=("position", "loss"),
        rows=lambda name, result: [(f"{x['from']}–{x['to']}", f"{x['loss']:.4f}") for x in result["bins"]],
        prepare=prepare,
        check=check,
    ),
)
