"""Time two trees in turns on one machine, and print the ratio of their medians.

    python benchmarks/turns.py OLD/src NEW/src [--turns 3] [--train] [--out turns.json]

Machines differ by up to 9 %, and a machine from itself by a few per cent within minutes: so both trees run here, one
after the other and again, each time in a process of its own. A last column says how far the old tree's own runs lie
apart: a ratio within that says nothing. What is timed: the op forward, with its backward, over one long prefill and for
one token; the paper's 340M model's prefill and generation; with --train its training step. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HIGHER_IS_BETTER = "tokens/s"


def milliseconds(call: Callable[[], Any], repeats: int = 30) -> float:
    """The median of a call's time on the device, host time included where the device waits for it."""
    import torch

    for _ in range(5):
        call()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def operands(batch: int, tokens: int, heads: int = 6, width: int = 128) -> list[Any]:
    """q, k, a, u in bfloat16 and a weak decay in float32."""
    import torch

    shape = (batch, tokens, heads, width)
    q, k, a = (torch.nn.functional.normalize(torch.randn(shape, device="cuda"), dim=-1).bfloat16() for _ in range(3))
    return [q, k, 0.5 * a, torch.randn(shape, device="cuda").bfloat16(), -0.1 * torch.rand(shape, device="cuda")]


def time_op() -> dict[str, float]:
    """Milliseconds of the op; 50 tokens in a row for one, so that launches overlap as they do in decoding."""
    import torch

    from qed import erase_write, erase_write_step

    given = operands(32, 2048)
    with torch.no_grad():
        found = {"op forward, ms": milliseconds(lambda: erase_write(*given))}
    leaves = [x.requires_grad_() for x in given]
    do = torch.randn_like(given[3])
    found["op forward + backward, ms"] = milliseconds(lambda: torch.autograd.grad(erase_write(*leaves)[0], leaves, do))
    with torch.no_grad():
        long = operands(1, 32768)
        found["op prefill 1 × 32K, ms"] = milliseconds(lambda: erase_write(*long))
        token, state = [x[:, 0] for x in operands(64, 1)], torch.zeros(64, 6, 128, 128, device="cuda")

        def decode() -> None:
            for _ in range(50):
                erase_write_step(*token, state=state, inplace=True)

        found["op, 50 tokens of decoding, ms"] = milliseconds(decode)
    return found


def time_model() -> dict[str, float]:
    """The paper's model: prefill in milliseconds, generation in tokens a second."""
    import torch

    from qed import QEDConfig, QEDForCausalLM
    from qed.model.decoding import stream

    torch.manual_seed(0)
    model = QEDForCausalLM(QEDConfig()).bfloat16().cuda().eval()
    found = {}
    with torch.no_grad():
        for batch, tokens in ((1, 2048), (16, 4096)):
            ids = torch.randint(3, 32000, (batch, tokens), device="cuda")
            prefill = partial(model, ids, logits_to_keep=1)
            found[f"prefill {batch} × {tokens}, ms"] = milliseconds(prefill, 8)
        for batch in (1, 64):
            prompt = torch.randint(3, 32000, (batch, 128), device="cuda")

            def generate(prompt: torch.Tensor = prompt) -> None:
                for _ in stream(model, prompt, max_new_tokens=256):
                    pass

            found[f"stream at batch {batch}, {HIGHER_IS_BETTER}"] = 256e3 * batch / milliseconds(generate, 3)
    return found


def time_training() -> dict[str, float]:
    """A compiled and captured training step of the paper's model on 16 × 2048 tokens."""
    import torch

    from qed import QEDConfig, QEDForCausalLM
    from qed.train.step import training_step

    torch.manual_seed(0)
    step = training_step(QEDForCausalLM(QEDConfig()).cuda(), "cuda", compiled=True)
    step.rows = torch.randint(3, 32000, (16, 2049), device="cuda")
    return {f"training, {HIGHER_IS_BETTER}": 16 * 2048e3 / milliseconds(step, 15)}


def run(tree: Path, train: bool) -> dict[str, float]:
    """One turn of one tree, in a process of its own."""
    command = [sys.executable, __file__, "--child", *(["--train"] if train else [])]
    environment = os.environ | {"PYTHONPATH": str(tree.resolve())}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    times: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return times


def compare(trees: list[Path], turns: int, train: bool) -> dict[str, list[dict[str, float]]]:
    """Print the table; return every turn of both trees."""
    results: dict[str, list[dict[str, float]]] = {"old": [], "new": []}
    for _ in range(turns):
        for name, tree in zip(results, trees, strict=True):
            results[name].append(run(tree, train))
    table = Table("", "old", "new", "new is slower by", "old apart from itself")
    for what in results["old"][0]:
        old, new = ([turn[what] for turn in results[name]] for name in ("old", "new"))
        ratio = statistics.median(new) / statistics.median(old)
        slower = 1 / ratio if what.endswith(HIGHER_IS_BETTER) else ratio
        cells = f"{statistics.median(old):,.3f}", f"{statistics.median(new):,.3f}", f"× {slower:.3f}"
        table.add_row(what, *cells, f"× {max(old) / min(old):.3f}")
    Console().print(table)
    return results


def main() -> None:
    """Read the command line; a child process times the tree that PYTHONPATH names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", type=Path, help="two folders that hold the package qed: old, then new")
    parser.add_argument("--turns", type=int, default=3, help="how often each tree is timed")
    parser.add_argument("--train", action="store_true", help="time a training step instead of the op and the model")
    parser.add_argument("--out", type=Path, help="write every turn to this JSON file")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(time_training() if options.train else time_op() | time_model()))
        return
    if len(options.trees) != 2:
        parser.error(f"trees: expected two folders, got {len(options.trees)}")
    for tree in options.trees:
        if not (tree / "qed" / "__init__.py").is_file():
            parser.error(f"trees: expected a folder that holds the package qed, got {tree}")
    results = compare(options.trees, options.turns, options.train)
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
