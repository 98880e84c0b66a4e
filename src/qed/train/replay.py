"""`qed replay`: the batch at which a run diverged, computed again with the last checkpoint, layer by layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

from ..data.generated import given_and_wanted
from ..data.recall import IGNORED
from ..model.causal_lm import QEDForCausalLM
from . import checkpoints
from .config import TrainConfig
from .objective import SummedLoss


def replay(folder: Path, *, device: str, console: Console) -> dict[str, Any]:
    """Print and return the loss and the [least, largest] output of every block.

    Args:
        folder: the diverged-… folder inside a run's folder.
        device: "cpu" or "cuda".
        console: where the table is printed.
    """
    try:
        config = TrainConfig.from_json(json.dumps(json.loads((folder.parent / "config.json").read_text())["config"]))
        rows = load_file(folder / "batch.safetensors")["rows"].to(device)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{folder}: expected a diverged-… folder inside a run's: {error}") from error
    torch.manual_seed(config.seed)
    model = QEDForCausalLM(config.model_config()).to(device).train()
    last = checkpoints.newest(folder.parent / "checkpoints", console.print)
    if last is not None:
        model.load_state_dict(last.weights, strict=False)
        model.tie_weights()
    seen: dict[str, tuple[float, float]] = {}
    for i, block in enumerate(model.model.layers):
        block.register_forward_hook(
            lambda _, __, out, i=i: seen.__setitem__(f"layer {i}", (float(out[0].min()), float(out[0].max())))
        )
    kind, low = torch.device(device).type, config.precision == "bfloat16"
    with torch.no_grad(), torch.autocast(kind, dtype=torch.bfloat16, enabled=low):
        loss = float(SummedLoss(model)(rows)) / int((given_and_wanted(rows)[1] != IGNORED).sum())
    at = "its first weights" if last is None else last.folder.name
    table = Table("", "least", "most", title=f"loss {loss:.4f} with {at}")
    for name, (least, most) in seen.items():
        table.add_row(name, f"{least:.4g}", f"{most:.4g}")
    console.print(table)
    return {"loss": loss, "ranges": seen}
