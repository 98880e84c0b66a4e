"""lm-eval's own tasks, by their names there, with examples from files where a user gives them."""

from __future__ import annotations

import contextlib
import io
import json
import logging
from collections.abc import Iterator
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..records import numbered_lines, text_digest
from ..task import RecallTask, checked_golds
from ..tasks import of_kind
from .hub import reason
from .suites import MEMBERS

if TYPE_CHECKING:
    from ..options import Options


@lru_cache
def task_manager() -> Any:
    """lm-eval's index of its tasks, which takes seconds to read."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps what lm-eval prints, logs and draws while it makes prompts and scores from the terminal."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


def check_names(names: list[str]) -> None:
    """Raises ValueError for a name that lm-eval does not have, with the nearest."""
    known = set(task_manager().all_tasks)
    for name in names:
        if name not in known:
            nearest = ", ".join(get_close_matches(name, known)) or "names of lm-eval's tasks"
            raise ValueError(f"--task: expected {nearest}, got {name!r}")


def rows_of(name: str, path: Path) -> list[dict[str, Any]]:
    """The examples in a task's file, each with the fields that the task reads."""
    rows = []
    for number, row in numbered_lines(path):
        where = f"{path}:{number}"
        for field, kind in MEMBERS[name].fields.items() if name in MEMBERS else ():
            if not isinstance(row.get(field), kind):
                wanted = kind.__name__ if isinstance(kind, type) else " or ".join(x.__name__ for x in kind)
                said = f"{type(row[field]).__name__} {row[field]!r:.40}" if field in row else "none"
                raise ValueError(f"{where}: expected {field} of {name}, of type {wanted}, got {said}")
        if name in of_kind(RecallTask):
            checked_golds((row.get("value"),), where)
        rows.append(row)
    if not rows:
        raise ValueError(f"{path}: expected examples of {name}, got none")
    return rows


def built(names: list[str], options: Options) -> dict[str, Any]:
    """lm-eval's tasks of these names, or of groups of these names, with their examples.

    Files are read and checked first. Then every data set that has to come from the hub is asked for, and if any cannot
    be had, one error names all of them.
    """
    given = {name: rows_of(name, options.data[name]) for name in names if name in options.data}
    tasks: dict[str, Any] = {}
    missing: dict[str, Exception] = {}
    for name in names:
        try:
            with quiet(), _examples(given.get(name)):
                loaded = task_manager().load([name])["tasks"]
        except Exception as error:
            if name in given:  # whatever a template or a function of lm-eval raises for an example it cannot read
                said = f"{type(error).__name__}: {error}"
                raise ValueError(
                    f"{options.data[name]}: expected examples of {name}, got one without: {said}"
                ) from error
            missing[name] = error
            continue
        if name in given:
            with quiet():
                _check_examples(loaded[name], options.data[name])
        tasks |= loaded
    if missing:
        first = next(iter(missing.values()))
        raise ValueError(
            f"--data: expected NAME=FILE, or the data set from the hub, for {', '.join(missing)}; got neither "
            f"({reason(first)})"
        )
    return tasks


def _check_examples(task: Any, path: Path) -> None:
    """Raises ValueError for an example of a file that has no right answer among its choices, or cannot be asked."""
    for number, example in enumerate(task.eval_docs, 1):
        where = f"{path}: example {number}"
        try:
            text, target = task.doc_to_text(example), task.doc_to_target(example)
            choices = task.doc_to_choice(example) if task.config.doc_to_choice is not None else None
        except Exception as error:  # as above
            raise ValueError(f"{where}: lm-eval cannot ask it: {type(error).__name__}: {error}") from error
        if choices is None:
            continue
        gold = text if task.multiple_input else target
        right = gold in choices if isinstance(gold, str) else 0 <= gold < len(choices)
        if not right:
            raise ValueError(f"{where}: expected the right answer among its {len(choices)} choices, got {gold!r}")


@contextlib.contextmanager
def _examples(rows: list[dict[str, Any]] | None) -> Iterator[None]:
    """While one task is built, lets lm-eval read these examples in place of the hub's data set, whatever its split."""
    import datasets

    if rows is None:
        yield
        return
    examples = datasets.Dataset.from_list(rows)
    found = datasets.DatasetDict(dict.fromkeys(("train", "validation", "test"), examples))
    whole = datasets.load_dataset
    datasets.load_dataset = lambda *_, **__: found
    try:
        yield
    finally:
        datasets.load_dataset = whole


def identity(task: Any, samples: int | None) -> str:
    """The sha256 of the examples that a task asks, the first `samples` of them if that is given."""
    with quiet():
        examples = list(task.eval_docs)[:samples]
    return text_digest(json.dumps(examples, sort_keys=True, default=str))
