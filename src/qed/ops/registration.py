"""The chunk form as torch operators: schemas, fake kernels and autograd.

    qed::erase_write_<form>(q, k, a, u, g, initial_state, cu_seqlens, scale, save) -> (o, state, saved)
    qed::erase_write_<form>_backward(do, dstate, q, k, a, u, g, cu_seqlens, scale, saved) -> six gradients

`saved` is what the backward starts from, empty unless `save`. Being operators, they are opaque to torch.compile:
no graph break, no unrolled loop, and their value checks run inside.

torch.compile keeps graphs on disk by operator name: if what a form saves ever changes shape, change its name too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import chunkwise
from .packing import sequence_count
from .precision import compute_dtype
from .validation import check_values

_INPUTS = "Tensor q, Tensor k, Tensor a, Tensor u, Tensor? g"
_FORWARD = (
    f"({_INPUTS}, Tensor? initial_state, Tensor? cu_seqlens, float scale, bool save) -> (Tensor, Tensor, Tensor[])"
)
_BACKWARD = (
    f"(Tensor do, Tensor dstate, {_INPUTS}, Tensor? cu_seqlens, float scale, Tensor[] saved)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def register(
    form: str,
    forward: Callable[..., tuple[Tensor, Tensor, list[Tensor]]],
    backward: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]],
    saved_shapes: Callable[[Tensor, Tensor, Tensor | None], list[tuple[int, int, int]]],
) -> Callable[..., tuple[Tensor, Tensor, list[Tensor]]]:
    """Register one form's forward and backward; returns the differentiable operator."""

    def run(
        q: Tensor,
        k: Tensor,
        a: Tensor,
        u: Tensor,
        g: Tensor | None,
        initial_state: Tensor | None,
        cu_seqlens: Tensor | None,
        scale: float,
        save: bool,
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        check_values(g, initial_state, cu_seqlens, q.shape[1], "initial_state")
        return forward(q, k, a, u, g, initial_state, cu_seqlens, scale, save)

    op = torch.library.custom_op(f"qed::erase_write_{form}", run, mutates_args=(), schema=_FORWARD)
    backward_op = torch.library.custom_op(
        f"qed::erase_write_{form}_backward", backward, mutates_args=(), schema=_BACKWARD
    )

    def state_like(q: Tensor, u: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        shape = (sequence_count(q, cu_seqlens), *q.shape[2:], u.shape[-1])
        return q.new_empty(shape, dtype=compute_dtype(q.dtype))

    @op.register_fake
    def _(
        q: Tensor,
        k: Tensor,
        a: Tensor,
        u: Tensor,
        g: Tensor | None,
        initial_state: Tensor | None,
        cu_seqlens: Tensor | None,
        scale: float,
        save: bool,
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        state = state_like(q, u, cu_seqlens)
        saved = [state.new_empty(shape) for shape in saved_shapes(q, u, cu_seqlens)] if save else []
        return q.new_empty(u.shape), state, saved

    @backward_op.register_fake
    def _(
        do: Tensor,
        dstate: Tensor,
        q: Tensor,
        k: Tensor,
        a: Tensor,
        u: Tensor,
        g: Tensor | None,
        cu_seqlens: Tensor | None,
        scale: float,
        saved: list[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        dq, dk, da, du = (x.new_empty(x.shape) for x in (q, k, a, u))
        dg = q.new_empty(0) if g is None else g.new_empty(g.shape)
        return dq, dk, da, du, dg, state_like(q, u, cu_seqlens)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, list[Tensor]]) -> None:
        q, k, a, u, g, initial_state, cu_seqlens, ctx.scale, save = inputs
        if not save:
            raise RuntimeError("qed: a forward without save=True cannot be differentiated")
        ctx.has_initial_state = initial_state is not None
        ctx.save_for_backward(q, k, a, u, g, cu_seqlens, *output[2])
        ctx.set_materialize_grads(False)  # no zeros the size of `saved`

    def differentiate(ctx: Any, do: Tensor | None, dstate: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        q, k, a, u, g, cu_seqlens, *saved = ctx.saved_tensors
        if do is None:
            do = q.new_zeros(u.shape)
        if dstate is None:
            dstate = torch.zeros_like(state_like(q, u, cu_seqlens))
        dq, dk, da, du, dg, ds = backward_op(do, dstate, q, k, a, u, g, cu_seqlens, ctx.scale, saved)
        return (
            *(dq, dk, da, du),
            None if g is None else dg,
            ds if ctx.has_initial_state else None,
            *(None, None, None),
        )

    op.register_autograd(differentiate, setup_context=setup_context)
    return op


erase_write_chunkwise = register("chunkwise", chunkwise.forward, chunkwise.backward, chunkwise.saved_shapes)
