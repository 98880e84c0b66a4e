"""The forms of the op, where each can run, and which one "auto" takes. A pure function of device, dtype, shape."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from torch import Tensor

_TRITON_INSTALLED = find_spec("triton") is not None  # found, not imported; once, since a compiler cannot trace this


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The form that runs and why, with the reason for every form passed over."""

    form: str
    reason: str
    passed_over: dict[str, str]

    def __str__(self) -> str:
        others = "".join(f"\n  not {name}: {why}" for name, why in self.passed_over.items())
        return f"{self.form}: {self.reason}{others}"


def _triton_obstacle(q: Tensor) -> str | None:
    if q.device.type != "cuda":
        return f"it needs CUDA tensors, and q is on {q.device}"
    if not _TRITON_INSTALLED:
        return "the package triton is not installed"
    return "this version of qed has no Triton kernels yet"


def _no_obstacle(q: Tensor) -> str | None:
    return None


# In the order in which "auto" prefers them: (name, what stands in its way, what it is).
_FORMS = (
    ("triton", _triton_obstacle, "fused GPU kernels"),
    ("chunkwise", _no_obstacle, "matrix products over chunks of tokens; any device, dtype and shape"),
    ("reference", _no_obstacle, "the token loop that defines the op; any device, dtype and shape, slow"),
)
IMPLS = ("auto", *(name for name, _, _ in _FORMS))


def choose(impl: str, q: Tensor) -> Choice:
    """The form `impl` stands for. A named form is that form or an error; it never falls back."""
    if impl not in IMPLS:
        raise ValueError(f"impl: expected one of {', '.join(map(repr, IMPLS))}, got {impl!r}")
    passed_over: dict[str, str] = {}
    for name, obstacle, what in _FORMS:
        why_not = f"impl={impl!r} was asked for" if impl not in ("auto", name) else obstacle(q)
        if why_not is None:
            reason = f"{name!r} is preferred" if impl == "auto" else f"impl={impl!r} was asked for"
            later = {other: reason for other, _, _ in _FORMS if other not in (name, *passed_over)}
            return Choice(form=name, reason=what, passed_over=passed_over | later)
        if impl == name:
            raise RuntimeError(f"impl={impl!r} cannot run here: {why_not}")
        passed_over[name] = why_not
    raise AssertionError("the reference form runs everywhere")
