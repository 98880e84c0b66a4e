"""Checkpoints, each of which is either whole or not there at all.

    DIR/step-00000500/   weights.safetensors, optimizer.safetensors, state.json, sums.json (sha256 of the others)

A folder is written under another name, flushed to disk and renamed. The newest two whole checkpoints are kept, the one
with the least validation loss, and always the one just written. What is damaged or only has a checkpoint's name is
neither counted nor touched. Loading takes the newest whole one, and reports those it passed over.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .. import files

NEWEST_KEPT = 2
SUMMED = {"weights.safetensors", "optimizer.safetensors", "state.json"}

Signature = tuple[tuple[str, int, int, int], ...]
_sound: dict[Path, Signature] = {}  # what this process has written or verified, as it was then


class Checkpoint(NamedTuple):
    """What a checkpoint's files hold."""

    folder: Path
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]  # the optimisers' state by "parameter/field"
    state: dict[str, Any]  # step, skipped and validation_loss


def name_of(step: int) -> str:
    """The name of a step's folder."""
    return f"step-{step:08d}"


def save(
    folder: Path, step: int, weights: dict[str, Tensor], optimizer: dict[str, Tensor], state: dict[str, Any]
) -> Path:
    """Write a checkpoint and remove those that are no longer kept. OSError if it cannot be written: then the ones
    before are still there.

    Args:
        folder: of all checkpoints of a run.
        step: how many steps the run has taken.
        weights: by name.
        optimizer: the optimisers' state by "parameter/field".
        state: skipped and validation_loss.
    """
    target, part = folder / name_of(step), folder / (name_of(step) + files.PART)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files.remove_leftovers(folder)
        files.new_folder(part)
        for name, tensors in (("weights.safetensors", weights), ("optimizer.safetensors", optimizer)):
            save_file(_plain(tensors), part / name, metadata={"format": "pt"})
            files.make_plain(part / name)
            files.flush(part / name)
        files.write_json(part / "state.json", state | {"step": step})
        files.write_json(part / "sums.json", {name: _sum(part / name) for name in sorted(SUMMED)})
        _put(part, target)
    except Exception as error:
        files.remove(part)
        if isinstance(error, OSError):
            raise
        raise OSError(f"{part}: {error}") from error  # safetensors reports a full disk in its own way
    _sound[target] = _signature(target)
    _prune(folder, target)
    return target


def newest(folder: Path, report: Callable[[str], object] = print) -> Checkpoint | None:
    """Load the newest checkpoint that is whole; None if there is none. Damaged ones are reported and passed over."""
    for candidate in reversed(_named(folder)):
        try:
            state = _verified(candidate)
            return Checkpoint(
                candidate,
                load_file(candidate / "weights.safetensors"),
                load_file(candidate / "optimizer.safetensors"),
                state,
            )
        except (OSError, ValueError, SafetensorError) as error:
            report(f"{candidate}: damaged, passed over: {error}")
    return None


def _named(folder: Path) -> list[Path]:
    """Everything that has a checkpoint's name, by step."""
    named = [x for x in folder.glob("step-*") if re.fullmatch(r"step-[0-9]{8,}", x.name)]
    return sorted(named, key=lambda x: int(x.name.removeprefix("step-")))


def _put(part: Path, target: Path) -> None:
    """Rename the new folder, replacing a damaged checkpoint or anything else that has its name."""
    old = target.with_name(f"{target.name}.old{files.PART}")
    if target.is_symlink() or target.exists():
        target.rename(old)
    part.rename(target)
    files.flush(target.parent)
    files.remove(old)


def _verified(candidate: Path) -> dict[str, Any]:
    """The state of a checkpoint whose files have the sums that were written; otherwise ValueError names the file."""
    before = _signature(candidate)
    sums = files.read_json(candidate / "sums.json")
    if not isinstance(sums, dict) or set(sums) != SUMMED:
        raise ValueError(f"sums.json: expected sums of {', '.join(sorted(SUMMED))}, got {str(sums)[:100]}")
    for name in sorted(SUMMED):
        if _sum(candidate / name) != sums[name]:
            raise ValueError(f"{name} is not what was written")
    state = files.read_json(candidate / "state.json")
    _check_state(state, candidate)
    _sound[candidate] = before
    return dict(state)


def _check_state(state: Any, candidate: Path) -> None:
    loss = state.get("validation_loss") if isinstance(state, dict) else None
    if (
        not isinstance(state, dict)
        or not _whole_number(state.get("step"))
        or name_of(state["step"]) != candidate.name
        or not _whole_number(state.get("skipped"))
        or not (loss is None or _number(loss))
    ):
        raise ValueError(f"state.json: expected step, skipped and validation_loss, got {str(state)[:100]}")


def _signature(candidate: Path) -> Signature:
    """Names, sizes and times of a checkpoint's files; ValueError if a file is missing or there is another one."""
    if not candidate.is_dir():
        raise ValueError("expected a folder")
    entries = sorted(candidate.iterdir())
    wrong = (SUMMED | {"sums.json"}) ^ {x.name for x in entries if x.is_file()}
    if wrong or len(entries) != len(SUMMED) + 1:
        names = [x.name for x in entries]
        raise ValueError(f"expected the files {', '.join(sorted(SUMMED))} and sums.json, got {names}")
    stats = [(x.name, x.stat()) for x in entries]
    return tuple((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def _whole(candidate: Path) -> bool:
    """Whether a checkpoint is whole. Its sums are compared once in a process, as long as sizes and times stay."""
    try:
        if _sound.get(candidate) != _signature(candidate):
            _verified(candidate)
    except (OSError, ValueError):
        return False
    return True


def _prune(folder: Path, saved: Path) -> None:
    """Keep the one just saved, the newest NEWEST_KEPT in all, and the one with the least validation loss."""
    whole = [x for x in _named(folder) if x == saved or _whole(x)]
    losses = {x: files.read_json(x / "state.json").get("validation_loss") for x in whole}
    finite = {x: loss for x, loss in losses.items() if _number(loss) and math.isfinite(loss)}
    best = min(finite, key=lambda x: finite[x], default=None)
    for candidate in whole[:-NEWEST_KEPT]:
        if candidate not in (best, saved):
            _sound.pop(candidate, None)
            files.remove(candidate)


def _whole_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _plain(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.detach().cpu().contiguous() for name, x in tensors.items()}


def _sum(file: Path) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()
