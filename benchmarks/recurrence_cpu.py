"""The recurrence on CPU: how fast, how flat in T, and how much memory, beside its peers in one run.

    python benchmarks/recurrence_cpu.py [--out FILE] [--quick]

First a gate: nothing is timed unless the chunk form agrees with the loop, and with the peer, at the shapes that
are timed. Then ratios, since a time alone means little on a shared machine: candidates take turns, and medians of
their forward+backward times are compared. Peers:

  loop          impl="reference", the definition, under autograd
  loop, unbound the same loop with its inputs unbound over T once: the fastest loop we know
  transformers  torch_chunk_gated_delta_rule of its Qwen3-Next model, on the rule with one decay per head
"""

from __future__ import annotations

import argparse
import inspect
import json
import multiprocessing
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import qed
from qed.ops.chunkwise import CHUNK
from qed.testing import Case, Decay, over_budget, relative_error

THREADS = 2
BATCH, TOKENS, HEADS, WIDTH = 4, 1024, 4, 64
LENGTHS = (1024, 4096, 16384, 65536)
console = Console()


def problem(decay: Decay, tokens: int = TOKENS, batch: int = BATCH) -> dict[str, Any]:
    case = Case(
        batch=batch,
        tokens=tokens,
        heads=HEADS,
        key_width=WIDTH,
        value_width=WIDTH,
        decay=decay,
        state=False,
    )
    return {name: x for name, x in case.inputs(torch.float32).items() if x is not None}


def leaves(x: dict[str, Any]) -> dict[str, Any]:
    return {name: t.detach().requires_grad_() for name, t in x.items()}


def transformers_peer() -> Callable[..., Any] | None:
    """Their torch function itself; with fla installed, the name would lead to fla's GPU kernels."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from transformers.models.qwen3_next import modeling_qwen3_next
        except ImportError:
            return None
        return inspect.unwrap(modeling_qwen3_next.torch_chunk_gated_delta_rule)


def unbound_loop(q: Tensor, k: Tensor, a: Tensor, u: Tensor, g: Tensor) -> Tensor:
    state, outputs = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], u.shape[3]), []
    for q_t, k_t, a_t, u_t, d_t in zip(*(x.unbind(1) for x in (q, k, a, u, g.exp())), strict=True):
        state = d_t.unsqueeze(-1) * state
        residual = u_t - (a_t.unsqueeze(-2) @ state).squeeze(-2)
        state = state + k_t.unsqueeze(-1) * residual.unsqueeze(-2)
        outputs.append((q_t.unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(outputs, 1)


def gate(peer: Callable[..., Any] | None) -> None:
    """Refuse to time a wrong result."""
    decays: tuple[Decay, ...] = ("channel", "head")
    for decay in decays:
        over = over_budget(problem(decay, tokens=256, batch=1), impl="chunkwise", dtype=torch.float32)
        if over:
            raise SystemExit(f"correctness gate: the chunk form with {decay} decay is over budget: {over}")
    x = problem("channel", tokens=64)
    if relative_error(unbound_loop(**x), qed.erase_write(**x, impl="reference")[0]) > 1e-6:
        raise SystemExit("correctness gate: the unbound loop is not the loop")
    if peer is not None:
        x, beta = problem("head", tokens=256), torch.rand(BATCH, 256, HEADS)
        theirs = peer(x["q"], x["k"], x["u"], x["g"].squeeze(-1), beta)[0]
        b = beta.unsqueeze(-1)
        ours, _ = qed.erase_write(x["q"], x["k"], b * x["k"], b * x["u"], x["g"], scale=WIDTH**-0.5)
        if relative_error(ours, theirs) > 1e-5:
            raise SystemExit("correctness gate: we and transformers differ on the gated delta rule")


def candidate(name: str) -> Callable[[], None]:
    """A candidate's forward and backward. A name "T = 4096" is the chunk form at that length."""
    tokens = int(name.split()[-1]) if name.startswith("T =") else TOKENS
    if tokens == TOKENS:
        x = leaves(problem("head" if "head" in name else "channel"))
    else:
        shape = (BATCH, tokens, HEADS, WIDTH)
        x = leaves({name: torch.empty(shape).uniform_(-0.1, 0.1) for name in "qkau"} | {"g": -torch.rand(shape)})
    beta = torch.rand(BATCH, tokens, HEADS, requires_grad=True)
    cotangent = torch.empty(BATCH, tokens, HEADS, WIDTH).uniform_(-1, 1)
    peer = transformers_peer() if "transformers" in name else None

    def output() -> Tensor:
        if peer is not None:
            return peer(x["q"], x["k"], x["u"], x["g"].squeeze(-1), beta)[0]
        if "unbound" in name:
            return unbound_loop(**x)
        return qed.erase_write(**x, impl="reference" if name == "loop" else "chunkwise")[0]

    def forward_and_backward() -> None:
        for t in (*x.values(), beta):
            t.grad = None
        torch.autograd.backward(output(), cotangent)

    return forward_and_backward


def peak_memory() -> int:
    """Most bytes this process has held; not getrusage's figure where there is a better one, since a spawned
    process starts that one at its parent's."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def worker(name: str, connection: Connection) -> None:
    """Time forward+backward whenever the parent gives this candidate its turn."""
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    qed.erase_write(**leaves(problem("channel", tokens=256)))[0].sum().backward()  # before memory is measured
    before = peak_memory()
    run = candidate(name)
    while calls := connection.recv():
        times = []
        for _ in range(calls):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        connection.send((times, peak_memory() - before))


def side_by_side(names: dict[str, int], rounds: int) -> dict[str, dict[str, float]]:
    """Seconds of forward+backward, and peak bytes. Candidates take turns of so many calls each, in processes of their
    own, so that none pays for the memory another has left behind. The first call of a turn finds cold caches, and
    is not counted; nor is the first round."""
    context = multiprocessing.get_context("spawn")
    # Threads that wake from a pause on one and the same core take turns on it for a while; bound ones do not.
    os.environ["OMP_PROC_BIND"] = "true"
    ends, processes = {}, []
    for name in names:
        ends[name], theirs = context.Pipe()
        processes.append(context.Process(target=worker, args=(name, theirs), daemon=True))
        processes[-1].start()
    times: dict[str, list[float]] = {name: [] for name in names}
    peaks: dict[str, int] = {}
    for i in track(range(rounds + 1), description=f"{len(names)} candidates", console=console):
        for name, calls in names.items():
            time.sleep(0.5)  # the last candidate's threads may still be spinning
            ends[name].send(calls)
            found, peaks[name] = ends[name].recv()
            times[name] += found[1:] if i else []
    for end, process in zip(ends.values(), processes, strict=True):
        end.send(0)
        process.join()
    return {
        name: {"median_s": statistics.median(t), "min_s": min(t), "peak_bytes": peaks[name]}
        for name, t in times.items()
    }


def lengths(values: tuple[int, ...], rounds: int) -> list[dict[str, float]]:
    names = {f"T = {tokens}": max(4, 16384 // tokens) for tokens in values}
    found = side_by_side(names, rounds)
    return [
        {
            "tokens": tokens,
            "us_per_token": found[f"T = {tokens}"]["median_s"] / (BATCH * tokens) * 1e6,
            "peak_bytes": found[f"T = {tokens}"]["peak_bytes"],
        }
        for tokens in values
    ]


def bars(times: dict[str, dict[str, float]], rows: list[dict[str, float]]) -> list[dict[str, Any]]:
    """What the project asks of itself, and what came out."""
    median = {name: t["median_s"] for name, t in times.items()}
    chunk, head = median["chunkwise, decay per channel"], median["chunkwise, decay per head"]
    found = [
        ("chunkwise over the loop", median["loop"] / chunk, "≥", 20.0, "×"),
        ("chunkwise over the unbound loop (no bar)", median["loop, unbound"] / chunk, "", None, "×"),
    ]
    if "transformers, decay per head" in median:
        found.append(("chunkwise over transformers", median["transformers, decay per head"] / head, "≥", 1.0, "×"))
    per_token = [row["us_per_token"] for row in rows]
    centre = statistics.geometric_mean(per_token)
    spread = max(max(per_token) / centre - 1, 1 - min(per_token) / centre)
    found.append(("time per token, largest distance from the mean over T", 100 * spread, "≤", 20.0, "%"))
    shortest, longest = rows[-2], rows[-1]
    slope = (longest["peak_bytes"] - shortest["peak_bytes"]) / (longest["tokens"] - shortest["tokens"])
    per_tensor = 4 * BATCH * HEADS * WIDTH  # bytes a token
    own = 12 * per_tensor  # q, k, a, u, g and dO in; o, dq, dk, da, du and dg out
    states = per_tensor * WIDTH / CHUNK
    found.append(("peak memory slope beyond states, over inputs and outputs", (slope - states) / own, "≤", 1.5, "×"))
    meets = {"≥": lambda x, y: x >= y, "≤": lambda x, y: x <= y}
    return [
        {"what": w, "value": v, "bar": b and f"{s} {b:g} {unit}", "met": b and meets[s](v, b), "unit": unit}
        for w, v, s, b, unit in found
    ]


def environment() -> dict[str, Any]:
    def line(*command: str) -> str:
        found = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
        return found.stdout.strip()

    cpu = next((x.split(":")[1].strip() for x in line("lscpu").splitlines() if x.startswith("Model name")), "")
    return {
        "qed": qed.__version__,
        "commit": line("git", "rev-parse", "--short", "HEAD"),
        "modified": bool(line("git", "status", "--porcelain", "--", "../src")),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": cpu or platform.processor(),
        "threads": THREADS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "recurrence_cpu.json")
    parser.add_argument("--quick", action="store_true", help="two rounds and lengths up to 4096 only")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)

    peer = transformers_peer()
    if peer is None:
        console.print("[yellow]transformers is not installed: no comparison with it")
    gate(peer)
    names = {"loop": 2, "loop, unbound": 3, "chunkwise, decay per channel": 6, "chunkwise, decay per head": 6}
    if peer:
        names["transformers, decay per head"] = 6
    rounds = 2 if options.quick else 8
    times = side_by_side(names, rounds)
    rows = lengths(LENGTHS[:2] if options.quick else LENGTHS, rounds // 2)
    verdicts = bars(times, rows)

    table = Table(
        "forward + backward", "median ms", "min ms", title=f"B={BATCH} T={TOKENS} H={HEADS} K=V={WIDTH} float32"
    )
    for name, t in times.items():
        table.add_row(name, f"{1e3 * t['median_s']:.1f}", f"{1e3 * t['min_s']:.1f}")
    console.print(table)
    table = Table("T", "µs per token", "peak MiB")
    for row in rows:
        table.add_row(f"{row['tokens']:.0f}", f"{row['us_per_token']:.2f}", f"{row['peak_bytes'] / 2**20:.0f}")
    console.print(table)
    table = Table("", "measured", "bar", "")
    for v in verdicts:
        mark = "" if v["met"] is None else "met" if v["met"] else "[red]missed"
        table.add_row(v["what"], f"{v['value']:.2f} {v['unit']}", v["bar"] or "", mark)
    console.print(table)

    shape = {"batch": BATCH, "tokens": TOKENS, "heads": HEADS, "width": WIDTH, "dtype": "float32"}
    report = {"environment": environment(), "shape": shape, "times": times, "lengths": rows, "bars": verdicts}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    console.print(f"written to {options.out}")
    sys.exit(any(v["met"] is False for v in verdicts))


if __name__ == "__main__":
    main()
