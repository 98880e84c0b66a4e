"""What the ops accept. An error names the argument, what was expected and what came.

Checks on shapes, dtypes and devices always run. Checks that read values (g > 0, NaN in a state, cu_seqlens that
go backwards) run by default on CPU tensors only: elsewhere they would wait for the device, so they are opt-in
through `value_checks`. A form that reads cu_seqlens on the host anyway checks it there; the kernels check it on the
device, where a wrong one stops the program with a device-side assertion.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise

import torch
from torch import Tensor

from .arguments import Arguments
from .precision import compute_dtype

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

_value_checks: ContextVar[bool | None] = ContextVar("qed_value_checks", default=None)


@contextmanager
def value_checks(enabled: bool) -> Iterator[None]:
    """Turn the checks that read values on (on any device) or off (on CPU too) inside a `with` block."""
    token = _value_checks.set(enabled)
    try:
        yield
    finally:
        _value_checks.reset(token)


def check_sequence(x: Arguments) -> None:
    """Check shapes, dtypes and devices of `erase_write`'s arguments."""
    q, k, a, u, g, initial_state, cu_seqlens, scale = x
    _check_inputs("[B, T, H, K]", q=q, k=k, a=a, u=u, g=g, scale=scale)
    sequences = q.shape[0]
    if cu_seqlens is not None:
        _check_tensor("cu_seqlens", cu_seqlens)
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                "cu_seqlens: expected a 1-D int32 or int64 tensor of at least two offsets, "
                f"got shape {list(cu_seqlens.shape)} of {cu_seqlens.dtype}"
            )
        if q.shape[0] != 1:
            raise ValueError(f"cu_seqlens: packed sequences need batch size 1, got q of shape {list(q.shape)}")
        _check_device("cu_seqlens", cu_seqlens, q)
        sequences = cu_seqlens.shape[0] - 1
    if initial_state is not None:
        _check_state("initial_state", initial_state, (sequences, *q.shape[2:], u.shape[-1]), q)


def check_step(q: Tensor, k: Tensor, a: Tensor, u: Tensor, g: Tensor | None, state: Tensor, scale: float) -> None:
    """Check shapes, dtypes and devices of `erase_write_step`'s arguments.

    Args:
        q, k, a: expected as [B, H, K].
        u: expected as [B, H, V].
        g: expected as [B, H, K], [B, H, 1] or None.
        state: expected as [B, H, K, V].
        scale: expected to be 0 or of a size that the computation can hold.
    """
    _check_inputs("[B, H, K]", q=q, k=k, a=a, u=u, g=g, scale=scale)
    _check_state("state", state, (*q.shape, u.shape[-1]), q)


def check_values(g: Tensor | None, state: Tensor | None, cu_seqlens: Tensor | None, tokens: int, name: str) -> None:
    """Run the checks that read values, where these are enabled.

    Args:
        g: log-decays, which must not be positive or NaN.
        state: a state, which must be finite.
        cu_seqlens: offsets of packed sequences.
        tokens: how many tokens these sequences have to fill.
        name: what the caller calls the state.
    """

    def wanted(x: Tensor | None) -> bool:
        enabled = _value_checks.get()
        return x is not None and (x.device.type == "cpu" if enabled is None else enabled)

    if g is not None and wanted(g) and g.numel():
        largest = float(g.detach().max())  # NaN if any is
        if not largest <= 0:
            raise ValueError(f"g: expected log-decays ≤ 0 (−inf allowed), got a maximum of {largest:.6g}")
    if state is not None and wanted(state) and not bool(state.isfinite().all()):
        bad = int((~state.isfinite()).sum())
        raise ValueError(f"{name}: expected finite values, got {bad} NaN or infinite of {state.numel()}")
    if cu_seqlens is not None and wanted(cu_seqlens):
        offsets_of(cu_seqlens, tokens)


def offsets_of(cu_seqlens: Tensor, tokens: int) -> list[int]:
    """Return `cu_seqlens` as a list, after a check that they are offsets of sequences that fill T tokens. If they are
    on a GPU, the host waits for it."""
    offsets: list[int] = cu_seqlens.tolist()
    if offsets[0] != 0 or offsets[-1] != tokens or any(end < start for start, end in pairwise(offsets)):
        raise ValueError(
            f"cu_seqlens: expected offsets that start at 0, never decrease and end at T = {tokens}, "
            f"got {_shortened(offsets)}"
        )
    return offsets


def _check_inputs(layout: str, *, q: Tensor, k: Tensor, a: Tensor, u: Tensor, g: Tensor | None, scale: float) -> None:
    for name, x in (("q", q), ("k", k), ("a", a), ("u", u), ("g", g)):
        if x is not None:
            _check_tensor(name, x)
    shape, dtype, dims = q.shape, q.dtype, layout.count(",") + 1  # asked for once: every call of the op comes here
    if len(shape) != dims:
        raise ValueError(f"q: expected shape {layout}, got {list(shape)}")
    for name, x in (("k", k), ("a", a)):
        if x.shape != shape:
            raise ValueError(f"{name}: expected q's shape {list(shape)}, got {list(x.shape)}")
    if u.dim() != dims or u.shape[:-1] != shape[:-1]:
        raise ValueError(f"u: expected shape {list(shape[:-1])} + [V], got {list(u.shape)}")
    if shape[-1] == 0 or u.shape[-1] == 0:
        raise ValueError(f"q, u: expected K and V of at least 1, got {shape[-1]} and {u.shape[-1]}")
    if dtype not in DTYPES:
        raise TypeError(f"q: expected one of {', '.join(map(str, DTYPES))}, got {dtype}")
    for name, x in (("k", k), ("a", a), ("u", u)):
        if x.dtype != dtype:
            raise TypeError(f"{name}: expected q's dtype {dtype}, got {x.dtype}")
        _check_device(name, x, q)
    if g is not None:
        if g.shape not in (shape, (*shape[:-1], 1)):
            raise ValueError(
                f"g: expected {list(q.shape)} (per channel) or {[*q.shape[:-1], 1]} (per head), got {list(g.shape)}"
            )
        if g.dtype not in (q.dtype, compute_dtype(q.dtype)):
            raise TypeError(f"g: expected {compute_dtype(q.dtype)} or q's dtype {q.dtype}, got {g.dtype}")
        _check_device("g", g, q)
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise TypeError(f"scale: expected a number, got {type(scale).__name__}")
    if not -math.inf < scale < math.inf:
        raise ValueError(f"scale: expected a finite number, got {scale}")
    limits = torch.finfo(compute_dtype(q.dtype))
    if scale != 0 and not limits.tiny <= abs(scale) <= limits.max:
        size = str(scale) if abs(scale) < 1e20 or isinstance(scale, float) else "a whole number of many digits"
        raise ValueError(
            f"scale: expected 0 or a size that {compute_dtype(q.dtype)} can hold, "
            f"{limits.tiny:.3g} to {limits.max:.3g}, got {size}"
        )


def _check_state(name: str, state: Tensor, shape: tuple[int, ...], q: Tensor) -> None:
    _check_tensor(name, state)
    if state.shape != shape:
        raise ValueError(f"{name}: expected shape {list(shape)} ([N, H, K, V]), got {list(state.shape)}")
    if state.dtype != compute_dtype(q.dtype):
        raise TypeError(f"{name}: expected {compute_dtype(q.dtype)} for inputs of {q.dtype}, got {state.dtype}")
    _check_device(name, state, q)


def _check_tensor(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")


def _check_device(name: str, x: Tensor, q: Tensor) -> None:
    if x.device != q.device:
        raise ValueError(f"{name}: expected q's device {q.device}, got {x.device}")


def _shortened(offsets: list[int], limit: int = 8) -> str:
    return str(offsets) if len(offsets) <= limit else f"{str(offsets[:limit])[:-1]}, …, {offsets[-1]}]"
