"""Where the numbers of a run go while it trains: into metrics.jsonl always, and wherever `--set loggers=wandb` says.

A logger is an object with the three methods of `Logger`. `LOGGERS` has a maker for each, under the name by which a run
asks for it. Everything that reads a run reads metrics.jsonl, so a run ends if that cannot be written. Any other logger
that fails during a run is left out from then on, and the run says so.

A run that was killed repeats the steps after its last checkpoint, to the same numbers. So a logger is told the first
step that it will get; what it has of that step and of later ones is replaced, or gets the same numbers again.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ..choices import check_choice
from ..files import write_text
from .metrics import read_metrics

ALWAYS = "jsonl"
EXTRAS = ("tensorboard", "trackio", "wandb")  # loggers whose package is installed by the extra of the same name


@dataclass(frozen=True)
class LoggedRun:
    """What a logger is told about the run that begins or is resumed.

    Attributes:
        config: the run's configuration, as its config.json has it.
        folder: the run's folder.
        first_step: the first step that will be logged; 0 unless the run is resumed.
        steps: the number of steps of the whole run.
        report: prints a message for the user.
    """

    config: dict[str, Any]
    folder: Path
    first_step: int
    steps: int
    report: Callable[[str], object]

    @property
    def id(self) -> str:
        """A name that no other run has. It is kept in the run's folder, so that a resumed run has it again."""
        path = self.folder / "run_id"
        if not path.exists():
            write_text(path, f"{secrets.token_hex(4)}\n")
        return path.read_text().strip()


class Logger(Protocol):
    """What a logger can do. It is made before anything is written, and may then only import what it needs."""

    def start(self, run: LoggedRun) -> None:
        """Begin a run, or go on with it where `run.first_step` is not 0."""

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Take the values of a step, as a line of metrics.jsonl has them; `numbers` makes plain numbers of them."""

    def finish(self) -> None:
        """End, or pause where the run will be resumed: nothing that was logged may be lost."""


def numbers(values: dict[str, Any]) -> dict[str, float]:
    """Return all numbers among the values of a step by name: {"strength": {"0": 0.1}} becomes {"strength/0": 0.1}.

    Values of heads are numbered, and ranges are named least, mean and most. What a step does not have is left out.
    """
    return dict(_flat(values))


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}/")
        elif isinstance(value, list):
            labels = range(len(value)) if prefix.startswith("strength_by_head") else ("least", "mean", "most")
            yield from zip((f"{prefix}{name}/{x}" for x in labels), value, strict=True)
        elif isinstance(value, int | float):
            yield prefix + name, float(value)


class JSONL:
    """metrics.jsonl. A resumed run first drops the lines after its checkpoint, and damaged ones."""

    def start(self, run: LoggedRun) -> None:
        """Open the file, and report every damaged line that it has."""
        path = run.folder / "metrics.jsonl"
        rows, problems = read_metrics(path) if path.exists() else ([], [])
        for problem in problems:
            run.report(problem)
        kept = [json.dumps(row) + "\n" for row in rows if row["step"] < run.first_step]
        write_text(path, "".join(kept))
        self.file = path.open("a")

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Append a step's line."""
        self.file.write(json.dumps({"step": step} | values) + "\n")
        self.file.flush()

    def finish(self) -> None:
        """Flush the file to disk and close it."""
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()


class TensorBoard:
    """Event files in the run's folder `tensorboard`."""

    def __init__(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.open = SummaryWriter

    def start(self, run: LoggedRun) -> None:
        """Begin a file. TensorBoard then hides what earlier files have of the steps that are repeated."""
        self.writer = self.open(str(run.folder / "tensorboard"), purge_step=run.first_step or None)

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Write every number of a step."""
        for name, value in numbers(values).items():
            self.writer.add_scalar(name, value, step)

    def finish(self) -> None:
        """Flush and close the event file."""
        self.writer.close()


class Wandb:
    """A run of Weights & Biases, with its files in the run's folder `wandb`; WANDB_MODE=offline keeps it there."""

    def __init__(self) -> None:
        import wandb

        self.open = wandb.init

    def start(self, run: LoggedRun) -> None:
        """Begin a run there, or go on with it. Its name there is that of the recipe, and its id is the run's own."""
        self.run = self.open(
            project=os.environ.get("WANDB_PROJECT", "qed"),
            id=run.id,
            name=run.config["name"],
            config=run.config,
            dir=str(run.folder),
            resume="allow",
        )

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Send every number of a step; those of a step that it has had are the same, and it drops them."""
        self.run.log(numbers(values), step=step)

    def finish(self) -> None:
        """Send what has not been sent, and end."""
        self.run.finish()


class Trackio:
    """A run of trackio, which keeps it where `trackio show` finds it."""

    def __init__(self) -> None:
        import trackio

        self.module = trackio

    def start(self, run: LoggedRun) -> None:
        """Begin a run there, or go on with it. Runs are told apart by their names there, so the id is part of it."""
        self.module.init(
            project=os.environ.get("TRACKIO_PROJECT", "qed"),
            name=f"{run.config['name']}-{run.id}",
            config=run.config,
            resume="allow",
        )

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Store every number of a step."""
        self.module.log(numbers(values), step=step)

    def finish(self) -> None:
        """Store what has not been stored, and end."""
        self.module.finish()


LOGGERS: dict[str, Callable[[], Logger]] = {
    ALWAYS: JSONL,
    "tensorboard": TensorBoard,
    "trackio": Trackio,
    "wandb": Wandb,
}


def make(names: str) -> dict[str, Logger]:
    """Make the loggers of these names, which are separated by commas, and that of metrics.jsonl. Nothing is written.

    ValueError for a name that is not known, ImportError for a logger whose package is not installed.
    """
    given = [name.strip() for name in names.split(",")]
    for name in given:
        check_choice("loggers", name, LOGGERS, "; `--import FILE` adds those of a file of yours")
    made: dict[str, Logger] = {}
    for name in dict.fromkeys([ALWAYS, *given]):
        try:
            made[name] = LOGGERS[name]()
        except ImportError as error:
            how = f"; pip install 'qed-attention[{name}]' installs it" if name in EXTRAS else ""
            raise ImportError(f"loggers: {name} needs a package that cannot be imported: {error}{how}") from error
    return made


class Loggers:
    """All loggers of a run together."""

    def __init__(self, names: str):
        """Make the loggers of these names, separated by commas, as `make` does."""
        self.made = make(names)
        self.running: dict[str, Logger] = {}
        self.report: Callable[[str], object] = print

    def start(self, run: LoggedRun) -> None:
        """Start all of them; only that of metrics.jsonl if no step is left. ValueError for one that cannot start."""
        self.report = run.report
        for name, logger in self.made.items():
            if name != ALWAYS and run.first_step == run.steps:
                continue
            try:
                logger.start(run)
            except Exception as error:
                self.finish()
                if name == ALWAYS:
                    raise
                raise ValueError(f"loggers: {name} cannot start: {error}") from error
            self.running[name] = logger

    def log(self, row: dict[str, Any]) -> None:
        """Give a step's row, which says the step, to all that were started."""
        values = {name: value for name, value in row.items() if name != "step"}
        for name, logger in list(self.running.items()):
            self._guarded(name, partial(logger.log, row["step"], values))

    def finish(self) -> None:
        """Finish all that were started."""
        for name, logger in reversed(list(self.running.items())):  # metrics.jsonl, whose failure ends this, is last
            self._guarded(name, logger.finish)
        self.running.clear()

    def _guarded(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            if name == ALWAYS:
                raise
            del self.running[name]
            self.report(f"the logger {name} failed and is left out from here on; metrics.jsonl goes on: {error}")
