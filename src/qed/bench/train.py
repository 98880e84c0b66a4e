"""`qed bench train`: one training step of the model, beside GDN-2, a Transformer and flash-linear-attention's GDN-2.

A step is `train.step`'s: what `qed train` does with one micro-batch. Tokens are random, since speed does not depend on
them. It does depend on decay, which is slow in a new model and fast in a trained one (`bench.model` says why): both are
timed. The gate is the loss: compiled, and in low precision, it must be that of a plain pass.

How much of the time the GPU is idle is a question about `qed train` itself, with its loader, its log and its batches of
many micro-batches: it is run for a few steps under torch's profiler.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from ..data.prepare import prepare
from ..model.causal_lm import QEDForCausalLM
from ..model.config import QEDConfig
from ..recipes import build
from ..train.loop import train
from ..train.metrics import utilisation
from ..train.step import TrainingStep, autocast, training_step
from .measuring import Bench, GateError, Report, seconds
from .model import decay_faster, fla_model

LOSS_BAR = 2e-3  # relative
IDLE_STEPS, PIECES = 4, 16  # steps of `qed train`, and the micro-batches of each: as many as the paper's batches have
WAIT = 20.0  # µs


def qed_step(
    config: QEDConfig,
    device: str,
    compiled: bool,
    strong_decay: bool = False,
    pool: Any = None,
    recompute: str | None = None,
) -> TrainingStep:
    """Make a training step of our model, whose random weights are always the same.

    Args:
        config: The model's configuration.
        device: Where it trains.
        compiled: Compile the blocks, and on a GPU capture the step.
        strong_decay: Make every chunk decay as far as a trained model's do.
        pool: Graph memory to share with steps that never run at the same time.
        recompute: As in `training_step`.
    """
    torch.manual_seed(0)
    model = QEDForCausalLM(config).to(device)
    model = decay_faster(model) if strong_decay else model
    return training_step(model, device, compiled=compiled, pool=pool, recompute=recompute)


def fla_step(config: QEDConfig, device: str) -> TrainingStep:
    """Make a training step of flash-linear-attention's GDN-2 model, uncompiled."""
    model = fla_model(config, device, torch.float32).train()

    def loss(rows: Tensor) -> Tensor:
        return model(input_ids=rows, labels=rows).loss * (rows.shape[0] * (rows.shape[1] - 1))

    return TrainingStep(model, loss, device)


def transformer(size: dict[str, Any]) -> QEDConfig:
    """Return the configuration of the same stack with softmax attention in every layer."""
    return QEDConfig(**size, layer_types=["full_attention"] * QEDConfig(**size).num_hidden_layers)


def gate(config: QEDConfig, device: str, compiled: bool) -> float:
    """Return the relative difference of the loss of 2 × 257 tokens from that of a plain pass in float32.

    Args:
        config: The model's configuration.
        device: Where to compare.
        compiled: Whether the step that would be timed is compiled.
    """
    rows = torch.randint(3, config.vocab_size, (2, 258), generator=torch.Generator().manual_seed(0)).to(device)
    with torch.no_grad():
        truth = qed_step(config, device, compiled=False).loss(rows)
        candidate = qed_step(config, device, compiled)
        with autocast(device):
            loss = candidate.loss(rows)
    return float((loss - truth).abs() / truth)


def idle(spans: list[tuple[float, float]], shortest: float = 0.0) -> float:
    """Return the share of time in which nothing runs, counting gaps of at least `shortest`.

    `spans` are the start and end of everything that runs, in order of the starts; they may overlap.
    """
    gaps, end = 0.0, spans[0][0]
    for start, stop in spans:
        gaps += start - end if start - end >= shortest else 0.0
        end = max(end, stop)
    return gaps / (end - spans[0][0])


def idle_in_training(size: dict[str, Any], batch: int, tokens: int) -> dict[str, float]:
    """Measure which share of `qed train`'s time the GPU is idle, in its third step and most of its fourth: the first
    ones compile, and a checkpoint comes after the last one.

    Args:
        size: Arguments of QEDConfig.
        batch: Rows of a micro-batch.
        tokens: Tokens of a row.

    Returns:
        The "whole" share, and that of "waits", which are longer than the gap between two kernels.
    """
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
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            train(config, base / "run", device="cuda", console=quiet)
    kernels = sorted((x.time_range.start, x.time_range.end) for x in profiler.events() if x.device_type.name == "CUDA")
    spans = kernels[len(kernels) // 2 : int(0.95 * len(kernels))]
    return {"whole": idle(spans), "waits": idle(spans, WAIT)}


def measure(
    bench: Bench, *, size: dict[str, Any], batch: int, tokens: int, rounds: int, compiled: bool = True
) -> Report:
    """Compare the loss with a plain pass, time a step, print and write what was found; GateError if it is not right.

    Args:
        bench: Where to run, print and write.
        size: Arguments of QEDConfig.
        batch: Rows of a step.
        tokens: Tokens of a row.
        rounds: Steps of each candidate that count.
        compiled: Compile the blocks, and on a GPU capture the step, as `qed train` does.
    """
    config = QEDConfig(**size)
    difference = gate(config, bench.device, compiled)
    bench.console.print(f"relative difference of the loss from a plain float32 pass: {difference:.1e}")
    if not difference <= LOSS_BAR:
        raise GateError(f"correctness gate: the loss is further from a plain pass than {LOSS_BAR}: {difference:.1e}")
    report = bench.report(config=config.to_diff_dict(), batch=batch, tokens=tokens, loss_difference=difference)
    steps: dict[str, TrainingStep] = {}
    rows: dict[str, dict[str, Any]] = {}
    for name, make in _makers(bench, size, compiled).items():
        before = torch.cuda.memory_allocated() if bench.on_gpu else 0
        step = steps[name] = make()
        step.rows = torch.randint(3, config.vocab_size, (batch, tokens + 1), device=bench.device)
        rows[name] = first_steps(bench, step, before)
        report.add(candidates=rows)
    times = bench.take_turns(steps, rounds)
    for name, row in rows.items():
        rate = batch * tokens / times[name]["median"] * 1e3
        row |= {"step_ms": times[name], "tokens_per_s": rate}
        if name != "fla gdn2":
            row["utilisation"] = utilisation(steps[name].model, rate, bench.device)
    report.add(candidates=rows, qed_over_gdn2=times["qed"]["median"] / times["gdn2"]["median"])
    if bench.on_gpu:
        steps.clear()
        torch.cuda.empty_cache()
        report.add(gpu_idle_in_training=idle_in_training(size, batch, tokens))
    _show(bench, report)
    return report


def _makers(bench: Bench, size: dict[str, Any], compiled: bool) -> dict[str, Callable[[], TrainingStep]]:
    """Return what makes each candidate. Ours share the memory of their graphs, since they take turns."""
    pool = torch.cuda.graph_pool_handle() if bench.on_gpu else None
    ours = partial(qed_step, device=bench.device, compiled=compiled, pool=pool)
    makers: dict[str, Callable[[], TrainingStep]] = {
        "qed": partial(ours, QEDConfig(**size, rule="qed")),
        "qed, strong decay": partial(ours, QEDConfig(**size, rule="qed"), strong_decay=True),
        # What the backward recomputes trades memory against speed: least, and most that is not a whole block.
        "qed, light": partial(ours, QEDConfig(**size, rule="qed"), recompute="light"),
        "qed, lean": partial(ours, QEDConfig(**size, rule="qed"), recompute="lean"),
        "gdn2": partial(ours, QEDConfig(**size, rule="gdn2")),
        "softmax attention": partial(ours, transformer(size)),
    }
    if bench.fla:
        makers["fla gdn2"] = partial(fla_step, QEDConfig(**size), bench.device)
    return makers


def first_steps(bench: Bench, step: TrainingStep, before: int) -> dict[str, Any]:
    """Make the first step, which compiles, and on a GPU another: what is captured allocates its memory then.

    Args:
        bench: Where to run.
        step: The step.
        before: Bytes that were allocated before the model was made.

    Returns:
        The seconds of the first step, and on a GPU the most memory that the second one had.
    """
    measured = {"first_step_s": seconds(bench.device, step)}
    if bench.on_gpu:
        torch.cuda.reset_peak_memory_stats()
        step()
        measured["peak_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
        torch.cuda.empty_cache()
    return measured


def _show(bench: Bench, report: Report) -> None:
    table = Table("", "tokens/s", "step ms", "first step s", "peak GiB")
    table.title = f"{report['batch']} × {report['tokens']} tokens a step"
    for name, row in report["candidates"].items():
        peak = f"{row['peak_gib']:.1f}" if "peak_gib" in row else ""
        median = row["step_ms"]["median"]
        table.add_row(name, f"{row['tokens_per_s']:,.0f}", f"{median:.1f}", f"{row['first_step_s']:.1f}", peak)
    bench.console.print(table)
    bench.console.print(f"QED's step ÷ GDN-2's: {report['qed_over_gdn2']:.3f}")
    if "gpu_idle_in_training" in report:
        shares = report["gpu_idle_in_training"]
        waits = f"{shares['waits']:.2%} in waits of {WAIT:.0f} µs or more"
        bench.console.print(f"GPU idle in `qed train`: {shares['whole']:.2%} of the time, {waits}")
    bench.say_written()
