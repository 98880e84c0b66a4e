"""A small training run that fuzzers damage, kill and resume: made once a process, then copied."""

import atexit
import contextlib
import io
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers.utils import logging

from qed.data.prepare import prepare
from qed.recipes import build
from qed.train import checkpoints
from qed.train.config import TrainConfig
from qed.train.loop import STOPPED, train

STEPS = 14
SETTINGS = {
    "sequence": "16", "batch_tokens": "32", "micro_tokens": "32", "save_every": "4", "validate_every": "5",
    "validation_tokens": "64", "model.hidden_size": "8", "model.head_dim": "4", "model.intermediate_size": "8",
    "model.num_hidden_layers": "1", "log_every": "1",
}  # fmt: skip
# What must not depend on what happened to the run: all but speed.
NUMBERS = ("step", "tokens", "loss", "learning_rate", "gradient_norm", "validation_loss", "strength", "skipped")

logging.set_verbosity_error()  # a refused checkpoint is reported at length otherwise
logging.disable_progress_bar()


@cache
def scratch() -> Path:
    """A folder for this process, removed when it ends."""
    folder = Path(tempfile.mkdtemp(prefix="qed-attack-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """An empty folder for one case."""
    with tempfile.TemporaryDirectory(dir=scratch()) as folder:
        yield Path(folder)


def heard() -> Console:
    """A console whose file keeps what was said."""
    return Console(file=io.StringIO(), width=10_000, force_terminal=False)


@cache
def corpus() -> str:
    folder = scratch() / "corpus"
    prepare("synthetic:30", tokenizer="words:512", out=folder, console=Console(quiet=True))
    return str(folder)


def config(steps: int = STEPS, data: str | None = None) -> TrainConfig:
    data = corpus() if data is None else data
    total = {"total_tokens": str(32 * steps), "decay_start_tokens": str(16 * steps)}
    return build("mini", SETTINGS | total | {"data": data, "validation": data})


def finish(out: Path, run: TrainConfig | None = None) -> str:
    """Train to the end, on one thread; what was said."""
    torch.set_num_threads(1)
    console = heard()
    status = train(run or config(), out, device="cpu", console=console)
    assert status == 0, f"exit status {status}"
    return console.file.getvalue()  # type: ignore[attr-defined]


@cache
def whole() -> Path:
    """A run that nothing happened to."""
    out = scratch() / "whole"
    finish(out)
    return out


@cache
def stopped() -> Path:
    """The same run, told to stop when it is validated for the second time: it has checkpoints and steps to go."""
    torch.set_num_threads(1)
    out, validated = scratch() / "stopped", []

    def stop(_: Any) -> dict[str, float]:
        validated.append(True)
        if len(validated) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return {}

    status = train(config(), out, device="cpu", console=Console(quiet=True), watch=stop)
    assert status == STOPPED
    return out


def numbers(out: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: row.get(name) for name in NUMBERS} for row in rows]


def same_end(out: Path, truth: Path, steps: int = STEPS) -> None:
    """The run's last checkpoint and its export have the same bits as those of a run that nothing happened to."""
    name = checkpoints.name_of(steps)
    for file in (f"checkpoints/{name}/weights.safetensors", f"checkpoints/{name}/optimizer.safetensors"):
        same_tensors(out / file, truth / file)
    same_tensors(out / "export" / "model.safetensors", truth / "export" / "model.safetensors")


def same_tensors(file: Path, truth: Path) -> None:
    assert file.is_file(), f"{file.name} is not there"
    found, expected = load_file(file), load_file(truth)
    assert found.keys() == expected.keys(), f"{file.name}: other tensors"
    for name, x in expected.items():
        assert torch.equal(found[name], x), f"{file.parent.name}/{file.name}: {name} has other bits"
