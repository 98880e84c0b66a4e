"""What all launches of kernels need.

Triton launches on the current device, wherever the tensors are. From version 3.10 on it fuses a multiplication with an
addition only if it is asked to.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar

import torch

Launch = TypeVar("Launch", bound=Callable[..., Any])
FUSED = {"enable_fp_fusion": True}


def power_of_two(width: int) -> int:
    """Return the smallest power of two that is at least `width`: a tile can have no other width."""
    return 1 << max(width - 1, 0).bit_length()


@cache
def early(device: torch.device) -> dict[str, Any]:
    """Return the options of kernels that can start before the kernel in front of them is done. On GPUs that support it
    (programmatic dependent launch, from Hopper on) they do."""
    can = device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"EARLY": True, "launch_pdl": True} if can else {"EARLY": False}


def on_its_device(launch: Launch) -> Launch:
    """Return `launch` with the device of its first argument made the current one. That argument is a tensor, or a tuple
    that begins with one."""

    @wraps(launch)
    def call(first: Any, *more: Any, **options: Any) -> Any:
        x = first[0] if isinstance(first, tuple) else first
        if not x.is_cuda or x.device.index == torch.cuda.current_device():
            return launch(first, *more, **options)
        with torch.cuda.device(x.device):
            return launch(first, *more, **options)

    return call  # type: ignore[return-value]
