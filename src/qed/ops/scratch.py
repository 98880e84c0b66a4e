"""Named buffers for a slab's temporaries, reused from slab to slab and, on CPU, from call to call.

On CPU the first touch of fresh memory costs ten times the arithmetic on it, and the system's allocator gives
buffers of this size back as soon as they are free. A slab's size is bounded, so these buffers are too: they take some
tens of MB for each thread that has run the chunk form. On a GPU torch's own allocator keeps memory, so no buffer
outlives a call.
"""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor

_thread = threading.local()


class Scratch:
    """Buffers of one device and dtype by name; calling it with a name and a shape returns a tensor of that shape."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self._device, self._dtype = device, dtype
        self._buffers: dict[str, Tensor] = {}

    @staticmethod
    def lent(device: torch.device, dtype: torch.dtype) -> Scratch:
        """Return this thread's buffers, or on a GPU new ones. There are never two users at a time, because the forward
        and the backward of the op each run to their end."""
        if device.type != "cpu":
            return Scratch(device, dtype)
        kept: dict[torch.dtype, Scratch] = _thread.__dict__.setdefault("scratch", {})
        return kept.setdefault(dtype, Scratch(device, dtype))

    def __call__(self, name: str, *shape: int) -> Tensor:
        """Return an uninitialised tensor, whose content lasts until the same name is asked for again."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            with torch.inference_mode(False):  # a buffer born in inference mode could not be written outside it
                buffer = self._buffers[name] = torch.empty(size, dtype=self._dtype, device=self._device)
        return buffer[:size].view(shape)
