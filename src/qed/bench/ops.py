"""`qed bench ops`: the op's speed, errors and memory, beside flash-linear-attention's in the same run.

Nothing is timed before it is right: the form that would be timed is first compared with float64 at 512 tokens.
Candidates then take turns, call by call, so that they meet the same machine; medians are compared.

Two kinds of figures. The *op* takes a, u and unit q, k; the *operator* starts, as fla's does, from raw q, k, v and the
gates b and w, and normalises and gates them (ours: in torch before the op, on a GPU also compiled by torch.compile).
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from ..files import write_json
from ..ops import erase_write, erase_write_step, explain
from ..provenance import environment
from ..rules import RULES, Operands, Projections, l2_normalize, qed_attention
from ..testing import relative_error

STRENGTH = 0.1
STRONG = 100.0  # times the decay: about exp(−3) a token, as trained models have in their fastest channels
ERROR_BARS = {"o": 6e-3, "dq": 6e-3, "dk": 6e-3, "da": 6e-3, "du": 6e-3, "dg": 1e-2}  # of bfloat16 at T = 512


@dataclass(frozen=True, kw_only=True)
class Shape:
    """K = V = width."""

    batch: int = 32
    tokens: int = 2048
    heads: int = 6
    width: int = 128


class Raw(dict[str, Tensor]):
    """q, k, v, b, w in bfloat16 and g in float32: what a layer's projections would be."""

    @staticmethod
    def draw(shape: Shape, device: str) -> Raw:
        full = (shape.batch, shape.tokens, shape.heads, shape.width)
        raw = {name: torch.randn(full, device=device).bfloat16() for name in "qkv"}
        raw["g"] = -torch.nn.functional.softplus(torch.randn(full, device=device) - 4)
        return Raw(raw | {name: torch.rand(full, device=device).bfloat16() for name in "bw"})

    def operands(self, rule: str) -> Operands:
        q, k = l2_normalize(self["q"]), l2_normalize(self["k"])
        strength = STRENGTH if RULES[rule].strength else None
        return RULES[rule].operands(Projections(q, k, self["v"], self["g"], self["b"], self["w"], strength))


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A function of leaves; what is timed is it, and it with its backward."""

    leaves: list[Tensor]
    output: Callable[..., Tensor]

    @staticmethod
    def of(tensors: list[Tensor], output: Callable[..., Tensor]) -> Candidate:
        return Candidate(leaves=[x.detach().requires_grad_() for x in tensors], output=output)

    def forward(self) -> None:
        with torch.no_grad():
            self.output(*self.leaves)

    def forward_backward(self) -> None:
        for x in self.leaves:
            x.grad = None
        o = self.output(*self.leaves)
        o.backward(o.detach())


def candidates(shape: Shape, device: str, impl: str, fla: bool) -> dict[str, Candidate]:
    raw = Raw.draw(shape, device)

    def op(q: Tensor, k: Tensor, a: Tensor, u: Tensor, g: Tensor) -> Tensor:
        return erase_write(q, k, a, u, g, impl=impl)[0]

    found = {}
    for rule in ("qed", "gdn2"):
        *operands, g = raw.operands(rule)
        assert g is not None
        found[f"{rule}, op"] = Candidate.of([*operands, g], op)
        if rule == "qed":
            found["qed, op, strong decay"] = Candidate.of([*operands, STRONG * g], op)
    found["qed, operator"] = Candidate.of([raw[name] for name in "qkvgbw"], operator(impl, compiled=False))
    if device.startswith("cuda"):
        found["qed, operator compiled"] = Candidate.of([raw[name] for name in "qkvgbw"], operator(impl, compiled=True))
    if fla:
        from fla.ops.gdn2 import chunk_gdn2

        def theirs(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, w: Tensor) -> Tensor:
            return chunk_gdn2(q, k, v, g, b, w, use_qk_l2norm_in_kernel=True)[0]

        found["fla gdn2, operator"] = Candidate.of([raw[name] for name in "qkvgbw"], theirs)
    return found


@lru_cache
def operator(impl: str, compiled: bool) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, w: Tensor) -> Tensor:
        return qed_attention(q, k, v, g, b, w, STRENGTH, impl=impl)[0]

    return torch.compile(run) if compiled else run


def gate(device: str, impl: str, heads: int, width: int, decay: float = 1.0) -> dict[str, float]:
    """Relative errors of outputs and gradients in bfloat16 against the float64 chunk form, itself the loop to 1e-12."""
    raw = Raw.draw(Shape(batch=2, tokens=512, heads=heads, width=width), device)
    *low, g = Raw(raw | {"g": decay * raw["g"]}).operands("qed")
    assert g is not None
    cotangent = torch.randn_like(raw["v"])

    def results(tensors: list[Tensor], form: str) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in tensors]
        o, _ = erase_write(*leaves, impl=form)
        return [o, *torch.autograd.grad(o, leaves, cotangent.to(o.dtype))]

    found = results([*low, g], impl)
    truth = results([x.double() for x in (*low, g)], "chunkwise")
    errors = [relative_error(x, y) for x, y in zip(found, truth, strict=True)]
    return dict(zip(("o", "dq", "dk", "da", "du", "dg"), errors, strict=True))


def passes_gate(device: str, form: str, heads: int, width: int, decay: float = 1.0) -> dict[str, float]:
    """The errors; raises GateError if one is over its bar."""
    errors = gate(device, form, heads, width, decay)
    over = {name: error for name, error in errors.items() if not error <= ERROR_BARS[name]}
    if over:
        raise GateError(f"correctness gate: {form} is further from float64 than allowed: {over}")
    return errors


def milliseconds(device: str, call: Callable[[], None]) -> float:
    """Of one call, the device idle before it."""
    if not device.startswith("cuda"):
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3
    start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start_event.record()
    call()
    end_event.record()
    torch.cuda.synchronize()
    return float(start_event.elapsed_time(end_event))


def first_seconds(device: str, candidate: Candidate) -> float:
    """Of a candidate's first forward and backward, with whatever it compiles or tunes."""
    start = time.perf_counter()
    candidate.forward_backward()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - start


def take_turns(
    device: str, calls: Mapping[str, Callable[[], None]], rounds: int, console: Console
) -> dict[str, dict[str, float]]:
    """Median and quartiles of every candidate's milliseconds, call by call in turn, so that all meet the same machine,
    and in a new order every round, since what ran before leaves its mark on clocks and caches."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    order = random.Random(0)
    for i in track(range(rounds + 3), description=", ".join(calls)[:60], console=console):
        for name in order.sample(list(calls), len(calls)):
            took = milliseconds(device, calls[name])
            if i >= 3:
                times[name].append(took)
    found = {}
    for name, x in times.items():
        lower, median, upper = statistics.quantiles(x, n=4, method="inclusive") if len(x) > 1 else x * 3
        found[name] = {"median": median, "lower_quartile": lower, "upper_quartile": upper}
    return found


def peak_gib(candidate: Candidate) -> dict[str, float]:
    """The most that was allocated during one forward and backward: in all, and beyond the inputs."""
    candidate.forward_backward()
    for x in candidate.leaves:
        x.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    candidate.forward_backward()
    peak = torch.cuda.max_memory_allocated()
    return {"peak_gib": peak / 2**30, "peak_beyond_inputs_gib": (peak - before) / 2**30}


def decode_microseconds(batch: int, heads: int, width: int, impl: str, steps: int = 100) -> float:
    """One step of a CUDA graph of many, in place."""
    token = Raw.draw(Shape(batch=batch, tokens=1, heads=heads, width=width), "cuda").operands("qed")
    q, k, a, u, g = (x[:, 0].contiguous() for x in token if x is not None)
    state = torch.zeros(batch, heads, width, width, device="cuda")

    def run() -> None:
        for _ in range(steps):
            erase_write_step(q, k, a, u, g, state=state, inplace=True, impl=impl)

    with torch.no_grad():
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return statistics.median(milliseconds("cuda", graph.replay) for _ in range(10)) / steps * 1e3


def cold_start_seconds(shape: Shape) -> float:
    """First forward and backward in a fresh process that has nothing compiled, imports of qed included."""
    code = f"""
import time, torch
q, k, a, u = (torch.randn({shape.batch}, {shape.tokens}, {shape.heads}, {shape.width}, device="cuda").bfloat16()
              .mul_(0.08).requires_grad_() for _ in range(4))
g = -torch.rand({shape.batch}, {shape.tokens}, {shape.heads}, {shape.width}, device="cuda")
torch.cuda.synchronize()
start = time.perf_counter()
import qed
o, _ = qed.erase_write(q, k, a, u, g.requires_grad_(), impl="triton")
o.backward(o.detach())
torch.cuda.synchronize()
print(time.perf_counter() - start)
"""
    with tempfile.TemporaryDirectory() as empty:
        done = subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"TRITON_CACHE_DIR": empty}, capture_output=True, text=True
        )
    if done.returncode:
        raise RuntimeError(f"the cold start failed:\n{done.stderr[-2000:]}")
    return float(done.stdout.split()[-1])


class GateError(RuntimeError):
    """What was to be timed is not right here."""


class Report(dict[str, Any]):
    """What has been measured so far, on disk after every stage: a run that is cut short keeps what it had."""

    def __init__(self, out: Path | None, **values: Any):
        super().__init__(values)
        self.out = out

    def add(self, **values: Any) -> None:
        self |= values
        if self.out is not None:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.out, self)


def ops(
    console: Console, *, out: Path | None, device: str, shape: Shape, impl: str, fla: bool, rounds: int
) -> dict[str, Any]:
    """Gate, time, print, write. Raises GateError if the gate is not passed."""
    raw = Raw.draw(Shape(batch=1, tokens=1, heads=shape.heads, width=shape.width), device).operands("qed")
    try:
        form = explain(raw.q, raw.k, raw.a, raw.u, raw.g, impl=impl).form
    except RuntimeError as error:
        raise ValueError(f"--impl: expected a form that runs here, got {impl!r}: {error}") from error
    errors = passes_gate(device, form, shape.heads, shape.width)
    strong = passes_gate(device, form, shape.heads, shape.width, STRONG)
    title = f"{form}: relative errors against float64, bfloat16, T = 512 | with strong decay"
    _print(console, title, {n: f"{e:.1e} | {strong[n]:.1e}" for n, e in errors.items()})
    report = Report(out, environment=environment(device), shape=asdict(shape), form=form)
    report.add(errors=errors, errors_strong_decay=strong)
    if form == "triton" and device.startswith("cuda"):
        decoding(report, console, shape)
    by_length(report, console, device, shape, form, rounds)
    side_by_side(report, console, device, shape, form, fla, rounds)
    if device.startswith("cuda"):
        prefill(report, console, device, shape, form, fla, rounds)
    if out is not None:
        console.print(f"written to {out}")
    return report


def decoding(report: Report, console: Console, shape: Shape) -> None:
    steps = {batch: decode_microseconds(batch, shape.heads, shape.width, "triton") for batch in (1, 16, 64, 256)}
    report.add(decode_us=steps, cold_start_s=cold_start_seconds(shape))
    _print(console, "decode step by batch, µs", {str(b): f"{x:.2f}" for b, x in steps.items()})
    console.print(f"first forward and backward with nothing compiled: {report['cold_start_s']:.1f} s")


def by_length(report: Report, console: Console, device: str, shape: Shape, form: str, rounds: int) -> None:
    """The same number of tokens in ever longer sequences."""
    total = shape.batch * shape.tokens
    found = {}
    for tokens in (shape.tokens << i for i in range(0, 6) if shape.tokens << i <= total):
        sizes = asdict(shape) | {"batch": total // tokens, "tokens": tokens}
        found[str(tokens)] = candidates(Shape(**sizes), device, form, fla=False)["qed, op"]
    forward = take_turns(device, {t: c.forward for t, c in found.items()}, rounds, console)
    both = take_turns(device, {t: c.forward_backward for t, c in found.items()}, rounds, console)
    report.add(lengths={t: {"forward_ms": forward[t], "forward_backward_ms": both[t]} for t in found})
    title = "QED op by T, batch × T fixed: forward | with backward, ms"
    _print(console, title, {t: f"{forward[t]['median']:.2f} | {both[t]['median']:.2f}" for t in found})


def side_by_side(
    report: Report, console: Console, device: str, shape: Shape, form: str, fla: bool, rounds: int
) -> None:
    found = candidates(shape, device, form, fla)
    first = {name: first_seconds(device, c) for name, c in found.items()}
    forward = take_turns(device, {name: c.forward for name, c in found.items()}, rounds, console)
    both = take_turns(device, {name: c.forward_backward for name, c in found.items()}, rounds, console)
    rows: dict[str, dict[str, Any]] = {
        name: {"forward_ms": forward[name], "forward_backward_ms": both[name], "first_call_s": first[name]}
        for name in found
    }
    ratio = both["qed, op"]["median"] / both["gdn2, op"]["median"]
    report.add(candidates=rows, qed_over_gdn2=ratio)
    if device.startswith("cuda"):
        found.clear()  # each alone: another's tensors would count
        for name, row in rows.items():
            row |= peak_gib(candidates(shape, device, form, fla)[name])
        report.add(candidates=rows)
    table = Table("", "forward ms", "forward + backward ms", "first call s", "peak GiB", "beyond inputs")
    table.title = f"{form}, {asdict(shape)}"
    for name, row in rows.items():
        memory = (f"{row[key]:.2f}" if key in row else "" for key in ("peak_gib", "peak_beyond_inputs_gib"))
        times = (f"{row[key]['median']:.3f}" for key in ("forward_ms", "forward_backward_ms"))
        table.add_row(name, *times, f"{row['first_call_s']:.1f}", *memory)
    console.print(table)
    console.print(f"QED ÷ GDN-2, forward and backward of the op: {ratio:.3f}")


def prefill(report: Report, console: Console, device: str, shape: Shape, form: str, fla: bool, rounds: int) -> None:
    """One long sequence, forward only."""
    found = candidates(Shape(**asdict(shape) | {"batch": 1, "tokens": 32768}), device, form, fla)
    times = take_turns(device, {name: c.forward for name, c in found.items()}, rounds, console)
    report.add(prefill_32768_ms=times)
    _print(console, "prefill, B = 1, T = 32768, ms", {n: f"{x['median']:.3f}" for n, x in times.items()})


def _print(console: Console, title: str, row: dict[str, str]) -> None:
    table = Table(*row, title=title)
    table.add_row(*row.values())
    console.print(table)
