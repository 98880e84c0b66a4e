"""`qed bench ops`: the op's speed, errors and memory, beside flash-linear-attention's in the same run.

Nothing is timed before it is right: the form that would be timed is first compared with float64 at 512 tokens.
Candidates then take turns, call by call, so that they meet the same machine; medians are compared.

There are two kinds of figures. The *op* takes a, u and unit q, k. The *operator* starts, as fla's does, from raw q, k,
v and the gates b and w, and normalises and gates them: ours in torch before the op, on a GPU also compiled by
torch.compile.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from ..ops import erase_write, erase_write_step, explain
from ..rules import RULES, Operands, Projections, l2_normalize, qed_attention
from ..testing import relative_error
from .measuring import Bench, GateError, Report, milliseconds, seconds

STRENGTH = 0.1
STRONG = 100.0  # times the decay: about exp(−3) a token, as trained models have in their fastest channels
ERROR_BARS = {"o": 6e-3, "dq": 6e-3, "dk": 6e-3, "da": 6e-3, "du": 6e-3, "dg": 1e-2}  # of bfloat16 at T = 512
LONG = 32768  # tokens of a prefill


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The size of a problem; keys and values have the same width."""

    batch: int = 32
    tokens: int = 2048
    heads: int = 6
    width: int = 128


class Raw(dict[str, Tensor]):
    """q, k, v, b, w in bfloat16 and g in float32, such as a layer's projections would be."""

    @staticmethod
    def draw(shape: Shape, device: str) -> Raw:
        """Draw random ones of this shape."""
        full = (shape.batch, shape.tokens, shape.heads, shape.width)
        raw = {name: torch.randn(full, device=device).bfloat16() for name in "qkv"}
        raw["g"] = -torch.nn.functional.softplus(torch.randn(full, device=device) - 4)
        return Raw(raw | {name: torch.rand(full, device=device).bfloat16() for name in "bw"})

    def operands(self, rule: str) -> Operands:
        """Return what a rule gives to the op."""
        q, k = l2_normalize(self["q"]), l2_normalize(self["k"])
        strength = STRENGTH if RULES[rule].strength else None
        return RULES[rule].operands(Projections(q, k, self["v"], self["g"], self["b"], self["w"], strength))


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A function and the leaves it is called with. It is timed alone, and together with its backward pass."""

    leaves: list[Tensor]
    output: Callable[..., Tensor]

    @staticmethod
    def of(tensors: list[Tensor], output: Callable[..., Tensor]) -> Candidate:
        """Make a candidate that differentiates with respect to these tensors."""
        return Candidate(leaves=[x.detach().requires_grad_() for x in tensors], output=output)

    def forward(self) -> None:
        """Run the function without gradients."""
        with torch.no_grad():
            self.output(*self.leaves)

    def forward_backward(self) -> None:
        """Run the function and its backward pass."""
        for x in self.leaves:
            x.grad = None
        o = self.output(*self.leaves)
        o.backward(o.detach())


def candidates(shape: Shape, device: str, impl: str, fla: bool) -> dict[str, Candidate]:
    """Make everything that is timed side by side, by name.

    Args:
        shape: The size of the problem.
        device: Where its tensors are.
        impl: The form of the op.
        fla: Whether flash-linear-attention's GDN-2 is among them.
    """
    raw = Raw.draw(shape, device)

    def op(q: Tensor, k: Tensor, a: Tensor, u: Tensor, g: Tensor) -> Tensor:
        return erase_write(q, k, a, u, g, impl=impl)[0]

    timed = {}
    for rule in ("qed", "gdn2"):
        *operands, g = raw.operands(rule)
        assert g is not None
        timed[f"{rule}, op"] = Candidate.of([*operands, g], op)
        if rule == "qed":
            timed["qed, op, strong decay"] = Candidate.of([*operands, STRONG * g], op)
    timed["qed, operator"] = Candidate.of([raw[name] for name in "qkvgbw"], operator(impl, compiled=False))
    if device.startswith("cuda"):
        timed["qed, operator compiled"] = Candidate.of([raw[name] for name in "qkvgbw"], operator(impl, compiled=True))
    if fla:
        from fla.ops.gdn2 import chunk_gdn2

        def theirs(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, w: Tensor) -> Tensor:
            return chunk_gdn2(q, k, v, g, b, w, use_qk_l2norm_in_kernel=True)[0]

        timed["fla gdn2, operator"] = Candidate.of([raw[name] for name in "qkvgbw"], theirs)
    return timed


@lru_cache
def operator(impl: str, compiled: bool) -> Callable[..., Tensor]:
    """Return QED from raw q, k, v, g, b, w to the output; made once, so that it is compiled once."""

    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, w: Tensor) -> Tensor:
        return qed_attention(q, k, v, g, b, w, STRENGTH, impl=impl)[0]

    return torch.compile(run) if compiled else run


def gate(device: str, impl: str, heads: int, width: int, decay: float = 1.0) -> dict[str, float]:
    """Compare a form in bfloat16 with the float64 chunk form, which itself agrees with the loop to 1e-12.

    Args:
        device: Where to compare.
        impl: The form.
        heads: Heads of the problem, which has 512 tokens.
        width: Channels of a head.
        decay: A factor on the log-decay.

    Returns:
        Relative errors of the output and of the gradients, by name.
    """
    raw = Raw.draw(Shape(batch=2, tokens=512, heads=heads, width=width), device)
    *low, g = Raw(raw | {"g": decay * raw["g"]}).operands("qed")
    assert g is not None
    cotangent = torch.randn_like(raw["v"])

    def results(tensors: list[Tensor], form: str) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in tensors]
        o, _ = erase_write(*leaves, impl=form)
        return [o, *torch.autograd.grad(o, leaves, cotangent.to(o.dtype))]

    computed = results([*low, g], impl)
    truth = results([x.double() for x in (*low, g)], "chunkwise")
    errors = [relative_error(x, y) for x, y in zip(computed, truth, strict=True)]
    return dict(zip(("o", "dq", "dk", "da", "du", "dg"), errors, strict=True))


def passes_gate(device: str, form: str, shape: Shape, decay: float = 1.0) -> dict[str, float]:
    """Return the errors of `gate`; raise GateError if one is larger than its bar.

    Args:
        device: Where to compare.
        form: The form of the op.
        shape: Its heads and width are those of the comparison.
        decay: A factor on the log-decay.
    """
    errors = gate(device, form, shape.heads, shape.width, decay)
    over = {name: error for name, error in errors.items() if not error <= ERROR_BARS[name]}
    if over:
        raise GateError(f"correctness gate: {form} is further from float64 than allowed: {over}")
    return errors


def peak_gib(candidate: Candidate) -> dict[str, float]:
    """Return the most memory allocated during one forward and backward pass: in all, and beyond the inputs."""
    candidate.forward_backward()
    for x in candidate.leaves:
        x.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    candidate.forward_backward()
    peak = torch.cuda.max_memory_allocated()
    return {"peak_gib": peak / 2**30, "peak_beyond_inputs_gib": (peak - before) / 2**30}


def decode_microseconds(shape: Shape, impl: str, steps: int = 100) -> float:
    """Time one decoding step, in place, inside a CUDA graph of many.

    Args:
        shape: The size of the problem, of which one token is decoded.
        impl: The form of the op.
        steps: Steps in the graph.
    """
    token = Raw.draw(replace(shape, tokens=1), "cuda").operands("qed")
    q, k, a, u, g = (x[:, 0].contiguous() for x in token if x is not None)
    state = torch.zeros(shape.batch, shape.heads, shape.width, shape.width, device="cuda")

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
    """Time the first forward and backward pass in a new process with nothing compiled, the import of qed included."""
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


def measure(bench: Bench, *, shape: Shape, impl: str, rounds: int) -> Report:
    """Compare the op with float64, time it, print and write what was found; GateError if it is not right.

    Args:
        bench: Where to run, print and write.
        shape: The size of the problem.
        impl: The form of the op.
        rounds: Calls of each candidate that count.
    """
    raw = Raw.draw(replace(shape, batch=1, tokens=1), bench.device).operands("qed")
    try:
        form = explain(raw.q, raw.k, raw.a, raw.u, raw.g, impl=impl).route
    except RuntimeError as error:
        raise ValueError(f"--impl: expected a form that runs here, got {impl!r}: {error}") from error
    errors = passes_gate(bench.device, form, shape)
    strong = passes_gate(bench.device, form, shape, STRONG)
    title = f"{form}: relative errors against float64, bfloat16, T = 512 | with strong decay"
    bench.print_row(title, {n: f"{e:.1e} | {strong[n]:.1e}" for n, e in errors.items()})
    report = bench.report(shape=asdict(shape), form=form)
    report.add(errors=errors, errors_strong_decay=strong)
    stages = _Stages(bench, report, shape, form, rounds)
    if form == "triton" and bench.on_gpu:
        stages.decoding()
    stages.by_length()
    stages.side_by_side()
    if bench.on_gpu:
        stages.prefill()
    bench.say_written()
    return report


@dataclass(frozen=True)
class _Stages:
    """The stages of the benchmark; each adds what it measured to the report, and prints it."""

    bench: Bench
    report: Report
    shape: Shape
    form: str
    rounds: int

    def decoding(self) -> None:
        """One token at a time; and the first call of all."""
        steps = {batch: decode_microseconds(replace(self.shape, batch=batch), "triton") for batch in (1, 16, 64, 256)}
        self.report.add(decode_us=steps, cold_start_s=cold_start_seconds(self.shape))
        self.bench.print_row("decode step by batch, µs", {str(b): f"{x:.2f}" for b, x in steps.items()})
        cold = self.report["cold_start_s"]
        self.bench.console.print(f"first forward and backward with nothing compiled: {cold:.1f} s")

    def by_length(self) -> None:
        """The same number of tokens in ever longer sequences."""
        total = self.shape.batch * self.shape.tokens
        by_tokens = {}
        for tokens in (self.shape.tokens << i for i in range(0, 6) if self.shape.tokens << i <= total):
            shape = replace(self.shape, batch=total // tokens, tokens=tokens)
            by_tokens[str(tokens)] = candidates(shape, self.bench.device, self.form, fla=False)["qed, op"]
        rows = self._timed(by_tokens)
        self.report.add(lengths=rows)
        medians = {tokens: [f"{x['median']:.2f}" for x in row.values()] for tokens, row in rows.items()}
        title = "QED op by T, batch × T fixed: forward | with backward, ms"
        self.bench.print_row(title, {tokens: " | ".join(x) for tokens, x in medians.items()})

    def side_by_side(self) -> None:
        """All candidates at one shape: time, first call and memory."""
        timed = candidates(self.shape, self.bench.device, self.form, self.bench.fla)
        first = {name: seconds(self.bench.device, c.forward_backward) for name, c in timed.items()}
        rows = {name: row | {"first_call_s": first[name]} for name, row in self._timed(timed).items()}
        ratio = rows["qed, op"]["forward_backward_ms"]["median"] / rows["gdn2, op"]["forward_backward_ms"]["median"]
        self.report.add(candidates=rows, qed_over_gdn2=ratio)
        if self.bench.on_gpu:
            timed.clear()  # each candidate is alone then: the tensors of the others would count
            for name, row in rows.items():
                row |= peak_gib(candidates(self.shape, self.bench.device, self.form, self.bench.fla)[name])
            self.report.add(candidates=rows)
        table = Table("", "forward ms", "forward + backward ms", "first call s", "peak GiB", "beyond inputs")
        table.title = f"{self.form}, {asdict(self.shape)}"
        for name, row in rows.items():
            memory = (f"{row[key]:.2f}" if key in row else "" for key in ("peak_gib", "peak_beyond_inputs_gib"))
            times = (f"{row[key]['median']:.3f}" for key in ("forward_ms", "forward_backward_ms"))
            table.add_row(name, *times, f"{row['first_call_s']:.1f}", *memory)
        self.bench.console.print(table)
        self.bench.console.print(f"QED ÷ GDN-2, forward and backward of the op: {ratio:.3f}")

    def prefill(self) -> None:
        """One long sequence, forward only."""
        timed = candidates(replace(self.shape, batch=1, tokens=LONG), self.bench.device, self.form, self.bench.fla)
        times = self.bench.take_turns({name: c.forward for name, c in timed.items()}, self.rounds)
        self.report.add(**{f"prefill_{LONG}_ms": times})
        title = f"prefill, B = 1, T = {LONG}, ms"
        self.bench.print_row(title, {n: f"{x['median']:.3f}" for n, x in times.items()})

    def _timed(self, timed: dict[str, Candidate]) -> dict[str, dict[str, Any]]:
        """Time forward, and forward with backward, of each candidate."""
        forward = self.bench.take_turns({name: c.forward for name, c in timed.items()}, self.rounds)
        both = self.bench.take_turns({name: c.forward_backward for name, c in timed.items()}, self.rounds)
        return {name: {"forward_ms": forward[name], "forward_backward_ms": both[name]} for name in timed}
