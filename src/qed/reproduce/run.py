"""Everything in order: data, frozen prompts, one process for each training and its measurements, the report.

    OUT/plan.json       what is reproduced
    OUT/state.json      what is done, for programs
    OUT/data            the training data; OUT/validation has those for validation, OUT/prompts the frozen prompts
    OUT/runs/NAME       a training and its results, as `qed report` reads them
    OUT/logs/NAME.log   what the process of that training printed
    OUT/report          the page, tables and figures

The same command resumes where it stopped: finished stages are not done again.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rich.console import Console

from .. import locks
from ..analysis.results import runs
from ..choices import check_choice
from ..data import sources, tokenization
from ..eval.expressing import warn
from ..eval.prompts import frozen
from ..eval.tasks import reading
from ..files import read_json, remove_leftovers, write_json
from ..provenance import check_imported
from ..recipes.importing import FILES
from ..report.arm_page import write_arms
from ..report.conclusions import learned
from ..report.page import write
from ..train.loop import STOPPED
from ..train.step import tokens_per_second
from .board import Board
from .corpus import make_data
from .looking import look_inside_one
from .plan import Plan, Unit, other_fields
from .progress import accuracies, arms_table, show_state, write_state
from .unit import ELSEWHERE, finished, options

FAILED = 1
GRACE = 120  # seconds that a unit has for saving before it is killed


def _write_plan(plan: Plan, out: Path) -> None:
    """Write plan.json. A folder holds one plan, to which arms and seeds may be added."""
    path = out / "plan.json"
    if path.exists():
        before = read_json(path)
        if not isinstance(before, dict):
            raise ValueError(f"{path}: expected the plan of a reproduction, got {str(before)[:100]}")
        changed = other_fields(before, json.loads(plan.to_json()))
        if changed:
            raise ValueError(f"--out: {out} holds a reproduction with other {', '.join(changed)}; use another folder")
        check_imported(before.get("imported", {}), out)
    write_json(path, json.loads(plan.to_json()))


def _check(plan: Plan, out: Path, only: list[str]) -> None:
    """Raise ValueError for settings that no training takes and for missing files, before anything is written."""
    for name in only:
        check_choice("--only", name, [unit.name for unit in plan.units])
    for unit in plan.units:
        plan.config(unit, out)
    among_essays = [task for task in plan.needles if task in reading("essays")]
    if among_essays and plan.essays is None:
        raise ValueError(f"--essays: expected a file, since {among_essays[0]} hides its needles in essays, got none")
    if plan.source and not (out / "data" / "index.json").exists():
        sources.check(plan.source)
        if not tokenization.is_trained(plan.tokenizer):
            tokenization.load(plan.tokenizer)
    if plan.validation and not (out / "validation" / "index.json").exists():
        sources.check(plan.validation)
    given = {"--words": plan.words, "--essays": plan.essays}
    given |= {f"--data {task}": path for task, path in plan.recall.items()}
    for option, path in given.items():
        if path is not None and not Path(path).exists():
            raise ValueError(f"{option}: expected a file, got {path}, which does not exist")


def _turn(out: Path, name: str, console: Console) -> AbstractContextManager[locks.Lock]:
    """A lock of the folder. Who comes second waits for it."""
    return locks.held(out, name, wait=True, say=lambda text: console.print(text, markup=False))


def share(plan: Plan, out: Path, console: Console) -> None:
    """Make what all trainings of a folder share: the plan, the data and the prompts.

    One process makes them. Others wait for it and find everything there.

    Args:
        plan: the reproduction.
        out: its folder.
        console: where progress is printed.
    """
    with _turn(out, "shared", console):
        for folder in (out, out / "prompts"):
            remove_leftovers(folder)
        _write_plan(plan, out)
        make_data(plan, out, console)
        if plan.needles:
            _make_prompts(plan, out, console)


def _make_prompts(plan: Plan, out: Path, console: Console) -> None:
    encoder = tokenization.load(str(out / "data" / "tokenizer.json"))
    warn([*plan.needles, *plan.recall], options(plan, out), encoder, console)
    for task in plan.needles:
        for length in plan.lengths:
            frozen(task, length, options(plan, out), encoder, out, console)


def say_hours(plan: Plan, out: Path, device: str, console: Console) -> None:
    """Print how many device hours the trainings will take, measured on a few steps of this model on this device.

    Args:
        plan: the reproduction.
        out: its folder.
        device: where the trainings will run.
        console: where the hours are printed.
    """
    config = plan.config(plan.units[0], out)
    rows = config.micro_tokens // config.sequence if device.startswith("cuda") else 1
    with console.status("measuring the speed of training"):
        rate = tokens_per_second(
            config.model_config(),
            device,
            shape=(rows, config.sequence),
            compiled=config.compile and device.startswith("cuda"),
        )
    hours = len(plan.units) * config.total_tokens / rate / 3600
    console.print(
        f"{len(plan.units)} trainings of {config.total_tokens:,} tokens at {rate:,.0f} tokens/s, measured here: "
        f"{hours:,.1f} device hours, not counting evaluation"
    )


class Units:
    """The processes of units, a few at a time."""

    def __init__(self, plan: Plan, out: Path, device: str, jobs: int, console: Console):
        self.plan, self.out, self.device, self.jobs, self.console = plan, out, device, jobs, console
        self.running: dict[Unit, subprocess.Popen[bytes]] = {}
        self.elsewhere: list[Unit] = []  # units that another process is working on
        self.stopping = False

    def start(self, unit: Unit) -> None:
        """Start the process of a unit, with its share of the cores and a log of its own."""
        log = self.out / "logs" / f"{unit.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        threads = str(max(1, (os.cpu_count() or 1) // self.jobs))
        cores = {"OMP_NUM_THREADS": threads, "TORCHINDUCTOR_COMPILE_THREADS": threads}
        words = [str(self.out), unit.name, self.device, *map(str, FILES)]
        command = [sys.executable, "-u", "-m", "qed.reproduce.unit", *words]
        with log.open("ab") as file:
            self.running[unit] = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=os.environ | cores
            )

    def stop(self, *_: Any) -> None:
        """Ask all running units to stop. Trainings save a checkpoint first."""
        self.stopping = True
        for process in self.running.values():
            process.send_signal(signal.SIGTERM)

    def run(self, units: list[Unit], seconds: float | None) -> list[Unit]:
        """Run these units until all have ended or the time is over, and return those that failed."""
        failed: list[Unit] = []
        wanted = [x for x in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if signal.getsignal(x) != signal.SIG_IGN]
        handlers = {number: signal.signal(number, self.stop) for number in wanted}
        try:
            with Board(self.plan, self.out, self.jobs, self.console) as board:
                self._run(list(units), failed, board, math.inf if seconds is None else time.monotonic() + seconds)
        except SystemExit:  # rich exits when nobody reads what it prints any more
            self.stop()
        finally:
            self._end()
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return failed

    def _run(self, waiting: list[Unit], failed: list[Unit], board: Board, until: float) -> None:
        while (waiting and not self.stopping) or self.running:
            while waiting and len(self.running) < self.jobs and not self.stopping:
                self.start(waiting.pop(0))
            time.sleep(0.5)
            board.update(self.running, waiting)
            for unit, process in list(self.running.items()):
                if process.poll() is not None:
                    del self.running[unit]
                    if process.returncode == 0:
                        board.ended(unit, "done")
                    elif process.returncode == ELSEWHERE:
                        self.elsewhere.append(unit)
                        board.ended(unit, "left to another process")
                    elif self.stopping:
                        board.ended(unit, "stopped")
                    else:
                        failed.append(unit)
                        board.ended(unit, "failed", style="red")
                    write_state(self.plan, self.out)
            if time.monotonic() > until and not self.stopping:
                self.stop()

    def _end(self) -> None:
        """Wait until everything that still runs has saved and stopped."""
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                process.kill()


def reproduce(
    plan: Plan,
    out: Path,
    *,
    device: str,
    jobs: int,
    only: list[str],
    minutes: float | None,
    console: Console,
    beside: Path | None = None,
) -> int:
    """Do as much of a reproduction as time allows, write the report, and return the exit status.

    Args:
        plan: what is reproduced.
        out: the folder for all of it.
        device: where models run.
        jobs: trainings that run at the same time.
        only: names of units to do now; all of them if it is empty.
        minutes: after which units are asked to stop.
        console: where progress and results are printed.
        beside: a folder of kept results, with one for each scale, whose comparable trainings the report of settings
            has too.
    """
    start = time.monotonic()
    _check(plan, out, only)
    share(plan, out, console)
    waiting = [
        unit
        for unit in plan.units
        if list(finished(out, unit)) != plan.stages(unit) and (not only or unit.name in only)
    ]
    units = Units(plan, out, device, jobs, console)
    left = None if minutes is None else 60 * minutes - (time.monotonic() - start)
    failed = units.run(waiting, left) if waiting else []
    _explain(failed, units.elsewhere, out, console)
    show_state(plan, out, console)
    write_state(plan, out)
    if units.stopping:
        console.print("stopped; the same command resumes where this one stopped", style="yellow")
        return STOPPED
    if not any((out / "runs").rglob("config.json")):
        return FAILED
    with _turn(out, "report", console):
        path = _report_settings(plan, out, beside, console) if plan.settings else _report(plan, out, device, console)
    write_state(plan, out)
    minutes_taken = (time.monotonic() - start) / 60
    console.print(f"done in {minutes_taken:.1f} minutes; the report is {path.resolve().as_uri()}", markup=False)
    return FAILED if failed else STOPPED if units.elsewhere else 0


def _report(plan: Plan, out: Path, device: str, console: Console) -> Path:
    """Write the page about the paper's question, print what was found, and return the page's path."""
    look_inside_one(plan, out, device, console)
    with console.status("writing the report"):
        path = write(out / "runs", out / "report")
    reported = runs(out / "runs")
    console.print(accuracies(reported))
    for text in learned(reported):
        console.print(text, style="bold")
    return path


def _report_settings(plan: Plan, out: Path, beside: Path | None, console: Console) -> Path:
    """Write the page about all arms, print its first table, and return the page's path."""
    kept = [] if beside is None else [beside / plan.scale]
    with console.status("writing the report"):
        path = write_arms([out, *(x for x in kept if x.is_dir())], out / "report", console)
    console.print(arms_table(out, plan.scale))
    return path


def _explain(failed: list[Unit], elsewhere: list[Unit], out: Path, console: Console) -> None:
    """Print why units are not finished, from the ends of their logs."""
    for unit in failed:
        log = out / "logs" / f"{unit.name}.log"
        console.print(f"{unit.name} failed; the end of {log}:", style="red", markup=False)
        console.print("\n".join(log.read_text(errors="replace").splitlines()[-12:]), markup=False, highlight=False)
    for unit in elsewhere:
        said = (out / "logs" / f"{unit.name}.log").read_text(errors="replace").splitlines()[-1:]
        console.print(f"{unit.name} is left to another process: {' '.join(said)}", style="yellow", markup=False)
