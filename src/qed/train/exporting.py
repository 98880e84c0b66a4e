"""A model as a folder that loads anywhere: weights, configuration, stub, tokenizer, model card."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor
from transformers.utils import logging

from .. import files
from ..data.tokenizer_files import write_tokenizer
from ..model.causal_lm import QEDForCausalLM


def write_model(
    model: QEDForCausalLM, folder: Path, *, tokenizer: Path | None, weights: dict[str, Tensor] | None = None
) -> None:
    """Write a model and its tokenizer into a new folder, flushed to disk.

    The configuration gets the numbers of the tokenizer's special tokens, so that generation ends where texts end.

    Args:
        model: the model.
        folder: the folder, which is there and empty.
        tokenizer: the tokenizer's file, if there is one.
        weights: the model's weights by name, where the model itself has only this process's part of them.
    """
    logging.disable_progress_bar()  # a command has its own
    numbers = {} if tokenizer is None else write_tokenizer(tokenizer, folder)
    for name, number in numbers.items():
        for config in (model.config, model.generation_config):
            setattr(config, name, number)
    model.save_pretrained(folder, state_dict=weights)
    for file in folder.iterdir():
        files.make_plain(file)
        files.flush(file)
