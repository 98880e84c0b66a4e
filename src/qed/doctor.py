"""Is this installation sound? Versions, which form runs where, and every form that can run checked against the loop.

A compiler can be wrong without saying so: the kernels are run forward and backward at the shape that matters, here,
and compared with the float64 loop, before anything is trained with them.
"""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import torch
from rich.console import Console
from rich.table import Table

from .ops import explain
from .ops.forms import IMPLS
from .testing import Case, over_budget


def examine(console: Console, *, device: str, dtype: torch.dtype, heads: int, width: int, tokens: int) -> bool:
    """Print what was found; True if every form that runs here is within its error budget."""
    console.print(_environment(device))
    case = Case(batch=2, tokens=tokens, heads=heads, key_width=width, value_width=width, log_decay=-0.1)
    inputs = case.inputs(device=device)
    low = {name: x.to(torch.float32 if name in ("g", "initial_state") else dtype) for name, x in inputs.items()}
    console.print(f"impl='auto' runs {explain(**low)}", markup=False)
    table = Table("form", "forward and backward against the float64 loop")
    sound = True
    for impl in IMPLS[1:]:
        try:
            explain(**low, impl=impl)
            products = dtype if impl == "triton" else None
            over = over_budget(inputs, impl=impl, dtype=dtype, products=products)
        except RuntimeError as error:
            # A form that cannot run here is no fault; one that should and fails is.
            verdict = str(error)
            sound &= "cannot run here" in verdict
        else:
            sound &= not over
            beyond = ", ".join(f"{name} off by {e:.1e}, allowed {budget:.1e}" for name, (e, budget) in over.items())
            verdict = f"wrong: {beyond}" if over else "within budget"
        table.add_row(impl, verdict)
    console.print(table)
    return sound


def _environment(device: str) -> Table:
    table = Table("", "", show_header=False)
    table.add_row("Python", platform.python_version())
    for package in ("qed-attention", "torch", "triton", "transformers"):
        try:
            table.add_row(package, version(package))
        except PackageNotFoundError:
            table.add_row(package, "not installed")
    if device.startswith("cuda"):
        major, minor = torch.cuda.get_device_capability(device)
        table.add_row("device", f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}")
    else:
        table.add_row("device", device)
    return table
