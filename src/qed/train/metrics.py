"""What is known of a run in numbers: how fast it is, λ of every head, and the rows of its metrics.jsonl."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..layers import Mixer
from ..model.causal_lm import QEDForCausalLM

# Dense bfloat16 operations per second, by a part of the name that torch gives a GPU.
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}


def flops_per_token(model: QEDForCausalLM) -> float:
    """Operations of a forward and backward: six for every weight a token meets, and the recurrence in chunks of 64."""
    weights = sum(x.numel() for name, x in model.named_parameters() if "embed_tokens" not in name)
    weights += model.lm_head.weight.numel() if model.config.tie_word_embeddings else 0
    config = model.config
    heads = config.num_hidden_layers * config.num_heads
    recurrence = 3 * heads * (6 * config.head_dim * config.value_head_dim + 4 * 64 * config.head_dim)
    return 6.0 * weights + recurrence


def utilisation(model: QEDForCausalLM, tokens_per_s: float, device: str) -> float | None:
    """The model's own arithmetic as a fraction of the GPU's peak; None where the peak is not known.

    Args:
        model: the model that is trained.
        tokens_per_s: how many tokens are trained per second.
        device: "cpu", "cuda" or "cuda:N".
    """
    if not device.startswith("cuda"):
        return None
    name = torch.cuda.get_device_name(device)
    peak = next((x for key, x in PEAKS.items() if key in name), None)
    return None if peak is None else tokens_per_s * flops_per_token(model) / peak


# Fields of a row that have a value for every layer: the mean λ; λ of every head; the least, mean and largest values of
# gates and decays.
OBJECTS = ("strength", "strength_by_head", "ranges")


def read_row(line: bytes) -> dict[str, Any]:
    """Read one line of metrics.jsonl; ValueError if it is damaged: not a JSON object, or a field of another type."""
    try:
        row = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected a JSON object, got {line[:60]!r} ({error})") from error
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, got {line[:60]!r}")
    step = row.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ValueError(f"expected a step, a whole number, got {step!r}")
    for name, value in row.items():
        expected: tuple[type, ...] = (dict,) if name in OBJECTS else (int, float, type(None))
        if not isinstance(value, expected) or isinstance(value, bool):
            raise ValueError(f"expected {name} to be {'an object' if dict in expected else 'a number'}, got {value!r}")
    return row


def read_metrics(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Read a metrics.jsonl, plain or packed as .xz: its rows, and a message with the number of every damaged line."""
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    try:
        with (lzma.open if path.suffix == ".xz" else open)(path, "rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    if line.strip():
                        rows.append(read_row(line))
                except ValueError as error:
                    problems.append(f"{path}:{number}: a damaged line is left out: {error}")
    except (EOFError, lzma.LZMAError) as error:
        problems.append(f"{path}: damaged, what comes after {len(rows)} rows is left out: {error}")
    return rows, problems


@torch.no_grad()
def strengths(model: QEDForCausalLM) -> dict[str, Tensor]:
    """λ of all heads [H] of every layer that has one, on the model's device."""
    by_layer = {}
    for i, block in enumerate(model.model.layers):
        if isinstance(block.mixer, Mixer) and block.mixer.row.strength:
            heads = block.mixer.strength()
            by_layer[str(i)] = heads.full_tensor() if isinstance(heads, DTensor) else heads
    return by_layer
