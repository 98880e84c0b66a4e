"""The forms of the op, where each can run, and which one "auto" takes. A pure function of device, dtype, shape."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

# Once, since a compiler cannot trace this; Triton is found, not imported. Its interpreter runs kernels on the CPU.
TRITON_INSTALLED = find_spec("triton") is not None
_TRITON_INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
TRITON_WIDEST = 256


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The form that runs and why, with the reason for every form passed over."""

    form: str
    reason: str
    passed_over: dict[str, str]

    def __str__(self) -> str:
        others = "".join(f"\n  not {name}: {why}" for name, why in self.passed_over.items())
        return f"{self.form}: {self.reason}{others}"


def _triton_obstacle(q: Tensor, u: Tensor, named: bool) -> str | None:
    if not TRITON_INSTALLED:
        return "the package triton is not installed"
    if q.device.type != "cuda" and not (named and _TRITON_INTERPRETS):
        return f"it needs CUDA tensors, and q is on {q.device}"
    if q.dtype == torch.float64:
        return "it computes in float32, and q is torch.float64"
    if max(q.shape[-1], u.shape[-1]) > TRITON_WIDEST:
        return f"it takes K and V up to {TRITON_WIDEST}, and they are {q.shape[-1]} and {u.shape[-1]}"
    return None


def _no_obstacle(q: Tensor, u: Tensor, named: bool) -> str | None:
    return None


# In the order in which "auto" prefers them: (name, what stands in its way, what it is).
_FORMS = (
    ("triton", _triton_obstacle, "GPU kernels; any K and V up to 256, up to float32"),
    ("chunkwise", _no_obstacle, "matrix products over chunks of tokens; any device, dtype and shape"),
    ("reference", _no_obstacle, "the token loop that defines the op; any device, dtype and shape, slow"),
)
IMPLS = ("auto", *(name for name, _, _ in _FORMS))


def choose(impl: str, q: Tensor, u: Tensor) -> Choice:
    """The form `impl` stands for. A named form is that form or an error; it never falls back."""
    if impl not in IMPLS:
        raise ValueError(f"impl: expected one of {', '.join(map(repr, IMPLS))}, got {impl!r}")
    passed_over: dict[str, str] = {}
    for name, obstacle, what in _FORMS:
        why_not = f"impl={impl!r} was asked for" if impl not in ("auto", name) else obstacle(q, u, impl == name)
        if why_not is None:
            reason = f"{name!r} is preferred" if impl == "auto" else f"impl={impl!r} was asked for"
            later = {other: reason for other, _, _ in _FORMS if other not in (name, *passed_over)}
            return Choice(form=name, reason=what, passed_over=passed_over | later)
        if impl == name:
            raise RuntimeError(f"impl={impl!r} cannot run here: {why_not}")
        passed_over[name] = why_not
    raise AssertionError("the reference form runs everywhere")
