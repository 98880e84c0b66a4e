"""What launches of kernels need. Triton launches on the current device, wherever tensors are; and from version 3.10 on
it multiplies and adds in one instruction only if asked to."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar

import torch

Launch = TypeVar("Launch", bound=Callable[..., Any])
FUSED = {"enable_fp_fusion": True}


def power_of_two(width: int) -> int:
    """The smallest that holds it: tiles have no other widths."""
    return 1 << max(width - 1, 0).bit_length()


@cache
def early(device: torch.device) -> dict[str, Any]:
    """For kernels that can start before the one in front of them is done: whether they do."""
    can = device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"EARLY": True, "launch_pdl": True} if can else {"EARLY": False}


def on_its_device(launch: Launch) -> Launch:
    """Launch with the device of the first argument, a tensor or a tuple that begins with one, as the current one."""

    @wraps(launch)
    def call(first: Any, *more: Any, **options: Any) -> Any:
        x = first[0] if isinstance(first, tuple) else first
        if not x.is_cuda or x.device.index == torch.cuda.current_device():
            return launch(first, *more, **options)
        with torch.cuda.device(x.device):
            return launch(first, *more, **options)

    return call  # type: ignore[return-value]
