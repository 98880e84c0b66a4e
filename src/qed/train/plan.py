"""`qed train --dry-run`: what a run would be."""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table

from ..model.causal_lm import QEDForCausalLM
from .config import TrainConfig
from .optimizer import groups

KEPT = {"none": 35, "cheap": 20, "full": 1}


def plan(config: TrainConfig, console: Console) -> dict[str, float]:
    """Printed, and returned by name."""
    with torch.device("meta"):
        model = QEDForCausalLM(config.model_config())
    count = sum(x.numel() for x in model.parameters())
    width, layers, tokens = model.config.hidden_size, model.config.num_hidden_layers, config.micro_tokens
    low = 2 if config.precision == "bfloat16" else 4
    # Weights, gradients and two moments in float32; for the backward so many numbers a token, layer and channel.
    states = 16 * count
    kept = tokens * width * low * (layers * KEPT[config.activation_checkpointing] + 40)
    found = {
        "parameters": count,
        **{f"parameters, {name}": sum(x.numel() for _, x in found) for name, found in groups(model).items()},
        "tokens": config.total_tokens,
        "steps": config.steps,
        "tokens a step": config.batch_tokens,
        "pieces a step on one device": -(-config.batch_tokens // config.micro_tokens),
        "memory, GiB (a rough guess)": (states + kept) / 2**30,
    }
    table = Table(title=config.name)
    table.add_column("")
    table.add_column("", justify="right")
    for name, value in found.items():
        table.add_row(name, f"{value:,.1f}" if isinstance(value, float) else f"{value:,}")
    console.print(table)
    return found
