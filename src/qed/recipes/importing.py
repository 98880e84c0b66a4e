"""Rules, arms, recipes and loggers from a file of the user's: `--import my_arms.py` adds them to the package's own.

Only a file that is named on the command line is ever run: a run, a plan or a checkpoint keeps the name and the sha256
of the files it was made with (`qed.provenance`), which have to be named again for whatever continues it.
"""

from __future__ import annotations

import hashlib
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from ..provenance import imported, record_import
from ..rules import RULES, Rule
from ..train.loggers import LOGGERS
from . import RECIPES
from .paper import ARMS


class Table(NamedTuple):
    """A table that a file may add rows to, and what a row has to be: in words, and as far as it can be told."""

    rows: dict[str, Any]
    expected: str
    right: Callable[[Any], bool]


TABLES = {
    "rule": Table(RULES, "a Rule", lambda row: isinstance(row, Rule)),
    "arm": Table(ARMS, "a title", lambda row: isinstance(row, str)),
    "recipe": Table(RECIPES, "a function that returns a TrainConfig", callable),
    "logger": Table(LOGGERS, "a class or function that makes a Logger", callable),
}
FILES: list[Path] = []  # that this process has run, in order; processes that it starts run them too
NAME = re.compile(r"\w[\w.-]*")  # names of arms are separated by commas, and are names of folders


def import_file(path: Path) -> None:
    """Run a Python file that adds rows to the tables above, and record its sha256 with all later results.

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
    before = {kind: dict(table.rows) for kind, table in TABLES.items()}
    module = ModuleType(f"qed_imported_{path.stem}")  # no module that there is has such a name
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    try:
        _run(source, path, module)
        _check_rows(before, path)
    except ValueError:
        del sys.modules[module.__name__]
        for kind, table in TABLES.items():
            table.rows.clear()
            table.rows.update(before[kind])
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
    for kind, table in TABLES.items():
        for name, row in before[kind].items():
            if table.rows.get(name) is not row:
                raise ValueError(f"--import: {path} changes the {kind} {name!r}; expected one with a name of its own")
        for name, row in table.rows.items():
            if not table.right(row):
                raise ValueError(f"--import: {path}: expected {table.expected} for the {kind} {name!r}, got {row!r}")
            if not isinstance(name, str) or not NAME.fullmatch(name):
                raise ValueError(
                    f"--import: {path}: expected a {kind}'s name of letters, digits, _, . and -, got {name!r}"
                )
