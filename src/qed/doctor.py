"""Is this installation sound? Versions, which form runs where, and every form that can run checked against the loop.

A compiler can be wrong without saying so: the kernels are run forward and backward at the shape that matters, here,
and compared with the float64 loop, before anything is trained with them.
"""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table

from .ops import explain
from .ops.forms import IMPLS
from .testing import Case, environment, over_budget


def examine(console: Console, *, device: str, dtype: torch.dtype, heads: int, width: int, tokens: int) -> bool:
    """Print what was found; True if every form that runs here is within its error budget."""
    found = Table("", "", show_header=False)
    for name, value in environment(device).items():
        found.add_row(name, value)
    console.print(found)
    case = Case(batch=2, tokens=tokens, heads=heads, key_width=width, value_width=width, log_decay=-0.1)
    inputs = case.inputs(device=device)
    low = {name: x.to(torch.float32 if name in ("g", "initial_state") else dtype) for name, x in inputs.items()}
    console.print(f"impl='auto' runs {explain(**low)}", markup=False)
    table = Table("form", "forward and backward against the float64 loop")
    sound = True
    for impl in IMPLS[1:]:
        try:
            explain(**low, impl=impl)
        except RuntimeError as cannot:  # no fault: it says so instead of running
            table.add_row(impl, str(cannot))
            continue
        try:
            over = over_budget(inputs, impl=impl, dtype=dtype, products=dtype if impl == "triton" else None)
        except RuntimeError as failure:
            sound, verdict = False, str(failure)
        else:
            sound &= not over
            beyond = ", ".join(f"{name} off by {e:.1e}, allowed {budget:.1e}" for name, (e, budget) in over.items())
            verdict = f"wrong: {beyond}" if over else "within budget"
        table.add_row(impl, verdict)
    console.print(table)
    return sound
