"""Which precision the recurrence is computed and its state kept in."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float64 for float64, and float32 for everything else: the computation and the state have that dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def without_autocast(function: Function) -> Function:
    """Return the same function with torch.autocast turned off on the device of its first argument, which is a tensor or
    a tuple that begins with one.

    The recurrence chooses its own precision. Under autocast torch would run its matrix products in 16 bits, and the
    state with them.
    """

    @wraps(function)
    def call(first: Any, *more: Any, **options: Any) -> Any:
        device = (first[0] if isinstance(first, tuple) else first).device.type
        if not torch.is_autocast_enabled(device):
            return function(first, *more, **options)
        with torch.autocast(device, enabled=False):
            return function(first, *more, **options)

    return call  # type: ignore[return-value]
