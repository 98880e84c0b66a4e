"""`qed generate`: text on the terminal while it is generated."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..model.base import weights_dtype
from ..model.decoding import stream
from ..model.loading import load
from ..model.sampling import Sampling


def write(
    checkpoint: Path,
    prompt: str,
    *,
    max_new_tokens: int,
    sampling: dict[str, Any],
    strength: float,
    seed: int,
    tokenizer: Path,
    device: str,
    console: Console,
) -> str:
    """Print the continuation of a prompt while it is generated, and return it.

    Args:
        checkpoint: A folder that save_pretrained wrote.
        prompt: The text to continue.
        max_new_tokens: Stop after so many tokens, if not before at an end token.
        sampling: Arguments of `Sampling`.
        strength: A factor on every λ.
        seed: The seed of sampling.
        tokenizer: A folder with a tokenizer, which must not need code of its own.
        device: Where the model runs.
        console: Where the speed is printed.
    """
    chosen = Sampling(**sampling)
    if not checkpoint.is_dir():
        raise ValueError(f"{checkpoint}: expected a checkpoint's folder")
    if not any((tokenizer / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        raise ValueError(f"{tokenizer}: no tokenizer there; name its folder with --tokenizer")
    if prompt != prompt.encode(errors="replace").decode():
        raise ValueError("PROMPT: expected text in UTF-8, got bytes that are none")
    model = load(checkpoint, dtype=weights_dtype(device), device=device)
    encoder = _load_tokenizer(tokenizer)
    model.set_strength_scale(strength)
    ids = encoder(prompt, return_tensors="pt").input_ids.to(device)
    if ids.shape[1] == 0:
        raise ValueError("PROMPT: expected at least one token, got none")
    torch.manual_seed(seed)
    ends = model.end_tokens() | ({encoder.eos_token_id} - {None})
    tokens: list[int] = []
    shown, start = "", time.perf_counter()
    for part in stream(model, ids, max_new_tokens=max_new_tokens, sampling=chosen):
        new = part[0].tolist()
        stop = next((i for i, token in enumerate(new) if token in ends), None)
        tokens += new[:stop]
        text = encoder.decode(tokens, skip_special_tokens=True)
        if not text.endswith("\ufffd"):  # half a character is not shown
            _print(text[len(shown) :])
            shown = text
        if stop is not None:
            break
    text = encoder.decode(tokens, skip_special_tokens=True)
    _print(text[len(shown) :] + "\n")
    rate = len(tokens) / (time.perf_counter() - start)
    console.print(f"{len(tokens)} tokens, {rate:.0f} a second, reading the prompt and the first call included")
    return text


def _load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # the libraries below raise all kinds for a file that is no tokenizer
        if "trust_remote_code" in str(error):
            error = ValueError("it needs code of its own to run; code of a folder is not run")
        raise ValueError(f"--tokenizer: expected a tokenizer in {folder}, got: {error}") from error


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
