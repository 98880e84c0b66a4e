"""What a run writes while it runs: one JSON object per step, the same numbers for TensorBoard, and how fast it is."""

from __future__ import annotations

import json
import lzma
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..files import write_text
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


class TensorBoard:
    """The same numbers as event files, where the `tensorboard` package is installed."""

    def __init__(self, folder: Path):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder))

    def write(self, row: dict[str, Any]) -> None:
        """Write every number of a step."""
        for name, value in _flat(row):
            self.writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        """Flush and close the event file."""
        self.writer.close()


def _flat(row: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in row.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}/")
        elif isinstance(value, list):
            labels = range(len(value)) if prefix.startswith("strength_by_head") else ("least", "mean", "most")
            yield from zip((f"{prefix}{name}/{x}" for x in labels), value, strict=True)
        elif isinstance(value, int | float) and name != "step":
            yield prefix + name, float(value)


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


class MetricsFile:
    """metrics.jsonl. A resumed run first drops the lines after its checkpoint, and damaged ones."""

    def __init__(self, path: Path, first_step: int, report: Callable[[str], object] = print):
        """
        Args:
            path: of metrics.jsonl.
            first_step: the first step that will be written.
            report: called with a message for every damaged line.
        """
        rows, problems = read_metrics(path) if path.exists() else ([], [])
        for problem in problems:
            report(problem)
        kept = [json.dumps(row) + "\n" for row in rows if row["step"] < first_step]
        write_text(path, "".join(kept))
        self.file = path.open("a")

    def write(self, row: dict[str, Any]) -> None:
        """Append a step's line."""
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()

    def close(self) -> None:
        """Flush the file to disk and close it."""
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()


@torch.no_grad()
def strengths(model: QEDForCausalLM) -> dict[str, Tensor]:
    """λ of all heads [H] of every layer that has one, on the model's device."""
    by_layer = {}
    for i, block in enumerate(model.model.layers):
        if isinstance(block.mixer, Mixer) and block.mixer.row.strength:
            heads = block.mixer.strength()
            by_layer[str(i)] = heads.full_tensor() if isinstance(heads, DTensor) else heads
    return by_layer
