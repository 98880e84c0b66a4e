"""`qed bench train`: one training step of the model, beside GDN-2, a Transformer and flash-linear-attention's GDN-2.

A step is what `qed train` does with a piece of a batch: forward, loss without logits, backward, clipping, AdamW. Tokens
are random: speed does not depend on them. It does on decay, which is slow in a new model and fast in a trained one
(`bench_model` says why): both are timed. The gate is the loss: compiled, in low precision, it must be a plain pass's.

How much of the time the GPU is idle is a question about `qed train` itself, with its loader, its log and its batches of
many pieces: it is run for a few steps under torch's profiler.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from .bench import GateError, Report, take_turns
from .bench_model import decay_faster, theirs
from .data.prepare import prepare
from .model.causal_lm import QEDForCausalLM, compile_blocks, recompute_cheap
from .model.config import QEDConfig
from .ops import value_checks
from .recipes import build
from .testing import environment
from .train import optimizers
from .train.captured import Captured
from .train.loop import train
from .train.metrics import utilisation
from .train.objective import SummedLoss

LOSS_BAR = 2e-3  # relative
IDLE_STEPS, PIECES = 4, 16  # of `qed train`, and of each of its batches: the paper's
WAIT = 20.0  # µs


class Step:
    """A model, its optimiser and one step: captured, after the first, as `qed train` does it, or as is."""

    def __init__(self, model: Any, loss: Callable[[Tensor], Tensor], device: str, captured: Captured | None = None):
        self.model, self.loss, self.device, self.captured = model, loss, device, captured
        self.optimizers = optimizers.make(model, build("mini", {"data": "none"}))
        self.rows = torch.zeros(1, 2, dtype=torch.long, device=device)

    def __call__(self) -> None:
        if self.captured:
            self.captured(self.piece, self.rows)
        else:
            self.piece(self.rows)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=self.captured is None)

    def piece(self, rows: Tensor) -> Tensor:
        with _autocast(self.device), value_checks(False):
            loss = self.loss(rows)
        (loss / rows[:, 1:].numel()).backward()
        return loss.detach()


def _autocast(device: str) -> torch.autocast:
    return torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=device.startswith("cuda"))


def ours(config: QEDConfig, device: str, compiled: bool, strong_decay: bool = False, pool: Any = None) -> Step:
    torch.manual_seed(0)
    model = QEDForCausalLM(config).to(device).train()
    if strong_decay:
        decay_faster(model)
    if compiled:
        recompute_cheap(model)
        compile_blocks(model)
    return Step(model, SummedLoss(model), device, Captured(pool) if compiled and device.startswith("cuda") else None)


def transformer(size: dict[str, Any]) -> QEDConfig:
    """The same stack with softmax attention in every layer."""
    return QEDConfig(**size, layer_types=["full_attention"] * QEDConfig(**size).num_hidden_layers)


def fla_step(config: QEDConfig, device: str) -> Step:
    model = theirs(config, device, torch.float32).train()

    def loss(rows: Tensor) -> Tensor:
        return model(input_ids=rows, labels=rows).loss * (rows.shape[0] * (rows.shape[1] - 1))

    return Step(model, loss, device)


def gate(config: QEDConfig, device: str, compiled: bool) -> float:
    """Relative difference of the loss on 2 × 257 tokens from a plain pass in float32."""
    rows = torch.randint(3, config.vocab_size, (2, 258), generator=torch.Generator().manual_seed(0)).to(device)
    with torch.no_grad():
        truth = ours(config, device, compiled=False).loss(rows)
        candidate = ours(config, device, compiled)
        with _autocast(device):
            found = candidate.loss(rows)
    return float((found - truth).abs() / truth)


def idle(spans: list[tuple[float, float]], shortest: float = 0.0) -> float:
    """The share of time in which nothing runs, `shortest` or longer at a time, of what runs from when to when, in order
    of its start."""
    gaps, end = 0.0, spans[0][0]
    for start, stop in spans:
        gaps += start - end if start - end >= shortest else 0.0
        end = max(end, stop)
    return gaps / (end - spans[0][0])


def idle_in_training(size: dict[str, Any], batch: int, tokens: int) -> dict[str, float]:
    """The share of `qed train`'s third step and most of its fourth in which the GPU has nothing to do: the first ones
    compile, and after the last one comes a checkpoint. In all, and in waits longer than from one kernel to the next."""
    quiet = Console(quiet=True)
    with TemporaryDirectory() as folder:
        base = Path(folder)
        prepare("synthetic:20000", tokenizer="words:512", out=base / "data", console=quiet)
        piece = batch * tokens
        total = IDLE_STEPS * PIECES * piece
        config = dataclasses.replace(
            build("paper_340m", {"data": str(base / "data")}),
            model=size,
            sequence=tokens,
            batch_tokens=PIECES * piece,
            micro_tokens=piece,
            total_tokens=total,
            decay_start_tokens=total,
        )
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            train(config, base / "run", device="cuda", console=quiet)
    kernels = sorted((x.time_range.start, x.time_range.end) for x in found.events() if x.device_type.name == "CUDA")
    spans = kernels[len(kernels) // 2 : int(0.95 * len(kernels))]
    return {"whole": idle(spans), "waits": idle(spans, WAIT)}


def measure(
    console: Console,
    *,
    out: Path | None,
    device: str,
    size: dict[str, Any],
    fla: bool,
    rounds: int,
    batch: int,
    tokens: int,
    compiled: bool = True,
) -> dict[str, Any]:
    """Gate, time, print, write. Raises GateError if the gate is not passed."""
    difference = gate(QEDConfig(**size), device, compiled)
    console.print(f"relative difference of the loss from a plain float32 pass: {difference:.1e}")
    if not difference <= LOSS_BAR:
        raise GateError(f"correctness gate: the loss is further from a plain pass than {LOSS_BAR}: {difference:.1e}")
    report = Report(out, environment=environment(device), batch=batch, tokens=tokens, loss_difference=difference)
    pool = torch.cuda.graph_pool_handle() if device.startswith("cuda") else None  # they take turns

    def mine(config: QEDConfig, strong_decay: bool = False) -> Callable[[], Step]:
        return lambda: ours(config, device, compiled, strong_decay, pool)

    makers: dict[str, Callable[[], Step]] = {
        "qed": mine(QEDConfig(**size, rule="qed")),
        "qed, strong decay": mine(QEDConfig(**size, rule="qed"), strong_decay=True),
        "gdn2": mine(QEDConfig(**size, rule="gdn2")),
        "softmax attention": mine(transformer(size)),
    }
    if fla:
        makers["fla gdn2"] = lambda: fla_step(QEDConfig(**size), device)
    steps, rows = {}, {}
    for name, make in makers.items():
        before = torch.cuda.memory_allocated() if device.startswith("cuda") else 0
        step = steps[name] = make()
        step.rows = torch.randint(3, QEDConfig(**size).vocab_size, (batch, tokens + 1), device=device)
        start = time.perf_counter()
        step()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        rows[name] = {"first_step_s": time.perf_counter() - start}
        if device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats()
            step()  # what is captured takes its memory now
            rows[name]["peak_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
            torch.cuda.empty_cache()
        report.add(candidates=rows)
    times = take_turns(device, steps, rounds, console)
    for name, row in rows.items():
        rate = batch * tokens / times[name]["median"] * 1e3
        row |= {"step_ms": times[name], "tokens_per_s": rate}  # type: ignore[dict-item]
        if name != "fla gdn2":
            row["utilisation"] = utilisation(steps[name].model, rate, device)  # type: ignore[assignment]
    report.add(candidates=rows, qed_over_gdn2=times["qed"]["median"] / times["gdn2"]["median"])
    if device.startswith("cuda"):
        steps.clear()
        torch.cuda.empty_cache()
        report.add(gpu_idle_in_training=idle_in_training(size, batch, tokens))
    table = Table("", "tokens/s", "step ms", "first step s", "peak GiB", title=f"{batch} × {tokens} tokens a step")
    for name, row in rows.items():
        peak = f"{row['peak_gib']:.1f}" if "peak_gib" in row else ""
        median = times[name]["median"]
        table.add_row(name, f"{row['tokens_per_s']:,.0f}", f"{median:.1f}", f"{row['first_step_s']:.1f}", peak)
    console.print(table)
    console.print(f"QED's step ÷ GDN-2's: {report['qed_over_gdn2']:.3f}")
    if "gpu_idle_in_training" in report:
        found = report["gpu_idle_in_training"]
        waits = f"{found['waits']:.2%} in waits of {WAIT:.0f} µs or more"
        console.print(f"GPU idle in `qed train`: {found['whole']:.2%} of the time, {waits}")
    if out is not None:
        console.print(f"written to {out}")
    return report
