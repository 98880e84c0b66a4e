"""The chunk forms as torch operators: schemas, fake kernels and autograd.

    qed::erase_write_<form>(q, k, a, u, g, initial_state, cu_seqlens, scale, save) -> (o, state, saved)
    qed::erase_write_<form>_backward(do, dstate, q, k, a, u, g, cu_seqlens, scale, saved) -> six gradients

`saved` is what the backward starts from, empty unless `save`. Being operators, they are opaque to torch.compile:
no graph break, no unrolled loop, and their value checks run inside.

torch.compile keeps graphs on disk by operator name: when what a form saves changes shape, its name takes a new number.
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
    saved_like: Callable[[Tensor, Tensor, Tensor | None], list[Tensor]],
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
        return q.new_empty(u.shape), state, saved_like(q, u, cu_seqlens) if save else []

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


def _triton(name: str) -> Callable[..., Any]:
    """A function of the kernels' launcher; Triton is imported when it is first called."""

    def call(*arguments: Any) -> Any:
        from .triton import launch

        return getattr(launch, name)(*arguments)

    return call


SEQUENCE_OPS = {
    "chunkwise": register("chunkwise_2", chunkwise.forward, chunkwise.backward, chunkwise.saved_like),
    "triton": register("triton", _triton("forward"), _triton("backward"), _triton("saved_like")),
}

_STEP = f"({_INPUTS}, Tensor state, float scale) -> (Tensor, Tensor)"
_STEP_IN_PLACE = f"({_INPUTS}, Tensor(a!) state, float scale) -> Tensor"


def _step_triton(
    q: Tensor, k: Tensor, a: Tensor, u: Tensor, g: Tensor | None, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    new_state = torch.empty_like(state, memory_format=torch.contiguous_format)
    return _triton("step")(q, k, a, u, g, state.contiguous(), scale, new_state), new_state


def _step_triton_in_place(
    q: Tensor, k: Tensor, a: Tensor, u: Tensor, g: Tensor | None, state: Tensor, scale: float
) -> Tensor:
    return _triton("step")(q, k, a, u, g, state, scale, state)


step_triton = torch.library.custom_op("qed::erase_write_step_triton", _step_triton, mutates_args=(), schema=_STEP)
step_triton_in_place = torch.library.custom_op(
    "qed::erase_write_step_triton_", _step_triton_in_place, mutates_args=("state",), schema=_STEP_IN_PLACE
)
step_triton.register_fake(lambda q, k, a, u, g, state, scale: (u.new_empty(u.shape), state.new_empty(state.shape)))
step_triton_in_place.register_fake(lambda q, k, a, u, g, state, scale: u.new_empty(u.shape))


def _step_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _step_backward(ctx: Any, do: Tensor, dstate: Tensor) -> tuple[Tensor | None, ...]:
    """One token is cheap: run it again in torch, and let autograd go back through that."""
    leaves: list[Any] = [None if x is None else x.detach().requires_grad_() for x in ctx.saved_tensors]
    with torch.enable_grad():
        q, k, a, u, g, state = leaves
        g = None if g is None else g.float()
        outputs = chunkwise.step(q.float(), k.float(), a.float(), u.float(), g, state, ctx.scale)
    wanted = [x for x in leaves if x is not None]
    found = iter(torch.autograd.grad(outputs, wanted, (do.float(), dstate)))
    return (*(None if x is None else next(found) for x in leaves), None)


step_triton.register_autograd(_step_backward, setup_context=_step_context)
