"""Results that lie where no report reads them, so that `qed report` names them instead of leaving them out silently."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..eval.packing import ANSWERS
from ..eval.tasks import TASKS
from ..files import read_json

NAMES = {"metrics.jsonl", "metrics.jsonl.xz", "strength.json", "eigenvalues.json", "eigenvalues.json.xz", ANSWERS}
# A folder without a configuration was going to be a run if it has one of these.
TRACES = ("metrics.jsonl", "stages.json", "checkpoints", "export", "eval", "strength", "eigenvalues.json")


def strays(base: Path, known: Iterable[Path]) -> list[str]:
    """Sentences about the folders below `base` that hold results but are part of no run that is reported or named.

    Args:
        base: a folder of runs.
        known: the folders of those runs.
    """
    known = set(known)
    inside = {place for run in known for place in (run, run / "eval", run / "strength")}
    inside |= {place for run in known for place in (run / "strength").glob("*") if is_number(place.name)}
    said: dict[str, None] = {}  # each once, in order
    for path in sorted(base.rglob("*.json*")):
        if path.parent in inside or not _is_result(path):
            continue
        above = [x for x in path.parents if base in x.parents]
        if any((x / "report.html").exists() for x in above):
            continue  # a report keeps copies
        run = next((x for x in above if (x / "config.json").exists() and x not in known), None)
        if run is not None and run.parent != base:
            said[f"{run.parent}: runs that are left out; `qed report {base} {run.parent}` reports them too"] = None
        else:
            said[
                f"{path.parent}: results that belong to no run, and are left out: those of a run are in its eval/, "
                "strength/S/ and eigenvalues.json, where `qed eval RUN` and the like write them"
            ] = None
    return list(said)


def _is_result(path: Path) -> bool:
    """Whether a file is a result. Frozen prompts have the name of a task too, but do not say what they are about."""
    if path.name in NAMES:
        return True
    if path.suffix != ".json" or path.stem.partition("-")[0] not in TASKS:
        return False
    try:
        return "about" in read_json(path)
    except (OSError, ValueError, TypeError):
        return False


def is_number(text: Any) -> bool:
    """Whether a text, such as the name of a folder in strength/, is a finite number."""
    try:
        return math.isfinite(float(text))
    except (TypeError, ValueError):
        return False


def candidates(base: Path) -> list[Path]:
    """The folders that may be runs: that of a run itself, or all in a folder of runs."""
    return [base] if (base / "config.json").exists() else sorted(x for x in base.iterdir() if x.is_dir())
