"""`qed bench --tune`: search launch settings for this machine's GPU, on request only.

Each candidate runs in a process of its own, since a bad one takes its process down; it must pass the benchmark's gate
on correctness before it is timed. Settings that win by more than the noise go into a file; the kernels use them where
the environment variable QED_SETTINGS names it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ..provenance import environment
from .ops import STRONG, Candidate, GateError, Shape, candidates, milliseconds, passes_gate

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
WINS = 0.97  # of the checked-in settings' time: less is noise
CALLS = 10


def time_here(shape: Shape, device: str, strong_decay: bool) -> float:
    """Milliseconds of one forward and backward, of several in a row: the device never waits for Python."""
    candidate = candidates(shape, device, "triton", fla=False)["qed, op, strong decay" if strong_decay else "qed, op"]

    def calls(candidate: Candidate = candidate) -> None:
        for _ in range(CALLS):
            candidate.forward_backward()

    calls()
    return min(milliseconds(device, calls) for _ in range(3)) / CALLS


def _child(shape: Shape, device: str, strong_decay: bool) -> None:
    passes_gate(device, "triton", shape.heads, shape.width, STRONG if strong_decay else 1.0)
    print(json.dumps(time_here(shape, device, strong_decay)))


def time_in_a_process(
    shape: Shape, device: str, settings: dict[str, dict[str, int]], strong_decay: bool
) -> float | str:
    """Milliseconds, or why there are none."""
    code = f"from qed.bench.tune import _child, Shape; _child(Shape(**{asdict(shape)}), {device!r}, {strong_decay})"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "settings.json"
        file.write_text(json.dumps({"settings": settings}))
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"QED_SETTINGS": str(file)},
            capture_output=True,
            text=True,
        )
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1][:100]
    return float(json.loads(done.stdout.splitlines()[-1]))


def tune(console: Console, *, out: Path, device: str, shape: Shape) -> dict[str, Any]:
    """Search, print, write. Kernels are taken one after the other, the others at the checked-in settings. Those for
    chunks that are cut are timed where all are."""
    if not device.startswith("cuda") or not torch.cuda.is_available():
        raise ValueError(f"--tune: expected a CUDA device, got {device}")
    usual = {}
    for strong_decay in (False, True):
        found = time_in_a_process(shape, device, {}, strong_decay)
        if isinstance(found, str):
            raise GateError(f"--tune: the checked-in settings do not run here: {found}")
        usual[strong_decay] = found
    tried: dict[str, list[dict[str, Any]]] = {}
    settings: dict[str, dict[str, int]] = {}
    for kernel, choices in CANDIDATES.items():
        tried[kernel], cut = [], kernel.endswith(", cut")
        for choice in track(choices, description=kernel, console=console):
            tried[kernel].append(choice | {"result": time_in_a_process(shape, device, {kernel: choice}, cut)})
        timed = [row for row in tried[kernel] if not isinstance(row["result"], str)]
        best = min(timed, key=lambda row: row["result"], default=None)
        if best is not None and best["result"] < WINS * usual[cut]:
            settings[kernel] = {name: x for name, x in best.items() if name != "result"}
    table = Table(
        "kernel", "setting", "forward + backward ms", title="checked in: {:.3f} ms, cut {:.3f}".format(*usual.values())
    )
    for kernel, rows in tried.items():
        for row in rows:
            result = row["result"] if isinstance(row["result"], str) else f"{row['result']:.3f}"
            chosen = settings.get(kernel) == {name: x for name, x in row.items() if name != "result"}
            table.add_row(kernel, str({n: x for n, x in row.items() if n != "result"}), result + " ←" * chosen)
    console.print(table)
    report = {
        "environment": environment(device),
        "shape": asdict(shape),
        "checked_in_ms": usual[False],
        "checked_in_cut_ms": usual[True],
        "tried": tried,
        "settings": settings,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=2) + "\n")
    console.print(f"{len(settings)} of {len(CANDIDATES)} kernels gain; to use it: export QED_SETTINGS={out.resolve()}")
    return report
