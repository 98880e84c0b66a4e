"""`qed train --dry-run`: how large a run would be."""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table

from ..model.causal_lm import QEDForCausalLM
from .config import TrainConfig
from .optimizers import groups

# Numbers saved for the backward pass per token, layer and channel, by what is recomputed (activation_checkpointing).
SAVED_NUMBERS = {"none": 35, "light": 24, "cheap": 20, "lean": 16, "full": 1}


def plan(config: TrainConfig, console: Console) -> dict[str, float]:
    """Print the sizes of a run's model, data and memory, and return them by name."""
    with torch.device("meta"):
        model = QEDForCausalLM(config.model_config())
    count = sum(x.numel() for x in model.parameters())
    width, layers, tokens = model.config.hidden_size, model.config.num_hidden_layers, config.micro_tokens
    number_bytes = 2 if config.precision == "bfloat16" else 4
    states = 16 * count  # weights, gradients and AdamW's two moments in float32
    saved = tokens * width * number_bytes * (layers * SAVED_NUMBERS[config.activation_checkpointing] + 40)
    sizes = {
        "parameters": count,
        **{f"parameters, {name}": sum(x.numel() for _, x in group) for name, group in groups(model, config).items()},
        "tokens": config.total_tokens,
        "steps": config.steps,
        "tokens a step": config.batch_tokens,
        "pieces a step on one device": -(-config.batch_tokens // config.micro_tokens),
        "memory, GiB (a rough guess)": (states + saved) / 2**30,
    }
    table = Table(title=config.name)
    table.add_column("")
    table.add_column("", justify="right")
    for name, value in sizes.items():
        table.add_row(name, f"{value:,.1f}" if isinstance(value, float) else f"{value:,}")
    console.print(table)
    return sizes
