"""The op that every model of this package is made of: check the arguments, choose a form, call it.

S_t = (I − k_t a_tᵀ) Diag(exp g_t) S_{t−1} + k_t u_tᵀ          o_t = scale · S_tᵀ q_t
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from ..routes import Call, Choice, Piece, Route, check_name
from . import reference
from .arguments import Arguments
from .routes import RECURRENCE, STEP, is_transformed
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

    The gradient is the chunk form's or the kernels' own. Gradients of gradients (`create_graph=True`) are right in
    every form, but go through the token loop, at its speed and with its memory. Forward-mode derivatives and the
    transforms of `torch.func` exist in the loop alone: "auto" takes it for them, and the other names refuse.
    torch.autocast changes nothing here: what is computed and kept in float32 stays so.

    Values that are not finite stay out of the past. In the loop and in the chunk form a non-finite u reaches the
    outputs of its own token and of later ones. In the kernels it may also reach tokens before it, but only those of its
    own chunk of 64: keeping them apart would cost every call time. NaN in g shows in the outputs of every form from its
    token on, and in the chunk form and the kernels perhaps from its chunk's first token on.

    Args:
        q, k, a: queries, keys and erase vectors [B, T, H, K], in bfloat16, float16, float32 or float64.
        u: write vectors [B, T, H, V], same dtype.
        g: natural logarithm of the decay, ≤ 0 (−inf forgets everything), [B, T, H, K] per channel or
            [B, T, H, 1] per head; None for no decay. Same dtype, or float32 beside lower precision. In the kernels a
            step below −708 forgets exactly, as −inf does; where a chunk decays far, a step above that counts as no
            stronger than −20 (for float32) or −13.75 (for 16 bits: 1e-6 of the state may stay).
        scale: factor on the read: 0, or of a size that the precision of the computation can hold.
        initial_state: [N, H, K, V] float32 (float64 for float64 inputs); None for zeros.
        cu_seqlens: offsets [N + 1] of N sequences packed along T with B = 1; each has its own state. Offsets that do
            not start at 0, decrease or do not end at T raise ValueError; where they are on a GPU and the kernels run,
            which do not wait to see them, they stop the program with a device-side assertion.
        impl: "auto", "reference", "chunkwise" or "triton". A name runs or raises; see `explain`.

    Returns:
        o [B, T, H, V] in q's dtype, and the final state [N, H, K, V] (N = B without cu_seqlens).
    """
    arguments = Arguments(q, k, a, u, g, initial_state, cu_seqlens, scale)
    check_sequence(arguments)
    route = _pick(RECURRENCE, impl, *arguments[:6])
    if route.name == "reference" or q.shape[0] == 0 or q.shape[2] == 0:  # without sequences or heads all are empty
        if not torch.compiler.is_compiling():
            check_values(g, initial_state, cu_seqlens, q.shape[1], "initial_state")
        return reference.erase_write(arguments)
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in arguments[:6])
    if type(scale) is not float:
        arguments = arguments._replace(scale=float(scale))
    outputs: tuple[Tensor, Tensor] = route.run(arguments, save)
    return outputs


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
    """Run one token of the recurrence, for decoding; differentiable unless in place.

    Args:
        q, k, a: [B, H, K]; u: [B, H, V]; g: [B, H, K], [B, H, 1] or None. Dtypes as in `erase_write`.
        state: [B, H, K, V] float32 (float64 for float64 inputs); left as it is unless `inplace`.
        inplace: write the new state over the old one, so that its address never changes, as CUDA graphs need.
        scale, impl: as in `erase_write`.

    Returns:
        o [B, H, V] in q's dtype, and the new state.
    """
    check_step(q, k, a, u, g, state, scale)
    route = _pick(STEP, impl, q, k, a, u, g, state)
    if not torch.compiler.is_compiling():
        check_values(g, state, None, 1, "state")
    differentiable = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, a, u, g, state))
    if inplace and differentiable:
        raise RuntimeError(
            "inplace=True cannot be differentiated: the gradient needs the old state; use torch.no_grad()"
        )
    outputs: tuple[Tensor, Tensor] = route.run(inplace, differentiable, q, k, a, u, g, state, float(scale))
    return outputs


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
    """Return which route `erase_write` would take for the same arguments, and why, as an object that prints well.
    Nothing is computed.

    Args:
        q, k, a, u, g, scale, initial_state, cu_seqlens, impl: as in `erase_write`.
    """
    check_sequence(Arguments(q, k, a, u, g, initial_state, cu_seqlens, scale))
    check_name(impl, RECURRENCE.names)
    return RECURRENCE.explain(impl, _call(q, k, a, u, g, initial_state), q.shape[-1], u.shape[-1])


def _call(q: Tensor, *others: Tensor | None) -> Call:
    return Call.of(q, q.shape[0], q.shape[1], transformed=is_transformed(q, *others))


def _pick(
    piece: Piece, impl: str, q: Tensor, k: Tensor, a: Tensor, u: Tensor, g: Tensor | None, state: Tensor | None
) -> Route:
    if impl != "auto":
        check_name(impl, piece.names)
    call, widths = _call(q, k, a, u, g, state), (q.shape[-1], u.shape[-1])
    route = piece.pick(impl, call, *widths)
    if impl == "auto" and not torch.compiler.is_compiling():
        key = (route.name, q.device.type)
        if key not in _announced:
            _announced.add(key)
            _log.info("impl='auto' on %s runs %s", q.device.type, piece.explain(impl, call, *widths))
    return route
