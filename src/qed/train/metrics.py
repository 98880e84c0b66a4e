"""What a run writes while it runs: one JSON object a step, and a line on the terminal."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..layers import Mixer
from ..model.causal_lm import QEDForCausalLM

# Dense bfloat16 products a second, by what torch calls the GPU.
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}


def flops_per_token(model: QEDForCausalLM) -> float:
    """Of a forward and backward: six for every weight a token meets, and the recurrence in chunks of 64."""
    weights = sum(x.numel() for name, x in model.named_parameters() if "embed_tokens" not in name)
    weights += model.lm_head.weight.numel() if model.config.tie_word_embeddings else 0
    config = model.config
    heads = config.num_hidden_layers * config.num_heads
    recurrence = 3 * heads * (6 * config.head_dim * config.value_head_dim + 4 * 64 * config.head_dim)
    return 6.0 * weights + recurrence


def utilisation(model: QEDForCausalLM, tokens_per_s: float, device: str) -> float | None:
    """Which part of the GPU's peak the model's own arithmetic is; None where the peak is not known."""
    if not device.startswith("cuda"):
        return None
    name = torch.cuda.get_device_name(device)
    peak = next((x for key, x in PEAKS.items() if key in name), None)
    return None if peak is None else tokens_per_s * flops_per_token(model) / peak


class TensorBoard:
    """The same numbers as event files, where the `tensorboard` package is installed."""

    def __init__(self, folder: Path):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder))

    def write(self, row: dict[str, Any]) -> None:
        for name, value in _flat(row):
            self.writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self.writer.close()


def _flat(row: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in row.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}/")
        elif isinstance(value, list):
            yield from zip((f"{prefix}{name}/{x}" for x in ("least", "mean", "most")), value, strict=True)
        elif isinstance(value, int | float) and name != "step":
            yield prefix + name, float(value)


class MetricsFile:
    """metrics.jsonl. A run that goes on from a checkpoint first drops what came after it."""

    def __init__(self, path: Path, first_step: int):
        self.path = path
        kept = []
        if path.exists():
            for line in path.read_text().splitlines():
                try:
                    row = json.loads(line)
                except json.JSONDecodeError:  # the last line of a run that was killed
                    continue
                if row["step"] < first_step:
                    kept.append(line)
        part = path.with_suffix(".part")
        part.write_text("".join(line + "\n" for line in kept))
        part.replace(path)
        self.file = path.open("a")

    def write(self, row: dict[str, Any]) -> None:
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()


@torch.no_grad()
def strengths(model: QEDForCausalLM) -> dict[str, Tensor]:
    """Mean λ of every layer that has one, on the model's device."""
    means = {}
    for i, block in enumerate(model.model.layers):
        if isinstance(block.mixer, Mixer) and block.mixer.row.strength:
            mean = block.mixer.strength().mean()
            means[str(i)] = mean.full_tensor() if isinstance(mean, DTensor) else mean
    return means
