"""One process or many: torch.distributed, behind the few operations the loop needs.

Under `torchrun` every process has some rows of the global batch. "ddp" (distributed data parallel) keeps a copy of the
model in each process and adds up their gradients; "fsdp" (FSDP2) shards weights, gradients and the optimiser's state,
block by block. A checkpoint does not depend on it: torch.distributed.checkpoint gathers the state and the first process
writes it whole, so that any number of processes can resume.

torch's DistributedDataParallel exchanges gradients while the backward pass runs, which cannot be captured as a CUDA
graph without care. Here the pieces of a batch are captured as on one GPU, and gradients, which lie side by side in
memory, are added up by a single call after the last piece.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from ..layers import Mixer
from ..layers.context import Context
from .objective import SummedLoss

ALIGNED = 64  # numbers; every gradient begins at a multiple of so many, as memory that torch allocates does
_TRAININGS = count()  # of this process, which joins the others for each


class Gradients:
    """The gradients of a model side by side in memory, so that one call adds them up over processes."""

    def __init__(self, parameters: Iterable[nn.Parameter]):
        self.parameters = [x for x in parameters if x.requires_grad]
        sizes = [-(-x.numel() // ALIGNED) * ALIGNED for x in self.parameters]
        self.whole = torch.zeros(sum(sizes), dtype=torch.float32, device=self.parameters[0].device)
        parts = self.whole.split(sizes)
        self.each = [part[: x.numel()].view(x.shape) for x, part in zip(self.parameters, parts, strict=True)]
        for x, gradient in zip(self.parameters, self.each, strict=True):
            x.grad = gradient

    def sum(self) -> None:
        """Add them up over all processes. RuntimeError if a gradient was put elsewhere, and would be left out."""
        if any(x.grad is not gradient for x, gradient in zip(self.parameters, self.each, strict=True)):
            raise RuntimeError("a parameter's gradient has been replaced: with parallel=ddp gradients stay in place")
        dist.all_reduce(self.whole)


def _join(backend: str) -> None:
    """Join the other processes. When torchrun restarts them, or they train again, its store still has the addresses of
    those before; a prefix of its own for every attempt keeps them apart."""
    store, rank, world = next(iter(dist.rendezvous("env://")))  # type: ignore[attr-defined]
    attempt = f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}, training {next(_TRAININGS)}"
    store = dist.PrefixStore(attempt, store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(minutes=10))


class Parallel:
    """This process among all that train one model, as torchrun's environment variables describe it."""

    def __init__(self, mode: str, device: str, context: int = 1):
        """
        Args:
            mode: "ddp" or "fsdp"; it makes no difference to a process that torchrun has not started.
            device: "cpu" or "cuda"; of several processes each takes the GPU of its local rank.
            context: how many processes, next to each other, share rows, each with a stretch of every row's tokens.
        """
        self.world, self.rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
        self.mode = mode if "WORLD_SIZE" in os.environ else "single"  # under torchrun one process is a world too
        self.device = device
        self.gradients: Gradients | None = None  # with "ddp"
        if self.mode != "single":
            if device.startswith("cuda"):
                self.device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
                torch.cuda.set_device(self.device)
            if not dist.is_initialized():
                _join("nccl" if device.startswith("cuda") else "gloo")
        elif device.startswith("cuda:"):
            torch.cuda.set_device(device)  # graphs are captured and memory is counted on the current device
        if self.world % context:
            raise ValueError(f"context: expected a divisor of {self.world} processes, got {context}")
        self.context_size, self.stretch = context, self.rank % context
        self.batch_rank, self.batch_world = self.rank // context, self.world // context
        self.context: Context | None = None
        if context > 1:
            groups = [dist.new_group(range(first, first + context)) for first in range(0, self.world, context)]
            self.context = Context(groups[self.batch_rank])

    def share(self, rows: Tensor) -> Tensor:
        """This process's stretch of rows [B, T + 1]: its inputs, and one token more as the last one's target."""
        length = (rows.shape[1] - 1) // self.context_size
        return rows[:, self.stretch * length : (self.stretch + 1) * length + 1]

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes files and messages."""
        return self.rank == 0

    def wrap(self, loss: SummedLoss) -> nn.Module:
        """Prepare the model for several processes: what is returned is called in its place."""
        for block in loss.model.model.layers:
            if self.context is not None and not isinstance(block.mixer, Mixer):
                raise ValueError("context: a softmax layer does not spread over processes; expected 1")
            if isinstance(block.mixer, Mixer):
                block.mixer.context = self.context
        if self.mode == "ddp":
            for x in (*loss.parameters(), *loss.buffers()):
                dist.broadcast(x.data, 0)
        if self.mode == "fsdp":
            for block in loss.model.model.layers:
                fully_shard(block)
            fully_shard(loss)
        return loss

    @property
    def can_be_captured(self) -> bool:
        """Whether the pieces of a batch run without the other processes."""
        return self.mode != "fsdp" and self.context is None

    def prepare_gradients(self, loss: nn.Module) -> None:
        """Make the memory that gradients are added up in. The optimisers' state has to be there before."""
        if self.mode == "ddp":
            self.gradients = Gradients(loss.parameters())

    def before_piece(self, loss: Any, last: bool) -> None:
        """Say whether a piece is the last one of the batch, in whose backward pass FSDP exchanges gradients."""
        if self.mode == "fsdp":
            loss.set_requires_gradient_sync(last)

    def sum_gradients(self) -> None:
        """Add up the gradients of all processes after the last piece of a batch, where FSDP has not done it."""
        if self.gradients is not None:
            self.gradients.sum()

    @property
    def divisor(self) -> int:
        """What gradients are divided by when they are exchanged: FSDP averages them."""
        return self.world if self.mode == "fsdp" else 1

    def sum(self, x: Tensor) -> Tensor:
        """Add up a tensor over all processes, in place."""
        if self.mode != "single":
            dist.all_reduce(x)
        return x

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process, so that all stop at the same step."""
        if self.mode == "single":
            return flag
        return bool(self.sum(torch.tensor(float(flag), device=self.device)))

    def barrier(self) -> None:
        """Wait until all processes have come here."""
        if self.mode != "single":
            dist.barrier()

    def state(self, loss: nn.Module, optimizers: list[Optimizer]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Weights and the optimisers' state by name, whole, on the first process (empty on the others)."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights: dict[str, Any] = get_model_state_dict(loss, options=options)
        state: Any = get_optimizer_state_dict(loss, optimizers, options=options).get("state", {})
        flat = {f"{name}/{field}": torch.as_tensor(x) for name, fields in state.items() for field, x in fields.items()}
        return {name.removeprefix("model."): x for name, x in weights.items()}, flat

    def fill(
        self, loss: nn.Module, optimizers: list[Optimizer], weights: dict[str, Tensor], flat: dict[str, Tensor]
    ) -> None:
        """Set weights and the optimisers' state to what `state` returned.

        Args:
            loss: the module, as `wrap` returned it.
            optimizers: those whose state is set.
            weights: all weights by name; every process has read the same files.
            flat: the optimisers' state by parameter and field, "name/field".
        """
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(loss, {f"model.{name}": x for name, x in weights.items()}, options=options)
        state: dict[str, Any] = {}
        for key, x in flat.items():
            name, field = key.rsplit("/", 1)
            state.setdefault(name, {})[field] = x
        if state:
            groups = get_optimizer_state_dict(loss, optimizers, options=options)["param_groups"]
            set_optimizer_state_dict(loss, optimizers, {"state": state, "param_groups": groups}, options=options)

    def close(self) -> None:
        """Leave the other processes."""
        if self.mode != "single" and dist.is_initialized():
            dist.destroy_process_group()
