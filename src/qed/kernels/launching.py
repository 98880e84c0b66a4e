"""What all launches of kernels need.

Triton launches on the current device, wherever the tensors are. From version 3.10 on it fuses a multiplication with an
addition only if it is asked to.

Before Triton launches a kernel, it looks for the compiled one among those that it has for other arguments. On the host
this takes some 40 µs, longer than many kernels run, so here it is done once for each kind of arguments (`Prepared`).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, wraps
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import Tensor

Launch = TypeVar("Launch", bound=Callable[..., Any])
FUSED = {"enable_fp_fusion": True}
ALIGNED = 16  # what Triton looks at: are an address in bytes and a whole number divisible by this?


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


class Prepared:
    """A kernel with its constants and options, which is launched for tensors and numbers by a call.

    The first launch for a kind of arguments goes through Triton, which compiles the kernel if it has to. Later ones
    launch the compiled kernel that Triton returned. What a kind of arguments is says `kind_of`. Launches go through
    Triton each time in its interpreter, with AMD's GPUs, where a kind also depends on the size of tensors, and while
    something is switched on that has Triton compile or call more than the kernel itself.
    """

    def __init__(self, kernel: Any, **constants: Any):
        self.kernel, self.constants = kernel, constants
        self.is_compiled = hasattr(kernel, "device_caches")  # the interpreter's kernels have none
        self._can_keep = self.is_compiled and torch.version.hip is None
        self._kept: dict[tuple[Any, ...], Any] = {}
        self._knobs = import_module("triton").knobs  # a kernel is here, so Triton is imported already

    def __call__(self, grid: tuple[int, ...], *arguments: Any) -> None:
        """Launch the kernel on the current device and stream.

        Args:
            grid: how many programs there are, in one, two or three dimensions.
            arguments: the kernel's parameters in front of its constants, in their order.
        """
        kind, values = kind_of(arguments) if self._can_keep and not self._is_watched() else (None, [])
        kept = None if kind is None else self._kept.get(kind)
        if kept is not None:
            constants, kernel = kept
            kernel[(*grid, 1, 1)[:3]](*values, *constants)
            return
        kernel = self.kernel[grid](*arguments, **self.constants)
        if kind is not None and kernel is not None:
            kernel = kernel.result() if hasattr(kernel, "result") else kernel  # one that is compiled in the background
            names = self.kernel.arg_names[len(arguments) :]
            self._kept[kind] = [self.constants[name] for name in names], kernel

    def _is_watched(self) -> bool:
        """Return whether Triton has to be asked at every launch: for functions to call beforehand, checks on a device,
        a profiler's code inside kernels, or changed stages of compilation. Functions that are called around a launch
        are called for a compiled kernel too."""
        runtime = self._knobs.runtime
        return bool(
            self.kernel.pre_run_hooks
            or runtime.debug
            or self._knobs.compilation.instrumentation_mode
            or getattr(runtime, "add_stages_inspection_hook", None)
        )


def compile_together(kernels: list[Prepared], arguments: tuple[Any, ...]) -> None:
    """Compile kernels for the same arguments in parallel, where they are compiled at all."""
    kernels = [x for x in kernels if x.is_compiled]
    if kernels:
        with ThreadPoolExecutor(len(kernels)) as threads, import_module("triton").AsyncCompileMode(threads):
            for x in kernels:
                x.kernel.warmup(*arguments, grid=(1,), **x.constants)


def kind_of(arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...] | None, list[Any]]:
    """Return what Triton compiles a kernel for, and the arguments as a compiled kernel takes them, with addresses for
    tensors.

    Triton compiles a kernel once for every device, dtype of a tensor and type of a number, and for whether an address
    is divisible by 16 and a whole number is 1, is divisible by 16, or does not fit 32 bits or 64 bits with a sign.
    Other kinds of objects are not known here: then None is returned for the kind.
    """
    kind: list[Any] = []
    values: list[Any] = []
    for x in arguments:
        if isinstance(x, Tensor):
            address = x.data_ptr()
            kind += (x.dtype, x.get_device(), address % ALIGNED)  # the rest, which is 0 or not, takes least time
            values.append(address)
            continue
        if x is None:
            kind.append(None)
        elif type(x) is int:
            bits = 32 if -(2**31) <= x < 2**31 else 64 if x < 2**63 else 65
            kind.append(1 if x == 1 else bits if x % ALIGNED else -bits)
        elif type(x) in (float, bool):
            kind.append(type(x))
        else:
            return None, []
        values.append(x)
    return tuple(kind), values
