"""Chunks that are cut, and chunks that forget: the same bits every time, and nothing for a memory checker to find.

    python benchmarks/cut_chunks.py --repeats 5000
    compute-sanitizer --tool memcheck python benchmarks/cut_chunks.py --small
    compute-sanitizer --tool racecheck python benchmarks/cut_chunks.py --small

Chunks with strong decays are computed in another way by the kernels (`src/qed/kernels/recurrence/tiles.py`). Here they
run forward and backward, per channel, per head, packed and with resets, and every result is compared with the
first. `--small` is for the checkers, under which a kernel takes a hundred times as long. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from qed.ops import erase_write
from qed.testing import Case


def cases(small: bool) -> dict[str, tuple[Case, torch.Tensor | None]]:
    """By name: a problem, and how its sequences are packed."""
    case = Case(batch=8, tokens=512, heads=6, key_width=128, value_width=128, log_decay=-10.0)
    if small:
        case = replace(case, batch=1, tokens=130, heads=2)
    resets = replace(case, log_decay=-1.0, resets=12)
    offsets = torch.tensor([0, 70, 70, 71, case.tokens], device="cuda")
    return {
        "a decay per channel": (case, None),
        "a decay per head": (replace(case, decay="head"), None),
        "packed": (replace(case, batch=1, state=False), offsets),
        "resets": (resets, None),
        "resets, a decay per head": (replace(resets, decay="head"), None),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2, help="How often every case runs.")
    parser.add_argument("--small", action="store_true", help="Two chunks and a bit, for a memory checker.")
    options = parser.parse_args()
    console = Console()
    for name, (case, offsets) in cases(options.small).items():
        inputs = case.inputs(torch.float32, device="cuda")
        leaves = {n: x if x is None or n in ("g", "initial_state") else x.bfloat16() for n, x in inputs.items()}
        wanted = [x.requires_grad_() for x in leaves.values() if x is not None]
        first: list[Tensor] = []
        for _ in track(range(options.repeats), description=name, console=console):
            outputs = erase_write(**leaves, cu_seqlens=offsets, impl="triton")
            found = [*outputs, *torch.autograd.grad(outputs, wanted, [x.detach() for x in outputs])]
            first = first or found
            if not all(torch.equal(x, y) for x, y in zip(found, first, strict=True)):
                raise SystemExit(f"{name}: results differ between runs on the same inputs")
        console.print(f"{name}: {options.repeats} times the same bits")


if __name__ == "__main__":
    main()
