"""What a run writes while it runs: one JSON object a step, and a line on the terminal."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..layers import Mixer
from ..model.causal_lm import QEDForCausalLM


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
def strengths(model: QEDForCausalLM) -> dict[str, float]:
    """Mean λ of every layer that has one."""
    found = {}
    for i, block in enumerate(model.model.layers):
        if isinstance(block.mixer, Mixer) and block.mixer.row.strength:
            mean = block.mixer.strength().mean()
            found[str(i)] = float(mean.full_tensor() if isinstance(mean, DTensor) else mean)
    return found
