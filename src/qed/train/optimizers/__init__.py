"""Optimisers by name. A file of this folder that defines ROW is one; nothing else has to list it."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...choices import check_choice, nearest
from ..fields import check_type, field_types
from .row import Groups, OptimizerRow

if TYPE_CHECKING:
    from ..config import TrainConfig


def _scan() -> dict[str, OptimizerRow]:
    modules = [import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    return {module.ROW.name: module.ROW for module in modules if hasattr(module, "ROW")}


OPTIMIZERS = _scan()


def settings_of(name: str, values: dict[str, Any]) -> Any:
    """Check the settings given to the optimiser of this name and complete them with its defaults."""
    check_choice("optimizer", name, OPTIMIZERS)
    kind = OPTIMIZERS[name].settings
    known = field_types(kind)
    given = {setting: tuple(x) if isinstance(x, list) else x for setting, x in values.items()}  # JSON has no tuples
    for setting, value in given.items():
        if not known:
            raise ValueError(f"optimizer.{setting}: {name} has no settings of its own, got {value!r}")
        if setting not in known:
            raise ValueError(
                f"optimizer.{setting}: expected a setting of {name}, one of {', '.join(known)}; "
                f"the nearest is {nearest(setting, known)}"
            )
        check_type(f"optimizer.{setting}", known[setting], value)
    return kind(**given)


def groups(model: nn.Module, config: TrainConfig) -> Groups:
    """Every parameter of a model once, by how the run's optimiser updates it."""
    return OPTIMIZERS[config.optimizer].groups(model)


def make(model: nn.Module, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """The torch optimisers that together update all parameters of a model."""
    settings = settings_of(config.optimizer, config.optimizer_settings)
    return OPTIMIZERS[config.optimizer].make(model, config, settings)


def set_rate(optimizers: list[torch.optim.Optimizer], rate: float) -> None:
    """Set the learning rate of every group: the schedule's, times the group's own factor."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate * group["scale"]
