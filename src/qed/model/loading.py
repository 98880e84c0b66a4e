"""Loads a checkpoint from a folder for commands, with an error that names what is wrong if it is not one of this
architecture, or not complete."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from transformers.utils import logging

from .causal_lm import QEDForCausalLM
from .config import QEDConfig


def load(checkpoint: Path | str, *, dtype: torch.dtype | Literal["auto"], device: str) -> QEDForCausalLM:
    """Return the model of a checkpoint in evaluation mode; raise ValueError if the folder is none.

    Args:
        checkpoint: a folder that `save_pretrained` wrote.
        dtype: the dtype of the weights; "auto" for that in which they were saved.
        device: the device to move the model to.
    """
    checkpoint = Path(checkpoint)
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # what is wrong is said once, below

    def wrong(got: object) -> ValueError:
        said = " ".join(str(got).split())
        return ValueError(f"CHECKPOINT: expected a folder that save_pretrained wrote, got {checkpoint}: {said}")

    if not checkpoint.is_dir():
        raise wrong("it is no folder")
    try:
        described = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise wrong(f"its config.json cannot be read: {error}") from error
    kind = described.get("model_type") if isinstance(described, dict) else None
    if kind != QEDConfig.model_type:
        raise wrong(f"its config.json describes a model of type {kind!r}, not {QEDConfig.model_type!r}")
    try:
        config = QEDConfig.from_pretrained(checkpoint)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:  # a field of another type
        raise wrong(f"its config.json is not one of this package: {error}") from error
    try:
        model = QEDForCausalLM.from_pretrained(checkpoint, config=config, dtype=dtype)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise wrong(f"its weights cannot be read: {error}") from error
    return model.to(device).eval()
