"""Everything in order: data, frozen prompts, one process for each training and its measurements, the report.

    OUT/plan.json      what is reproduced
    OUT/state.json     what is done, for programs
    OUT/data, validation, prompts
    OUT/runs/NAME      as `qed report` reads it; OUT/logs/NAME.log is what its process said
    OUT/report         the page, tables and figures

The same command again goes on: finished stages of finished trainings are not done again.
"""

from __future__ import annotations

import dataclasses
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

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from .. import locks
from ..analysis.conclusions import learned
from ..analysis.report import write
from ..analysis.results import Run, runs
from ..analysis.strength import SCALES
from ..analysis.tables import TITLES, arms_of, length_title, main_task, name_of, needle_lengths
from ..bench_train import ours
from ..data import sources, tokenization
from ..data.practice import Practice
from ..data.prepare import prepare
from ..eval.prompts import frozen
from ..eval.tasks import reading
from ..files import read_json, remove_leftovers, write_json
from ..train.loop import STOPPED
from ..train.metrics import read_row
from .plan import ALL_STAGES, Plan, Unit
from .unit import ELSEWHERE, finished, options

FAILED = 1
FREE = {"arms", "seeds", "jobs"}  # of a plan: they change nothing about a training
LINE_EVERY = 30  # seconds
GRACE = 120  # seconds in which a unit that is to stop saves


def begin(plan: Plan, out: Path) -> None:
    """A folder holds one plan, to which arms and seeds may be added."""
    path = out / "plan.json"
    if path.exists():
        before = read_json(path)
        now = json.loads(plan.to_json())
        if not isinstance(before, dict):
            raise ValueError(f"{path}: expected the plan of a reproduction, got {str(before)[:100]}")
        usual = {x.name: x.default for x in dataclasses.fields(Plan)}  # of what an earlier version did not write
        before = json.loads(json.dumps(usual | before, default=str))
        changed = sorted(name for name in now if before[name] != now[name] and name not in FREE)
        if changed:
            raise ValueError(f"--out: {out} holds a reproduction with other {', '.join(changed)}; use another folder")
    write_json(path, json.loads(plan.to_json()))


def check(plan: Plan, out: Path, only: list[str]) -> None:
    """Before anything runs or is written: ValueError for settings that no training takes, and for missing files."""
    unknown = set(only) - {unit.name for unit in plan.units}
    if unknown:
        names = ", ".join(unit.name for unit in plan.units)
        raise ValueError(f"--only: expected some of {names}, got {', '.join(sorted(unknown))}")
    for unit in plan.units:
        plan.config(unit, out)
    among_essays = [task for task in plan.needles if task in reading("essays")]
    if among_essays and plan.essays is None:
        raise ValueError(f"--essays: expected a file, since {among_essays[0]} hides its needles in essays, got none")
    if not (out / "data" / "index.json").exists():
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
    """A lock of the folder, waited for."""
    return locks.held(out, name, wait=True, say=lambda text: console.print(text, markup=False))


def share(plan: Plan, out: Path, console: Console) -> None:
    """What all trainings of a folder have in common, made by one process: others wait for it and find it there."""
    with _turn(out, "shared", console):
        for folder in (out, out / "prompts"):
            remove_leftovers(folder)
        begin(plan, out)
        make_data(plan, out, console)
        make_prompts(plan, out, console)


def make_data(plan: Plan, out: Path, console: Console) -> None:
    held = plan.held_out
    prepare(
        plan.source,
        tokenizer=plan.tokenizer,
        out=out / "data",
        limit=plan.limit,
        part=f"rest:{held}" if held else "",
        mix=Practice(share=plan.practice) if plan.practice else None,
        console=console,
    )
    prepare(
        plan.validation or plan.source,
        tokenizer=str(out / "data" / "tokenizer.json"),
        out=out / "validation",
        limit=plan.limit and max(1, plan.limit // max(1, held)),
        part=f"held:{held}" if held else "",
        console=console,
    )


def make_prompts(plan: Plan, out: Path, console: Console) -> None:
    encoder = tokenization.load(str(out / "data" / "tokenizer.json"))
    for task in plan.needles:
        for length in plan.lengths:
            frozen(task, length, options(plan, out), encoder, out, console)


def say_hours(plan: Plan, out: Path, device: str, console: Console) -> None:
    """Device hours that the trainings will take, from a few steps of this model on this device."""
    config = plan.config(plan.units[0], out)
    rows = config.micro_tokens // config.sequence if device.startswith("cuda") else 1
    with console.status("measuring the speed of training"):
        step = ours(config.model_config(), device, config.compile and device.startswith("cuda"))
        step.rows = torch.randint(3, config.model_config().vocab_size, (rows, config.sequence + 1), device=device)
        times = []
        for _ in range(6 if device.startswith("cuda") else 2):
            start = time.perf_counter()
            step()
            if device.startswith("cuda"):
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    del step
    if device.startswith("cuda"):
        torch.cuda.empty_cache()  # the trainings are in processes of their own
    rate = rows * config.sequence / min(times)
    hours = len(plan.units) * config.total_tokens / rate / 3600
    console.print(
        f"{len(plan.units)} trainings of {config.total_tokens:,} tokens at {rate:,.0f} tokens/s, measured here: "
        f"{hours:,.1f} device hours, evaluation not counted"
    )


def write_state(plan: Plan, out: Path) -> None:
    """state.json: what is done."""
    found = {
        "scale": plan.scale,
        "data": (out / "validation" / "index.json").exists(),
        "units": {
            unit.name: {
                "stages": plan.stages(unit),
                "done": (done := finished(out, unit)),
                "finished": list(done) == plan.stages(unit),
            }
            for unit in plan.units
        },
        "report": (out / "report" / "report.html").exists(),
    }
    write_json(out / "state.json", found)


def show_state(plan: Plan, out: Path, console: Console) -> None:
    stages = [x for x in ALL_STAGES if any(x in plan.stages(unit) for unit in plan.units)]
    table = Table("", *stages, title=f"{out}: seconds of what is done")
    for unit in plan.units:
        done, wanted = finished(out, unit), plan.stages(unit)
        cells = [f"{done[x]:.0f}" if x in done else "" if x in wanted else "–" for x in stages]
        table.add_row(unit.name, *cells)
    console.print(table)


class Units:
    """Processes of units, so many at a time."""

    def __init__(self, plan: Plan, out: Path, device: str, jobs: int, console: Console):
        self.plan, self.out, self.device, self.jobs, self.console = plan, out, device, jobs, console
        self.running: dict[Unit, subprocess.Popen[bytes]] = {}
        self.said: dict[Unit, tuple[str, float]] = {}
        self.elsewhere: list[Unit] = []
        self.stopping = False

    def start(self, unit: Unit) -> None:
        log = self.out / "logs" / f"{unit.name}.log"
        log.parent.mkdir(exist_ok=True)
        threads = str(max(1, (os.cpu_count() or 1) // self.jobs))
        cores = {"OMP_NUM_THREADS": threads, "TORCHINDUCTOR_COMPILE_THREADS": threads}
        command = [sys.executable, "-u", "-m", "qed.reproduce.unit", str(self.out), unit.name, self.device]
        with log.open("ab") as file:
            self.running[unit] = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=os.environ | cores
            )

    def stop(self, *_: Any) -> None:
        """Trainings save a checkpoint first."""
        self.stopping = True
        for process in self.running.values():
            process.send_signal(signal.SIGTERM)

    def run(self, units: list[Unit], seconds: float | None) -> list[Unit]:
        """Those that failed."""
        failed: list[Unit] = []
        wanted = [x for x in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if signal.getsignal(x) != signal.SIG_IGN]
        handlers = {number: signal.signal(number, self.stop) for number in wanted}
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
        try:
            with Progress(*columns, TimeElapsedColumn(), console=self.console) as bars:
                self._run(list(units), failed, bars, math.inf if seconds is None else time.monotonic() + seconds)
        except SystemExit:  # rich leaves the program when nobody can read what it prints any more
            self.stop()
        finally:
            self._end()
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return failed

    def _run(self, waiting: list[Unit], failed: list[Unit], bars: Progress, until: float) -> None:
        shown: dict[Unit, TaskID] = {}
        while (waiting and not self.stopping) or self.running:
            while waiting and len(self.running) < self.jobs and not self.stopping:
                unit = waiting.pop(0)
                self.start(unit)
                shown[unit] = bars.add_task(unit.name, total=1.0)
            time.sleep(0.5)
            for unit, process in list(self.running.items()):
                stage, share = self.progress(unit)
                bars.update(shown[unit], description=f"{unit.name}: {stage}", completed=share)
                self.say(unit, stage, share)
                if process.poll() is not None:
                    del self.running[unit]
                    if process.returncode == 0:
                        bars.update(shown[unit], description=f"{unit.name}: done", completed=1.0)
                    elif process.returncode == ELSEWHERE:
                        self.elsewhere.append(unit)
                        bars.update(shown[unit], description=f"{unit.name}: elsewhere")
                    elif not self.stopping:
                        failed.append(unit)
                        bars.update(shown[unit], description=f"[red]{unit.name}: failed[/red]")
                    write_state(self.plan, self.out)
            if time.monotonic() > until and not self.stopping:
                self.stop()

    def _end(self) -> None:
        """Whatever still runs saves and stops."""
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                process.kill()

    def say(self, unit: Unit, stage: str, share: float) -> None:
        """Lines where there is no terminal to draw bars on."""
        before, when = self.said.get(unit, ("", 0.0))
        if stage and not self.console.is_terminal and (stage != before or time.monotonic() - when > LINE_EVERY):
            self.console.print(f"{unit.name}: {stage} {share:.0%}", markup=False, highlight=False)
            self.said[unit] = (stage, time.monotonic())

    def progress(self, unit: Unit) -> tuple[str, float]:
        """The stage a unit is in, and how much of it is done, from its files."""
        done, run = finished(self.out, unit), self.out / "runs" / unit.name
        stage = next((x for x in self.plan.stages(unit) if x not in done), "")
        plan = self.plan
        if stage == "train":
            path = run / "metrics.jsonl"
            row = _last_line(path) if path.exists() else None
            return stage, 0.0 if row is None else (row["step"] + 1) / plan.config(unit, self.out).steps
        if stage == "eval":
            expected = len(plan.needles) * len(plan.lengths) + len(plan.recall) + 1
            return stage, len(list((run / "eval").glob("*.json"))) / (expected + 1)
        if stage == "off":
            found = len(list((run / "strength" / "0").glob("*.json")))
            return stage, found / (len(plan.needles) * len(plan.lengths) + 1)
        if stage == "strength":  # s = 1 is done, and 0 may be
            scales = [f"{scale:g}" for scale in SCALES if scale not in (0.0, 1.0)]
            found = sum(len(list((run / "strength" / scale).glob("*.json"))) for scale in scales)
            return stage, found / (len(scales) * len(plan.strength_lengths) + 1)
        return stage, 0.0


def _last_line(path: Path) -> dict[str, Any] | None:
    """Of a file that another process appends to; None while there is no whole line."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 16_384))
        whole = file.read().split(b"\n")[:-1]
    try:
        return read_row(whole[-1]) if whole else None
    except ValueError:
        return None


def accuracies(found: list[Run]) -> Table:
    """Of the main needle task, as the terminal shows it, in 80 columns."""
    task = main_task(found)
    lengths = needle_lengths(found, task)
    digits = 1 if len(lengths) <= 8 else 0
    table = Table(
        "", "seed", title=f"{TITLES[task]}: % right by context length", box=SIMPLE, pad_edge=False, padding=(0, 0, 0, 1)
    )
    for n in lengths:
        table.add_column(length_title(n), justify="right")
    for run in sorted(found, key=lambda run: (arms_of(found).index(run.arm), run.seed)):
        cells = [run.results.get(f"{task}-{n}") for n in lengths]
        shown = ["" if x is None else f"{100 * x.result['accuracy']:.{digits}f}" for x in cells]
        table.add_row(name_of(run.arm), str(run.seed), *shown)
    return table


def reproduce(
    plan: Plan, out: Path, *, device: str, jobs: int, only: list[str], minutes: float | None, console: Console
) -> int:
    """Go as far as time allows; the exit status."""
    start = time.monotonic()
    check(plan, out, only)
    share(plan, out, console)
    waiting = [
        unit
        for unit in plan.units
        if list(finished(out, unit)) != plan.stages(unit) and (not only or unit.name in only)
    ]
    units = Units(plan, out, device, jobs, console)
    left = None if minutes is None else 60 * minutes - (time.monotonic() - start)
    failed = units.run(waiting, left) if waiting else []
    for unit in failed:
        log = out / "logs" / f"{unit.name}.log"
        console.print(f"{unit.name} failed; the end of {log}:", style="red", markup=False)
        console.print("\n".join(log.read_text(errors="replace").splitlines()[-12:]), markup=False, highlight=False)
    for unit in units.elsewhere:
        said = (out / "logs" / f"{unit.name}.log").read_text(errors="replace").splitlines()[-1:]
        console.print(f"{unit.name} is left to another process: {' '.join(said)}", style="yellow", markup=False)
    show_state(plan, out, console)
    write_state(plan, out)
    if units.stopping:
        console.print("stopped; the same command goes on", style="yellow")
        return STOPPED
    if not any((out / "runs").glob("*/config.json")):
        return FAILED
    with _turn(out, "report", console), console.status("writing the report"):
        path = write(out / "runs", out / "report")
    write_state(plan, out)
    found = runs(out / "runs")
    console.print(accuracies(found))
    for text in learned(found):
        console.print(text, style="bold")
    console.print(f"{(time.monotonic() - start) / 60:.1f} minutes; the report: {path.resolve().as_uri()}", markup=False)
    return FAILED if failed else STOPPED if units.elsewhere else 0
