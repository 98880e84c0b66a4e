"""Tensor parallelism by heads: the blocks that one process of several computes, and its part of every weight.

Every process has some heads of each mixer and some columns of each SwiGLU. It computes them from the whole residual
stream, and what o_proj and down_proj make of them is one summand of the whole block's result: a sum over processes
gives the rest. A block of a process is an ordinary block with fewer heads. What is not cut by heads, the norms and the
bottlenecks of the decay and of the output gate, every process has whole.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from ..layers import Mixer, QEDBlock
from ..model.causal_lm import make_block
from ..model.config import QEDConfig


def check_processes(config: QEDConfig, processes: int) -> None:
    """Raise ValueError unless heads and SwiGLU columns can be divided among so many processes."""
    for name in ("num_heads", "intermediate_size"):
        size = getattr(config, name)
        if size % processes:
            raise ValueError(
                f"tensor_parallel_size: expected a divisor of {name}, which is {size}, got {processes}: "
                "every process has the same number of heads and of columns"
            )


def config_of_process(config: QEDConfig, processes: int) -> QEDConfig:
    """Return the configuration of the blocks that one of so many processes has."""
    check_processes(config, processes)
    own = copy.copy(config)
    own.num_heads //= processes
    own.intermediate_size //= processes
    return own


class Shards:
    """The part of every weight of one layer that belongs to one process."""

    def __init__(self, config: QEDConfig, layer: int, *, rank: int, processes: int):
        """
        Args:
            config: the configuration of the whole model.
            layer: the layer's place in the stack.
            rank: which process this is.
            processes: how many there are.
        """
        with torch.device("meta"):
            whole, own = make_block(config, layer), make_block(config_of_process(config, processes), layer)
        self.rank = rank
        self.parts = {
            name: list(zip(lengths, _parts(own)[name], strict=True)) for name, lengths in _parts(whole).items()
        }
        self.shapes = {name: (x.shape, own.state_dict()[name].shape) for name, x in whole.state_dict().items()}

    def of(self, name: str, weight: Tensor) -> Tensor:
        """Return this process's part of a weight of the layer; ValueError if the layer has no such weight."""
        if name not in self.shapes:
            raise ValueError(f"{name}: not a weight of this layer")
        whole, own = self.shapes[name]
        if weight.shape != whole:
            raise ValueError(f"{name}: expected shape {list(whole)}, got {list(weight.shape)}")
        if name in self.parts:  # several matrices one above the other, each of which is cut by itself
            pieces = weight.split([length for length, _ in self.parts[name]])
            return torch.cat(
                [self._cut(x, (n, *x.shape[1:])) for x, (_, n) in zip(pieces, self.parts[name], strict=True)]
            )
        return self._cut(weight, own)

    def _cut(self, weight: Tensor, shape: tuple[int, ...] | torch.Size) -> Tensor:
        """The part of a weight that has a shape: where that is as large as the weight, all of it."""
        for dimension, size in enumerate(shape):
            if size != weight.shape[dimension]:
                weight = weight.narrow(dimension, self.rank * size, size)
        return weight


def _parts(block: QEDBlock) -> dict[str, list[int]]:
    """The lengths of the matrices that lie one above the other in a weight, for every weight where there are some."""
    gate_up: nn.Linear = block.mlp.gate_up_proj
    parts = {"mlp.gate_up_proj.weight": [gate_up.out_features // 2] * 2}
    if isinstance(block.mixer, Mixer):
        lengths = list(block.mixer.in_proj_parts().values())
        parts |= {"mixer.in_proj.weight": lengths, "mixer.conv.weight": lengths[:3]}
    return parts
