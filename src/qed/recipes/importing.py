"""Rules, arms and recipes from a file of the user's, as `--import my_arms.py` adds them without editing the package.

Only a file that is named on the command line is ever run: a run, a plan or a checkpoint keeps the name and the sha256
of the files it was made with (`qed.provenance`), which have to be named again for whatever continues it.
"""

from __future__ import annotations

import hashlib
import re
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from ..provenance import imported, record_import
from ..rules import RULES, Rule
from . import RECIPES
from .paper import ARMS

# The tables that a file may add rows to: what a row is called, and what one has to be.
TABLES: dict[str, tuple[dict[str, Any], str]] = {
    "rule": (RULES, "a Rule"),
    "arm": (ARMS, "a title"),
    "recipe": (RECIPES, "a function that returns a TrainConfig"),
}
FILES: list[Path] = []  # that this process has run, in order; processes that it starts run them too
NAME = re.compile(r"\w[\w.-]*")  # names of arms are separated by commas, and are names of folders


def import_file(path: Path) -> None:
    """Run a Python file that adds rows to `RULES`, `ARMS` or `RECIPES`, and record its sha256 with all later results.

    ValueError, and nothing is added, if the file fails or changes a row that was there: a name means one thing.
    """
    try:
        source = path.read_bytes()
    except OSError as error:
        raise ValueError(f"--import: expected a Python file, got {path}: {error.strerror}") from error
    sha256 = hashlib.sha256(source).hexdigest()
    if imported().get(path.name) == sha256:
        return  # it has been run
    if path.name in imported():
        raise ValueError(f"--import: expected files of different names and contents, got another {path.name}: {path}")
    before = {kind: dict(table) for kind, (table, _) in TABLES.items()}
    module = ModuleType(f"qed_imported_{path.stem}")  # no module that there is has such a name
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    try:
        _run(source, path, module)
        _check_rows(before, path)
    except ValueError:
        del sys.modules[module.__name__]
        for kind, (table, _) in TABLES.items():
            table.clear()
            table.update(before[kind])
        raise
    record_import(path.name, sha256)
    FILES.append(path)


def _run(source: bytes, path: Path, module: ModuleType) -> None:
    try:
        exec(compile(source, str(path), "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
        where = f"{path}, line {line}" if line else f"{path}"
        raise ValueError(f"--import: {where}: {type(error).__name__}: {error}") from error


def _check_rows(before: dict[str, dict[str, Any]], path: Path) -> None:
    """Refuse changed rows, and new ones that are something else or that no command could name."""
    for kind, (table, expected) in TABLES.items():
        for name, row in before[kind].items():
            if table.get(name) is not row:
                raise ValueError(f"--import: {path} changes the {kind} {name!r}; expected one with a name of its own")
        for name, row in table.items():
            right = {"rule": isinstance(row, Rule), "arm": isinstance(row, str), "recipe": callable(row)}[kind]
            if not right:
                raise ValueError(f"--import: {path}: expected {expected} for the {kind} {name!r}, got {row!r}")
            if not isinstance(name, str) or not NAME.fullmatch(name):
                raise ValueError(
                    f"--import: {path}: expected a {kind}'s name of letters, digits, _, . and -, got {name!r}"
                )
