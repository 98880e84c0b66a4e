"""`qed bench --tune`: searches launch settings for this machine's GPU at one width of heads, on request only.

Compiling takes most of the time, so all candidates are compiled first, by as many processes as there are cores. Then
one process has the GPU for itself: it times each candidate's kernel alone, with the memory of a whole forward and
backward pass, and compares the pass's results with those of the settings in use. A candidate that wins by more than the
noise must then give the same bits fifty times. At the end the winners are checked and timed together. A bad candidate
takes its process down; the next process goes on with the candidate after it.

What won goes into a file, beside what the file has for other widths. A process uses it after
`qed.use_settings(Path(FILE))`; every process does if the file is put into the package, beside
`kernels/recurrence/settings.py`, as `tuned/sm_<architecture>.json`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import torch
from rich.table import Table

from ..kernels.recurrence.settings import Settings, at_width, read_settings
from ..ops.routes import TRITON_WIDEST
from .measuring import Bench, GateError, Report
from .ops import Shape

ALL = "forward + backward"  # the task that times everything
WINS = 0.97  # of the time with the settings in use; a smaller gain is noise
SPILLED = 256  # numbers of a thread that may lie outside of registers; with more, a candidate is not timed
PATIENCE = 300  # seconds that a process may take; the task that it was at then is the next one's first
Task = dict[str, Any]  # a kernel and the settings to try it with
Answer = dict[str, Any]  # what a process found for a task, or {"failed": why}
Change = dict[str, int]


def candidates(kernel: str, width: int) -> list[Change]:
    """Return what is tried for a kernel. What does not fit the GPU is left out when it is compiled.

    Args:
        kernel: Its name, with ", cut" behind it for chunks that are cut.
        width: Columns of a head's keys and values.
    """
    if kernel in ("chunk_states", "state_gradients"):
        tiles = ((16, 4, (1, 2)), (32, 4, (1, 2, 3)), (64, 4, (1, 2, 3)), (64, 8, (1, 2)), (128, 8, (1, 2)))
        found = [{"BV": BV, "num_warps": w, "num_stages": stages} for BV, w, each in tiles for stages in each]
    elif kernel == "pair_gradients":
        found = [{"BV": BV, "num_warps": warps} for BV in (32, 64, 128, 256) for warps in (4, 8)]
    else:
        found = [{"BK": BK, "num_warps": warps} for BK in (16, 32, 64, 128) for warps in (4, 8)]
        if kernel.startswith("chunk_gradients"):  # its tiles have all of V beside those columns
            found = [x for x in found if x["BK"] < 128]
        # With fewer registers a multiprocessor has three or four programs of four warps instead of two.
        limits = ((32, 4, 128), (32, 4, 168), (64, 4, 128), (64, 4, 168), (64, 8, 128))
        if not kernel.endswith(", cut"):
            found += [{"BK": BK, "num_warps": warps, "maxnreg": most} for BK, warps, most in limits]
        if kernel == "chunk_gradients":  # wrong in some runs, as `settings.py` says, and a few checks may not see it
            found = [x for x in found if (x["BK"], x["num_warps"]) != (32, 4)]
    return [x for x in found if max(x.get("BK", 0), x.get("BV", 0)) <= max(width, 16)]


KERNELS = (
    "chunk_terms",
    "chunk_states",
    "state_gradients",
    "pair_gradients",
    "chunk_gradients",
    "chunk_terms, cut",
    "chunk_gradients, cut",
)


def tasks_of(width: int) -> list[Task]:
    """Return everything that is tried at a width: for each kernel first the settings in use."""
    return [
        {"kernel": kernel, "settings": {at_width(kernel, width, width): change} if change else {}}
        for kernel in KERNELS
        for change in ({}, *candidates(kernel, width))
    ]


def ask(way: str, tasks: list[Task], shape: Shape, device: str) -> list[Answer]:
    """Have a process work on tasks one after the other, and another one go on after a task that took it down, or with
    the task at which its time was up.

    Args:
        way: "compile" or "measure", functions of `tune_process.py`.
        tasks: What to work on.
        shape: The size of the problem.
        device: The GPU.
    """
    answers: list[Answer] = []
    code = f"from qed.bench import tune_process; tune_process.serve(tune_process.{way})"
    while len(answers) < len(tasks):
        job = {"shape": asdict(shape), "device": device, "tasks": tasks[len(answers) :]}
        is_late = False
        try:
            done = subprocess.run(
                [sys.executable, "-c", code], input=json.dumps(job), capture_output=True, text=True, timeout=PATIENCE
            )
            out, error = done.stdout, done.stderr
        except subprocess.TimeoutExpired as late:
            is_late, out, error = True, (late.stdout or b"").decode(), f"no answer in {PATIENCE} seconds"
        found = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        answers += found
        if len(found) < len(job["tasks"]) and not (is_late and found):
            answers.append({"failed": (error.strip().splitlines() or ["the process ended"])[-1][:100]})
    return answers


def in_parallel(tasks: list[Task], shape: Shape, device: str) -> list[Answer]:
    """Compile all tasks' kernels, with as many processes as there are cores. Answers say what a kernel takes.

    Args:
        tasks, shape, device: As in `ask`.
    """
    processes = max(1, min(len(tasks), (os.cpu_count() or 1) - 1, 16))
    with ThreadPoolExecutor(processes) as threads:
        shares = threads.map(lambda i: ask("compile", tasks[i::processes], shape, device), range(processes))
        by_share = list(shares)
    return [by_share[i % processes][i // processes] for i in range(len(tasks))]


def tune(bench: Bench, shape: Shape) -> Report:
    """Search settings for problems of this shape, print them and write them to the file of `bench`.

    Kernels are taken one after the other, while the others keep the settings in use. Kernels for chunks that are cut
    are timed where all chunks are.
    """
    if not bench.on_gpu or not torch.cuda.is_available():
        raise ValueError(f"--tune: expected a CUDA device, got {bench.device}")
    if shape.width > TRITON_WIDEST:
        raise ValueError(f"--width: expected at most {TRITON_WIDEST}, which the kernels take, got {shape.width}")
    _written(bench)  # a file that cannot be added to is refused before all the work
    tasks = tasks_of(shape.width)
    bench.console.print(f"compiling {len(tasks)} candidates")
    for task, answer in zip(tasks, in_parallel(tasks, shape, bench.device), strict=True):
        task |= answer
        if answer.get("spilled", 0) > SPILLED:
            task["failed"] = f"spills {answer['spilled']} numbers"
    timed = [task for task in tasks if "failed" not in task]
    bench.console.print(f"timing {len(timed)} of them")
    for task, answer in zip(timed, ask("measure", timed, shape, bench.device), strict=True):
        task |= answer
    settings: Settings = {}
    for kernel in KERNELS:
        usual, *others = [task for task in tasks if task["kernel"] == kernel]
        if "failed" in usual:
            raise GateError(f"--tune: the settings in use do not run here: {kernel}: {usual['failed']}")
        best = min((x for x in others if "failed" not in x), key=lambda x: x["ms"], default=usual)
        if best["ms"] < WINS * usual["ms"]:
            settings |= best["settings"]
            best["chosen"] = True
    together = [{"kernel": ALL, "settings": {}}, {"kernel": ALL, "settings": settings}]
    for task, answer in zip(together, ask("measure", together, shape, bench.device), strict=True):
        task |= answer
    bench.console.print(_table(tasks + together, shape))
    if "failed" in together[1]:
        raise GateError(f"--tune: the settings found do not run together: {together[1]['failed']}")
    return _write(bench, shape, tasks + together, settings)


def _written(bench: Bench) -> Settings:
    """Return the settings that the file has already."""
    return read_settings(bench.out) if bench.out is not None and bench.out.exists() else {}


def _write(bench: Bench, shape: Shape, tasks: list[Task], settings: Settings) -> Report:
    """Write what was found beside the settings that the file has for other widths, and say how to use it."""
    here = at_width("", shape.width, shape.width)
    report = bench.report(shape=asdict(shape))
    kept = {name: x for name, x in _written(bench).items() if not name.endswith(here)}
    report.add(tried=tasks, settings=kept | settings)
    gain = f"{len(settings)} of {len(KERNELS)} kernels gain"
    if bench.out is not None:
        gain += f"; to use the settings: qed.use_settings(Path({str(bench.out)!r}))"
    bench.console.print(gain, markup=False)
    return report


def _table(tasks: list[Task], shape: Shape) -> Table:
    """Make a table of everything that was tried, with an arrow at what was chosen."""
    names = ("kernel", "setting", "registers", "spilled", "shared KiB", "ms", "error")
    table = Table(*names, title=f"{shape.batch} x {shape.tokens}, {shape.heads} heads of {shape.width}")
    for task in tasks:
        change = next(iter(task["settings"].values()), {}) if task["kernel"] != ALL else task["settings"]
        words = ", ".join(f"{name} {x}" for name, x in change.items()) or "in use"
        takes = (str(task.get(name, "")) for name in ("registers", "spilled", "shared"))
        found = task.get("failed") or f"{task['ms']:.4f}" + " ←" * task.get("chosen", False)
        error = f"{task['error']:.1e}" if "error" in task else ""
        table.add_row(task["kernel"], words, *takes, found, error)
    return table
