"""One training step by itself, without a run around it: benchmarks time it, and `qed reproduce` estimates hours by it.

A step is what `qed train` does with one micro-batch: forward, loss without logits, backward, clipping, AdamW.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..model.causal_lm import QEDForCausalLM, compile_blocks, recompute_cheap
from ..model.config import QEDConfig
from ..ops import value_checks
from . import optimizers
from .captured import Captured
from .config import TrainConfig
from .objective import SummedLoss


class TrainingStep:
    """A model, its optimiser and a micro-batch, `rows`; calling it makes one step.

    Args:
        model: The model to train, in float32 on `device`.
        loss: Returns the summed loss of rows [B, T + 1].
        device: Where the model is; on a GPU the forward pass runs under autocast in bfloat16.
        captured: If given, forward and backward are captured as a CUDA graph after the first step, as in `qed train`.
    """

    def __init__(self, model: Any, loss: Callable[[Tensor], Tensor], device: str, captured: Captured | None = None):
        self.model, self.loss, self.device, self.captured = model, loss, device, captured
        self.optimizers = optimizers.make(model, TrainConfig(name="step", data=""))
        self.rows = torch.zeros(1, 2, dtype=torch.long, device=device)

    def __call__(self) -> None:
        if self.captured:
            self.captured(self._forward_backward, self.rows)
        else:
            self._forward_backward(self.rows)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=self.captured is None)

    def _forward_backward(self, rows: Tensor) -> Tensor:
        with autocast(self.device), value_checks(False):
            loss = self.loss(rows)
        (loss / rows[:, 1:].numel()).backward()
        return loss.detach()


def autocast(device: str) -> torch.autocast:
    """Return the precision of a training step: products in bfloat16 on a GPU, float32 elsewhere."""
    return torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=device.startswith("cuda"))


def recompute_in_backward(model: QEDForCausalLM, how: str) -> None:
    """Let the backward pass recompute what `activation_checkpointing` says: "none", "light", "cheap", "lean" or
    "full"."""
    if how == "full":
        # Blocks draw no random numbers, so that no generator's state has to be kept for the second forward.
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    elif how != "none":
        recompute_cheap(model, how)


def training_step(
    model: QEDForCausalLM, device: str, *, compiled: bool, pool: Any = None, recompute: str | None = None
) -> TrainingStep:
    """Make a step of one of our models, as `qed train` would run it.

    Args:
        model: The model, on `device`; it is compiled in place.
        device: Where it runs.
        compiled: Compile the blocks, and on a GPU capture the step as a CUDA graph.
        pool: Graph memory to share with steps that never run at the same time.
        recompute: What the backward pass recomputes, as in `recompute_in_backward`; None for "cheap" in a compiled
            model and nothing in another.
    """
    model.train()
    recompute_in_backward(model, recompute or ("cheap" if compiled else "none"))
    if compiled:
        compile_blocks(model)
    captured = Captured(pool) if compiled and device.startswith("cuda") else None
    return TrainingStep(model, SummedLoss(model), device, captured)


def tokens_per_second(config: QEDConfig, device: str, *, shape: tuple[int, int], compiled: bool) -> float:
    """Measure how many tokens a second a model trains, from a few steps on random tokens.

    Args:
        config: The model, which is made with random weights.
        device: Where to train.
        shape: Rows of a micro-batch, and tokens of a row.
        compiled: As in `training_step`.
    """
    rows, tokens = shape
    step = training_step(QEDForCausalLM(config).to(device), device, compiled=compiled)
    step.rows = torch.randint(3, config.vocab_size, (rows, tokens + 1), device=device)
    times = []
    for _ in range(6 if device.startswith("cuda") else 2):
        start = time.perf_counter()
        step()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    del step
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
    return rows * tokens / min(times)
