"""`qed bench --tune`: searches launch settings for this machine's GPU, on request only.

Each candidate runs in a process of its own, since a bad one takes its process down, and must pass the benchmark's gate
on correctness before it is timed. Settings that win by more than the noise go into a file. A process uses them after
`qed.use_settings(Path(FILE))`; every process does if the file is put into the package, beside
`kernels/recurrence/settings.py`, as `tuned/sm_<architecture>.json`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from typing import Any

import torch
from rich.progress import track
from rich.table import Table

from ..kernels.recurrence.settings import use_settings
from .measuring import Bench, GateError, Report, milliseconds
from .ops import STRONG, Candidate, Shape, candidates, passes_gate

STATES = [
    {"BV": BV, "num_warps": warps, "num_stages": stages}
    for BV, warps in ((32, 4), (64, 4), (128, 8))
    for stages in (1, 2, 3)
]
CANDIDATES: dict[str, list[dict[str, int]]] = {
    "chunk_terms": [{"BK": BK, "num_warps": warps} for BK in (16, 32, 64) for warps in (4, 8)],
    "chunk_states": STATES,
    "state_gradients": STATES,
    "pair_gradients": [{"BV": BV, "num_warps": warps} for BV in (32, 64, 128) for warps in (4, 8)],
    "chunk_gradients": [{"BK": BK, "num_warps": warps} for BK in (32, 64) for warps in (4, 8)],
    "chunk_terms, cut": [{"BK": BK, "num_warps": warps} for BK in (16, 32, 64) for warps in (4, 8)],
    "chunk_gradients, cut": [{"BK": BK, "num_warps": warps} for BK in (16, 32, 64) for warps in (4, 8)],
}
WINS = 0.97  # of the time with the checked-in settings; a smaller gain is noise
CALLS = 10  # in a row


def time_here(shape: Shape, device: str, strong_decay: bool) -> float:
    """Return the milliseconds of one forward and backward pass, of several in a row: the GPU never waits for Python.

    Args:
        shape: The size of the problem.
        device: The GPU.
        strong_decay: Time a problem whose chunks all decay so far that they are cut into parts.
    """
    candidate = candidates(shape, device, "triton", fla=False)["qed, op, strong decay" if strong_decay else "qed, op"]

    def calls(candidate: Candidate = candidate) -> None:
        for _ in range(CALLS):
            candidate.forward_backward()

    calls()
    return min(milliseconds(device, calls) for _ in range(3)) / CALLS


def _child(shape: Shape, device: str, settings: dict[str, dict[str, int]], strong_decay: bool) -> None:
    """Run in the process of one candidate: check it, then print its time."""
    use_settings(settings)
    passes_gate(device, "triton", shape, STRONG if strong_decay else 1.0)
    print(json.dumps(time_here(shape, device, strong_decay)))


def time_in_a_process(
    shape: Shape, device: str, settings: dict[str, dict[str, int]], strong_decay: bool
) -> float | str:
    """Time settings in a process of their own.

    Args:
        shape: The size of the problem.
        device: The GPU.
        settings: Launch settings by kernel; the others keep the checked-in ones.
        strong_decay: As in `time_here`.

    Returns:
        Milliseconds, or in words why there are none.
    """
    arguments = f"Shape(**{asdict(shape)}), {device!r}, {settings}, {strong_decay}"
    code = f"from qed.bench.tune import _child, Shape; _child({arguments})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1][:100]
    return float(json.loads(done.stdout.splitlines()[-1]))


def tune(bench: Bench, shape: Shape) -> Report:
    """Search settings for problems of this shape, print them and write them to the file of `bench`.

    Kernels are taken one after the other, while the others keep the checked-in settings. Kernels for chunks that are
    cut are timed where all chunks are.
    """
    if not bench.on_gpu or not torch.cuda.is_available():
        raise ValueError(f"--tune: expected a CUDA device, got {bench.device}")
    usual = {}
    for strong_decay in (False, True):
        outcome = time_in_a_process(shape, bench.device, {}, strong_decay)
        if isinstance(outcome, str):
            raise GateError(f"--tune: the checked-in settings do not run here: {outcome}")
        usual[strong_decay] = outcome
    tried: dict[str, list[dict[str, Any]]] = {}
    settings: dict[str, dict[str, int]] = {}
    for kernel, choices in CANDIDATES.items():
        tried[kernel], cut = [], kernel.endswith(", cut")
        for choice in track(choices, description=kernel, console=bench.console):
            result = time_in_a_process(shape, bench.device, {kernel: choice}, cut)
            tried[kernel].append(choice | {"result": result})
        timed = [row for row in tried[kernel] if not isinstance(row["result"], str)]
        best = min(timed, key=lambda row: row["result"], default=None)
        if best is not None and best["result"] < WINS * usual[cut]:
            settings[kernel] = _without_result(best)
    bench.console.print(_table(tried, settings, usual))
    report = bench.report(shape=asdict(shape), checked_in_ms=usual[False], checked_in_cut_ms=usual[True])
    report.add(tried=tried, settings=settings)
    gain = f"{len(settings)} of {len(CANDIDATES)} kernels gain"
    if bench.out is not None:
        gain += f"; to use the settings: qed.use_settings(Path({str(bench.out)!r}))"
    bench.console.print(gain, markup=False)
    return report


def _without_result(row: dict[str, Any]) -> dict[str, int]:
    return {name: x for name, x in row.items() if name != "result"}


def _table(
    tried: dict[str, list[dict[str, Any]]], settings: dict[str, dict[str, int]], usual: dict[bool, float]
) -> Table:
    """Make a table of everything that was tried, with an arrow at what was chosen."""
    title = f"checked in: {usual[False]:.3f} ms, cut {usual[True]:.3f}"
    table = Table("kernel", "setting", "forward + backward ms", title=title)
    for kernel, rows in tried.items():
        for row in rows:
            result = row["result"] if isinstance(row["result"], str) else f"{row['result']:.3f}"
            chosen = settings.get(kernel) == _without_result(row)
            table.add_row(kernel, str(_without_result(row)), result + " ←" * chosen)
    return table
