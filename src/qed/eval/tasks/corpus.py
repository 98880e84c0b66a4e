"""The held-out corpus of a task that is measured on rows of tokens."""

from __future__ import annotations

from ...data.shards import TokenShards
from ..options import Options


def corpus(task: str, options: Options, tokenizer: str) -> TokenShards:
    """Open the corpus that a task was given; ValueError if there is none, or if it has another tokenizer's tokens.

    Args:
        task: its name.
        options: of which `data` is read.
        tokenizer: the sha256 of the checkpoint's tokenizer, which the corpus must be of.
    """
    folder = options.data.get(task)
    if folder is None:
        raise ValueError(f"--data: expected {task}=FOLDER of `qed prepare`, got none")
    shards = TokenShards(folder)
    if shards.index["tokenizer_sha256"] != tokenizer:
        raise ValueError(f"--data: expected tokens of the checkpoint's tokenizer, got another's in {folder}")
    return shards
