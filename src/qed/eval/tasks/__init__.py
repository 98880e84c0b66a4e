"""The table of tasks. A module of this package has the rows of its tasks in `TASKS`, and is found by being here."""

from __future__ import annotations

import importlib
import pkgutil
from typing import TypeVar

from ...choices import check_choice
from ..task import NeedleTask, Task

Kind = TypeVar("Kind", bound=Task)


def _collected() -> dict[str, Task]:
    """The rows of all modules by name, those of needle tasks first. A module without rows helps another one."""
    tasks: dict[str, Task] = {}
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        for task in getattr(importlib.import_module(module.name), "TASKS", ()):
            if task.name in tasks:
                raise ValueError(f"{module.name}: expected a name that no other task has, got {task.name!r}")
            tasks[task.name] = task
    return dict(sorted(tasks.items(), key=lambda item: not isinstance(item[1], NeedleTask)))


TASKS = _collected()


def of_kind(kind: type[Kind]) -> dict[str, Kind]:
    """The tasks of a class, by name, in the order of the table."""
    return {name: task for name, task in TASKS.items() if isinstance(task, kind)}


def reading(option: str) -> list[str]:
    """Names of the tasks that read a file which an option names: "words", "essays" or "data"."""
    return [name for name, task in TASKS.items() if option in task.inputs]


def named(name: str, kind: type[Kind], option: str = "--task") -> Kind:
    """The task of a name.

    Args:
        name: as --task has it.
        kind: the class that it must be of; `Task` for any.
        option: what the error of an unknown name begins with.
    """
    known = of_kind(kind)
    check_choice(option, name, known)
    return known[name]
