"""What the table of optimisers says about one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from ..config import TrainConfig

Groups = dict[str, list[tuple[str, nn.Parameter]]]  # a group's parameters with their names, by the group's name


@dataclass(frozen=True)
class NoSettings:
    """The settings of an optimiser that needs none besides the fields of `TrainConfig`."""


@dataclass(frozen=True)
class OptimizerRow:
    """One optimiser: its file in this folder defines it as ROW."""

    name: str
    groups: Callable[[nn.Module], Groups]  # every parameter of a model once, by how it is updated
    # The torch optimisers that together update all parameters. Every one of their groups has a "scale", by which the
    # schedule's learning rate is multiplied. The third argument is an instance of `settings`.
    make: Callable[[nn.Module, TrainConfig, Any], list[torch.optim.Optimizer]]
    settings: type = NoSettings  # a frozen dataclass: `--set optimizer.FIELD=…`, each with a default
