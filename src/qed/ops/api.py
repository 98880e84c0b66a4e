"""The op every model of this package is made of: validate, choose a form, call it.

S_t = (I − k_t a_tᵀ) Diag(exp g_t) S_{t−1} + k_t u_tᵀ          o_t = scale · S_tᵀ q_t
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from . import chunkwise, reference
from .forms import Choice, choose
from .registration import SEQUENCE_OPS, step_triton, step_triton_in_place
from .validation import check_sequence, check_step, check_values

_log = logging.getLogger("qed")
_announced: set[tuple[str, str]] = set()


def erase_write(
    q: Tensor,
    k: Tensor,
    a: Tensor,
    u: Tensor,
    g: Tensor | None = None,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Run the recurrence over whole sequences; differentiable in q, k, a, u, g and initial_state.

    Args:
        q, k, a: queries, keys and erase vectors [B, T, H, K], in bfloat16, float16, float32 or float64.
        u: write vectors [B, T, H, V], same dtype.
        g: natural logarithm of the decay, ≤ 0 (−inf forgets everything), [B, T, H, K] per channel or
            [B, T, H, 1] per head; None for no decay. Same dtype, or float32 beside lower precision.
        scale: factor on the read.
        initial_state: [N, H, K, V] float32 (float64 for float64 inputs); None for zeros.
        cu_seqlens: offsets [N + 1] of N sequences packed along T with B = 1; each has its own state.
        impl: "auto", "reference", "chunkwise" or "triton". A name runs or raises; see `explain`.

    Returns:
        o [B, T, H, V] in q's dtype, and the final state [N, H, K, V] (N = B without cu_seqlens).
    """
    check_sequence(q, k, a, u, g, initial_state, cu_seqlens, scale)
    form = _form(impl, q, u)
    if form == "reference":
        if not torch.compiler.is_compiling():
            check_values(g, initial_state, cu_seqlens, q.shape[1], "initial_state")
        return reference.erase_write(q, k, a, u, g, initial_state, cu_seqlens, scale)
    differentiable = [x for x in (q, k, a, u, g, initial_state) if x is not None]
    save = torch.is_grad_enabled() and any(x.requires_grad for x in differentiable)
    return SEQUENCE_OPS[form](q, k, a, u, g, initial_state, cu_seqlens, float(scale), save=save)


def erase_write_step(
    q: Tensor,
    k: Tensor,
    a: Tensor,
    u: Tensor,
    g: Tensor | None = None,
    *,
    state: Tensor,
    scale: float = 1.0,
    inplace: bool = False,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """One token of the recurrence, for decoding; differentiable unless in place.

    Args:
        q, k, a: [B, H, K]; u: [B, H, V]; g: [B, H, K], [B, H, 1] or None. Dtypes as in `erase_write`.
        state: [B, H, K, V] float32 (float64 for float64 inputs); left as it is unless `inplace`.
        inplace: write the new state over the old one, whose address then never changes (CUDA graphs).
        scale, impl: as in `erase_write`.

    Returns:
        o [B, H, V] in q's dtype, and the new state.
    """
    check_step(q, k, a, u, g, state, scale)
    form = _form(impl, q, u)
    if not torch.compiler.is_compiling():
        check_values(g, state, None, 1, "state")
    if inplace and torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, a, u, g, state)):
        raise RuntimeError(
            "inplace=True cannot be differentiated: the gradient needs the old state; use torch.no_grad()"
        )
    if form == "triton":
        if not inplace:
            return step_triton(q, k, a, u, g, state, float(scale))
        if not state.is_contiguous():
            raise ValueError(f"state: inplace=True expects contiguous memory, got strides {state.stride()}")
        return step_triton_in_place(q, k, a, u, g, state, float(scale)), state
    dtype = state.dtype
    step = reference.step if form == "reference" else chunkwise.step
    q_, k_, a_, u_ = (x.to(dtype) for x in (q, k, a, u))
    o, new_state = step(q_, k_, a_, u_, None if g is None else g.to(dtype), state, scale)
    return o.to(q.dtype), state.copy_(new_state) if inplace else new_state


def explain(
    q: Tensor,
    k: Tensor,
    a: Tensor,
    u: Tensor,
    g: Tensor | None = None,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    impl: str = "auto",
) -> Choice:
    """Which form `erase_write` would run for these arguments, and why; prints well. Nothing is computed."""
    check_sequence(q, k, a, u, g, initial_state, cu_seqlens, scale)
    return choose(impl, q, u)


def _form(impl: str, q: Tensor, u: Tensor) -> str:
    choice = choose(impl, q, u)
    if impl == "auto" and not torch.compiler.is_compiling():
        key = (choice.form, q.device.type)
        if key not in _announced:
            _announced.add(key)
            _log.info("impl='auto' on %s runs %s", q.device.type, choice)
    return choice.form
