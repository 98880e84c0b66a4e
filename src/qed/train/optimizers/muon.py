"""Muon: momentum whose singular values are all brought near 1, for the matrices of the blocks; AdamW for the rest.

    M ← μ M + (1 − μ) G,   D = μ M + (1 − μ) G   (Nesterov)
    W ← (1 − ηw) W − η · 0.2 √max(rows, columns) · NS(D)

NS is the quintic Newton–Schulz iteration X ← aX + (bXXᵀ + c(XXᵀ)²)X from D / ‖D‖_F, which acts on the singular values
alone (K. Jordan, https://kellerjordan.github.io/posts/muon/). The factor gives an update the size that AdamW's usually
have, so that AdamW's learning rate η and weight decay w serve for both (https://arxiv.org/abs/2502.16982).

A weight in which a layer keeps several matrices, one above the other, is updated as these matrices: orthogonalised as
one, the largest of them would decide about the others.

torch.optim.Muon knows of no such parts and always computes in bfloat16.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from ...layers import Mixer, SwiGLU
from . import adamw
from .row import Groups, OptimizerRow

if TYPE_CHECKING:
    from ..config import TrainConfig

A, B, C = 3.4445, -4.7750, 2.0315
ITERATIONS = 5
UPDATE_SIZE = 0.2  # root mean square of an update's entries, times the learning rate
SMALLEST_NORM = 1e-7  # a direction smaller than this is not brought up to size: zero stays zero


@dataclass(frozen=True)
class Settings:
    """What `--set optimizer.NAME=…` changes."""

    momentum: float = 0.95

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError(f"optimizer.momentum: expected a number from 0 to below 1, got {self.momentum}")


def stacked_heights(model: nn.Module) -> dict[str, list[int]]:
    """Weights that are several matrices, one above the other, by name, with the number of rows of each matrix."""
    heights: dict[str, list[int]] = {}
    for name, module in model.named_modules():
        if isinstance(module, Mixer):
            heights[f"{name}.in_proj.weight"] = [rows for rows in module.in_proj_parts().values() if rows]
        elif isinstance(module, SwiGLU):
            rows = module.gate_up_proj.out_features // 2
            heights[f"{name}.gate_up_proj.weight"] = [rows, rows]
    return heights


def groups(model: nn.Module) -> Groups:
    """AdamW's groups, with the matrices of the blocks in one of their own."""
    sorted_ = adamw.groups(model)
    matrices = [(name, x) for name, x in sorted_["decayed"] if ".layers." in name and x.dim() == 2]
    taken = {name for name, _ in matrices}
    rest = [(name, x) for name, x in sorted_["decayed"] if name not in taken]
    return {"matrices": matrices} | sorted_ | {"decayed": rest}


def orthogonalize(stack: Tensor) -> Tensor:
    """Bring all singular values near 1: those of at least 0.003 of a matrix's norm come to lie within 0.68 … 1.21.

    Matrices [N, rows, columns] → as many, in bfloat16 on a GPU and in float32 elsewhere.
    """
    tall = stack.shape[-2] > stack.shape[-1]
    x = stack.mT if tall else stack  # the smaller product of the two
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=SMALLEST_NORM)
    x = x.to(torch.bfloat16 if x.is_cuda else torch.float32)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x.mT if tall else x


def updates(directions: list[Tensor], heights: list[list[int]]) -> list[Tensor]:
    """What is subtracted from weights, but for the learning rate. Parts of one shape are orthogonalised together.

    `heights`: the number of rows of each matrix in a direction.
    """
    parts = [list(x.split(rows)) for x, rows in zip(directions, heights, strict=True)]
    places: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
    for i, matrices in enumerate(parts):
        for j, x in enumerate(matrices):
            places[tuple(x.shape)].append((i, j))
    for shape, where in places.items():
        together = torch.stack([parts[i][j] for i, j in where])
        scaled = orthogonalize(together).to(together.dtype) * (UPDATE_SIZE * math.sqrt(max(shape)))
        for (i, j), update in zip(where, scaled, strict=True):
            parts[i][j] = update
    return [torch.cat(matrices) for matrices in parts]


class Muon(torch.optim.Optimizer):
    """Updates matrices by their orthogonalised momentum. The state is one buffer for each, like its gradient.

    A process that has a shard of a matrix gathers the direction, orthogonalises it like all others, and keeps its rows.
    """

    def __init__(self, parameters: list[tuple[nn.Parameter, list[int]]], **defaults: Any):
        """
        Args:
            parameters: matrices, each with the number of rows of every matrix that is stacked in it.
            defaults: lr, weight_decay, momentum and scale of their group.
        """
        super().__init__([x for x, _ in parameters], defaults)
        self.heights = dict(parameters)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Take one step with the gradients as they are. Nothing waits for the device."""
        if closure is not None:
            raise ValueError("closure: Muon takes gradients that are there, expected None")
        for group in self.param_groups:
            weights = [x for x in group["params"] if x.grad is not None]
            directions = [self._direction(x, group["momentum"]) for x in weights]
            whole = [x.full_tensor() if isinstance(x, DTensor) else x for x in directions]
            for weight, update in zip(weights, updates(whole, [self.heights[x] for x in weights]), strict=True):
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(_sharded_like(weight, update), alpha=-group["lr"])

    def _direction(self, weight: nn.Parameter, momentum: float) -> Tensor:
        state, gradient = self.state[weight], weight.grad
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        return gradient.lerp(state["momentum_buffer"], momentum)


def _sharded_like(weight: Tensor, update: Tensor) -> Tensor:
    if not isinstance(weight, DTensor):
        return update
    mesh = weight.device_mesh
    everywhere = DTensor.from_local(update, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(placements=weight.placements)


def _make(model: nn.Module, config: TrainConfig, settings: Settings) -> list[torch.optim.Optimizer]:
    chosen, heights = groups(model), stacked_heights(model)
    matrices = [(x, heights.get(name, [x.shape[0]])) for name, x in chosen.pop("matrices")]
    options = {"lr": config.learning_rate, "weight_decay": config.weight_decay, "scale": 1.0}
    return [Muon(matrices, **options, momentum=settings.momentum), adamw.adamw(chosen, config)]


ROW = OptimizerRow("muon", groups, _make, Settings)
