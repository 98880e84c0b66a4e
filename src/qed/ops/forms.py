"""The forms of the op, where each can run, and which one "auto" takes. A function of device, dtype and shape, and of
whether torch.func or forward-mode differentiation is at work."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.autograd import forward_ad

# Once, since a compiler cannot trace this; Triton is found, not imported. Its interpreter runs kernels on the CPU.
TRITON_INSTALLED = find_spec("triton") is not None
_TRITON_INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
TRITON_WIDEST = 256
# What the interpreter computes as a GPU does. Of bfloat16 it multiplies the bits, as if they were whole numbers.
INTERPRETED = (torch.float16, torch.float32)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The form that runs and why, with the reason for every form passed over."""

    form: str
    reason: str
    passed_over: dict[str, str]

    def __str__(self) -> str:
        others = "".join(f"\n  not {name}: {why}" for name, why in self.passed_over.items())
        return f"{self.form}: {self.reason}{others}"


def _triton_obstacle(q: Tensor, u: Tensor, named: bool, transformed: bool) -> str | None:
    if not TRITON_INSTALLED:
        return "the package triton is not installed"
    if q.device.type != "cuda" and not (named and _TRITON_INTERPRETS):
        return f"it needs CUDA tensors, and q is on {q.device}"
    if q.dtype == torch.float64:
        return "it computes in float32, and q is torch.float64"
    if q.device.type != "cuda" and q.dtype not in INTERPRETED:
        return f"Triton's interpreter cannot compute in {q.dtype}"
    if max(q.shape[-1], u.shape[-1]) > TRITON_WIDEST:
        return f"it takes K and V up to {TRITON_WIDEST}, and they are {q.shape[-1]} and {u.shape[-1]}"
    return _chunk_obstacle(q, u, named, transformed)


def _chunk_obstacle(q: Tensor, u: Tensor, named: bool, transformed: bool) -> str | None:
    return "torch.func and forward-mode differentiation can go through the loop alone" if transformed else None


def _no_obstacle(q: Tensor, u: Tensor, named: bool, transformed: bool) -> str | None:
    return None


# In the order in which "auto" prefers them: (name, what stands in its way, what it is).
_FORMS = (
    ("triton", _triton_obstacle, "GPU kernels; any K and V up to 256, up to float32"),
    ("chunkwise", _chunk_obstacle, "matrix products over chunks of tokens; any device, dtype and shape"),
    ("reference", _no_obstacle, "the token loop that defines the op; any device, dtype and shape, slow"),
)
IMPLS = ("auto", *(name for name, _, _ in _FORMS))


def is_transformed(*tensors: Tensor | None) -> bool:
    """Whether a tensor is a dual number of forward-mode differentiation, or is being differentiated by torch.func."""
    given = [x for x in tensors if x is not None]
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in given):
        return True
    if torch._C._functorch.maybe_current_level() is None:
        return False
    return any(map(_differentiated_by_func, given))


def _differentiated_by_func(x: Tensor) -> bool:
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        if torch._C._functorch.is_gradtrackingtensor(x):
            return True
        x = torch._C._functorch.get_unwrapped(x)
    return False


def choose(impl: str, q: Tensor, u: Tensor, transformed: bool) -> Choice:
    """The form `impl` stands for. A named form is that form or an error; it never falls back. `transformed`:
    what `is_transformed` says of the inputs."""
    if impl not in IMPLS:
        raise ValueError(f"impl: expected one of {', '.join(map(repr, IMPLS))}, got {impl!r}")
    passed_over: dict[str, str] = {}
    for name, obstacle, what in _FORMS:
        why_not = (
            f"impl={impl!r} was asked for" if impl not in ("auto", name) else obstacle(q, u, impl == name, transformed)
        )
        if why_not is None:
            reason = f"{name!r} is preferred" if impl == "auto" else f"impl={impl!r} was asked for"
            later = {other: reason for other, _, _ in _FORMS if other not in (name, *passed_over)}
            return Choice(form=name, reason=what, passed_over=passed_over | later)
        if impl == name:
            raise RuntimeError(f"impl={impl!r} cannot run here: {why_not}")
        passed_over[name] = why_not
    raise AssertionError("the reference form runs everywhere")
