"""One process or many: torch's own engine, behind the few things the loop needs.

Under `torchrun` every process has rows of the global batch. "ddp" keeps a copy of the model in each and adds up their
gradients; "fsdp" (FSDP2) shards weights, gradients and moments, block by block. Checkpoints do not know which it was:
torch.distributed.checkpoint gathers the state and the first process writes it whole, so that any number may go on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
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
from torch.nn.parallel import DistributedDataParallel

from ..layers import Mixer
from ..layers.context import Context
from ..model.causal_lm import QEDForCausalLM
from .loss import linear_cross_entropy


class SummedLoss(nn.Module):
    """The model with its loss: rows [B, T + 1] → the sum over their tokens. What is wrapped is what is called."""

    def __init__(self, model: QEDForCausalLM):
        super().__init__()
        self.model = model

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.model.model(rows[:, :-1], use_cache=False).last_hidden_state
        with torch.autocast(hidden.device.type, enabled=False):
            return linear_cross_entropy(hidden.flatten(0, 1), self.model.lm_head.weight, rows[:, 1:].flatten())


def _join(backend: str) -> None:
    """After torchrun has started processes again, addresses of those before are still in its store: look elsewhere."""
    store, rank, world = next(iter(dist.rendezvous("env://")))  # type: ignore[attr-defined]
    attempt = f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    store = dist.PrefixStore(attempt, store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(minutes=10))


class Parallel:
    """`context` processes in a row share their rows of the batch, each with a stretch of every row's tokens."""

    def __init__(self, mode: str, device: str, context: int = 1):
        self.world, self.rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
        self.mode = mode if self.world > 1 else "single"
        self.device = device
        if self.world > 1:
            if device.startswith("cuda"):
                self.device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
                torch.cuda.set_device(self.device)
            if not dist.is_initialized():
                _join("nccl" if device.startswith("cuda") else "gloo")
        elif device.startswith("cuda:"):
            torch.cuda.set_device(device)  # captures and the allocator's figures are the current device's
        if self.world % context:
            raise ValueError(f"context: expected a divisor of {self.world} processes, got {context}")
        self.context_size, self.stretch = context, self.rank % context
        self.batch_rank, self.batch_world = self.rank // context, self.world // context
        self.context: Context | None = None
        if context > 1:
            groups = [dist.new_group(range(first, first + context)) for first in range(0, self.world, context)]
            self.context = Context(groups[self.batch_rank])

    def share(self, rows: Tensor) -> Tensor:
        """My stretch of rows [B, T + 1]: inputs, and one token more for the last one's target."""
        length = (rows.shape[1] - 1) // self.context_size
        return rows[:, self.stretch * length : (self.stretch + 1) * length + 1]

    @property
    def first(self) -> bool:
        return self.rank == 0

    def wrap(self, loss: SummedLoss) -> nn.Module:
        for block in loss.model.model.layers:
            if self.context is not None and not isinstance(block.mixer, Mixer):
                raise ValueError("context: a softmax layer does not spread over processes; expected 1")
            if isinstance(block.mixer, Mixer):
                block.mixer.context = self.context
        if self.mode == "ddp":
            return DistributedDataParallel(loss)
        if self.mode == "fsdp":
            for block in loss.model.model.layers:
                fully_shard(block)
            fully_shard(loss)
        return loss

    @contextmanager
    def piece(self, module: Any, last: bool) -> Iterator[None]:
        """Around the forward and backward of one piece: gradients travel with the last one."""
        if self.mode == "fsdp":
            module.set_requires_gradient_sync(last)
        with module.no_sync() if self.mode == "ddp" and not last else nullcontext():
            yield

    def sum(self, x: Tensor) -> Tensor:
        if self.world > 1:
            dist.all_reduce(x)
        return x

    def any(self, flag: bool) -> bool:
        """Whether it is so in any process: all stop at the same step."""
        if self.world == 1:
            return flag
        return bool(self.sum(torch.tensor(float(flag), device=self.device)))

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def state(self, loss: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Weights and moments by name, whole, on the first process (empty elsewhere)."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights: dict[str, Any] = get_model_state_dict(loss, options=options)
        moments: Any = get_optimizer_state_dict(loss, optimizer, options=options).get("state", {})
        flat = {
            f"{name}/{field}": torch.as_tensor(x) for name, fields in moments.items() for field, x in fields.items()
        }
        return {name.removeprefix("model."): x for name, x in weights.items()}, flat

    def fill(
        self, loss: nn.Module, optimizer: torch.optim.Optimizer, weights: dict[str, Tensor], flat: dict[str, Tensor]
    ) -> None:
        """The inverse of `state`. Every process has read the same files."""
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(loss, {f"model.{name}": x for name, x in weights.items()}, options=options)
        moments: dict[str, Any] = {}
        for key, x in flat.items():
            name, field = key.rsplit("/", 1)
            moments.setdefault(name, {})[field] = x
        if moments:
            groups = get_optimizer_state_dict(loss, optimizer, options=options)["param_groups"]
            state = {"state": moments, "param_groups": groups}
            set_optimizer_state_dict(loss, optimizer, state, options=options)

    def close(self) -> None:
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()
