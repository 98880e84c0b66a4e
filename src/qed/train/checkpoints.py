"""Checkpoints that are whole or not there.

    DIR/step-00000500/   weights.safetensors, optimizer.safetensors, state.json, sums.json (sha256 of the others)

A folder is written under another name, flushed to disk and renamed. The newest two and the best are kept. Loading takes
the newest whose sums agree, and says which it passed over.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file, save_file
from torch import Tensor

KEPT = 2


class Checkpoint(NamedTuple):
    folder: Path
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict[str, Any]


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def save(
    folder: Path, step: int, weights: dict[str, Tensor], optimizer: dict[str, Tensor], state: dict[str, Any]
) -> Path:
    """Write one and drop what is no longer kept. OSError if the disk is full: what was there before still is."""
    target, part = folder / name_of(step), folder / (name_of(step) + ".part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        save_file(_plain(weights), part / "weights.safetensors", metadata={"format": "pt"})
        save_file(_plain(optimizer), part / "optimizer.safetensors", metadata={"format": "pt"})
        (part / "state.json").write_text(json.dumps(state | {"step": step}, indent=2))
        sums = {file.name: _sum(file) for file in sorted(part.iterdir())}
        (part / "sums.json").write_text(json.dumps(sums, indent=2))
        for file in part.iterdir():
            _flush(file)
        shutil.rmtree(target, ignore_errors=True)
        part.rename(target)
        _flush(folder)
    except Exception as error:
        shutil.rmtree(part, ignore_errors=True)
        if isinstance(error, OSError):
            raise
        raise OSError(f"{part}: {error}") from error  # safetensors reports a full disk in its own way
    _prune(folder)
    return target


def newest(folder: Path, report: Any = print) -> Checkpoint | None:
    """The newest that is whole; None if there is none."""
    for candidate in sorted(folder.glob("step-????????"), reverse=True):
        try:
            sums = json.loads((candidate / "sums.json").read_text())
            for name, expected in sums.items():
                if _sum(candidate / name) != expected:
                    raise ValueError(f"{name} is not what was written")
            return Checkpoint(
                candidate,
                load_file(candidate / "weights.safetensors"),
                load_file(candidate / "optimizer.safetensors"),
                json.loads((candidate / "state.json").read_text()),
            )
        except (OSError, ValueError, KeyError) as error:
            report(f"{candidate}: damaged, passed over: {error}")
    return None


def _plain(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.detach().cpu().contiguous() for name, x in tensors.items()}


def _sum(file: Path) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _prune(folder: Path) -> None:
    """Keep the newest KEPT and the one with the least validation loss."""
    found = sorted(folder.glob("step-????????"))
    losses = {}
    for candidate in found:
        try:
            loss = json.loads((candidate / "state.json").read_text()).get("validation_loss")
        except (OSError, ValueError):
            loss = None
        if loss is not None:
            losses[candidate] = loss
    best = min(losses, key=lambda x: losses[x], default=None)
    for candidate in found[:-KEPT]:
        if candidate != best:
            shutil.rmtree(candidate, ignore_errors=True)
