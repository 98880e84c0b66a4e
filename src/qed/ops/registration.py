"""The chunk forms as torch operators: schemas, fake kernels and autograd.

    qed::erase_write_<form>(q, k, a, u, g, initial_state, cu_seqlens, scale) -> (o, state)
    qed::erase_write_<form>_saving_<n>(the same) -> (o, state, and the n tensors that the backward starts from)
    qed::erase_write_<form>_backward_<n>(do, dstate, q, k, a, u, g, cu_seqlens, scale, saved) -> six gradients

Being operators, they are opaque to torch.compile: no graph break, no unrolled loop, and their value checks run inside.
They are made with `Library`, and what is saved is a fixed number of tensors, not a list: `custom_op` and lists together
cost twice as much time before a kernel starts.

torch.compile keeps graphs on disk by operator name: when what a form saves changes, its name must change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import chunkwise, reference
from .packing import sequence_count
from .precision import compute_dtype, without_autocast
from .validation import check_values

_LIBRARY = torch.library.Library("qed", "FRAGMENT")
_INPUTS = "Tensor q, Tensor k, Tensor a, Tensor u, Tensor? g"
_FORWARD = f"({_INPUTS}, Tensor? initial_state, Tensor? cu_seqlens, float scale)"
SAVING_OPS: dict[str, Callable[..., Any]] = {}  # by form
_BACKWARD = f"(Tensor do, Tensor? dstate, {_INPUTS}, Tensor? cu_seqlens, float scale, Tensor[] saved)"


def _tensors(count: int) -> str:
    return f" -> ({', '.join(['Tensor'] * count)})"


def _define(name: str, schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"qed::{name}", fake, lib=_LIBRARY)
    operator: Callable[..., Any] = getattr(torch.ops.qed, name).default
    return operator


def register(
    form: str,
    forward: Callable[..., tuple[Tensor, Tensor, list[Tensor]]],
    backward: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]],
    saved_like: Callable[[Tensor, Tensor, Tensor | None], list[Tensor]],
    saved_count: int,
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Register one form's forward and backward. Returns a function of the forward's arguments and of whether to save
    what the backward starts from, to o and the final state."""

    @without_autocast
    def run(save: bool, *inputs: Any) -> tuple[Tensor, ...]:
        q, _, _, _, g, initial_state, cu_seqlens, _ = inputs
        check_values(g, initial_state, cu_seqlens, q.shape[1], "initial_state")
        o, state, saved = forward(*inputs, save)
        return o, state, *saved

    def state_like(q: Tensor, u: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        shape = (sequence_count(q, cu_seqlens), *q.shape[2:], u.shape[-1])
        return q.new_empty(shape, dtype=compute_dtype(q.dtype))

    def run_fake(save: bool, *inputs: Any) -> tuple[Tensor, ...]:
        q, _, _, u, _, _, cu_seqlens, _ = inputs
        saved = saved_like(q, u, cu_seqlens) if save else []
        return q.new_empty(u.shape), state_like(q, u, cu_seqlens), *saved

    def backward_fake(
        do: Tensor,
        dstate: Tensor | None,
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

    name = f"erase_write_{form}"
    plain = _define(name, _FORWARD + _tensors(2), partial(run, False), partial(run_fake, False))
    saving_name = f"{name}_saving_{saved_count}"
    saving = _define(saving_name, _FORWARD + _tensors(2 + saved_count), partial(run, True), partial(run_fake, True))
    SAVING_OPS[form] = saving
    backward_op = _define(
        f"{name}_backward_{saved_count}", _BACKWARD + _tensors(6), without_autocast(backward), backward_fake
    )

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.scale = inputs
        ctx.save_for_backward(*tensors, *output[2:])
        ctx.set_materialize_grads(False)  # no zeros the size of what is saved

    def differentiate(ctx: Any, do: Tensor | None, dstate: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        q, k, a, u, g, initial_state, cu_seqlens, *saved = ctx.saved_tensors
        if do is None:
            do = q.new_zeros(u.shape)
        if torch.is_grad_enabled():  # someone wants gradients of these gradients
            return *_loop_gradients(do, dstate, q, k, a, u, g, initial_state, cu_seqlens, ctx.scale), None, None
        dq, dk, da, du, dg, ds = backward_op(do, dstate, q, k, a, u, g, cu_seqlens, ctx.scale, saved)
        return (
            *(dq, dk, da, du),
            None if g is None else dg,
            None if initial_state is None else ds,
            *(None, None),
        )

    def refuse(ctx: Any, *_: Any) -> None:
        raise RuntimeError(f"qed: {name} saves nothing for a backward; {saving_name} does")

    def refuse_twice(ctx: Any, *_: Any) -> None:
        raise RuntimeError(f"qed: {name} is differentiated once by this operator; erase_write does it more often")

    torch.library.register_autograd(f"qed::{name}", refuse, lib=_LIBRARY)
    torch.library.register_autograd(f"qed::{name}_backward_{saved_count}", refuse_twice, lib=_LIBRARY)
    torch.library.register_autograd(f"qed::{saving_name}", differentiate, setup_context=setup_context, lib=_LIBRARY)

    def call(*inputs: Any, save: bool) -> tuple[Tensor, Tensor]:
        o, state, *_ = (saving if save else plain)(*inputs)
        return o, state

    return call


def _leaves(tensors: Iterable[Tensor | None]) -> list[Any]:
    """Tensors to differentiate with respect to. Where gradients of gradients are wanted, tensors that require one stay
    connected to the graph through a view of themselves; the others are detached."""

    def leaf(x: Tensor) -> Tensor:
        return x.view_as(x) if torch.is_grad_enabled() and x.requires_grad else x.detach().requires_grad_()

    return [None if x is None else leaf(x) for x in tensors]


def _loop_gradients(
    do: Tensor,
    dstate: Tensor | None,
    q: Tensor,
    k: Tensor,
    a: Tensor,
    u: Tensor,
    g: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> list[Tensor | None]:
    """Gradients of q, k, a, u, g and the initial state that can be differentiated again: those of the token loop."""
    q, k, a, u, g, initial_state = leaves = _leaves((q, k, a, u, g, initial_state))
    o, state = reference.erase_write(q, k, a, u, g, initial_state, cu_seqlens, scale)
    outputs = (o,) if dstate is None else (o, state)
    cotangents = (do,) if dstate is None else (do, dstate)
    wanted = [x for x in leaves if x is not None]
    found = iter(torch.autograd.grad(outputs, wanted, cotangents, create_graph=True, materialize_grads=True))
    return [None if x is None else next(found) for x in leaves]


def _triton(name: str) -> Callable[..., Any]:
    """A function of the kernels' launcher; Triton is imported when it is first called."""

    def call(*arguments: Any) -> Any:
        from .triton import launch

        return getattr(launch, name)(*arguments)

    return call


SEQUENCE_OPS = {
    "chunkwise": register("chunkwise", chunkwise.forward, chunkwise.backward, chunkwise.saved_like, 3),
    "triton": register("triton", _triton("forward"), _triton("backward"), _triton("saved_like"), 10),
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


step_triton = _define(
    "erase_write_step_triton",
    _STEP,
    _step_triton,
    lambda q, k, a, u, g, state, scale: (u.new_empty(u.shape), state.new_empty(state.shape)),
)
step_triton_in_place = _define(
    "erase_write_step_triton_", _STEP_IN_PLACE, _step_triton_in_place, lambda q, k, a, u, *_: u.new_empty(u.shape)
)


def _step_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _step_backward(ctx: Any, do: Tensor, dstate: Tensor) -> tuple[Tensor | None, ...]:
    """One token is cheap: run it again in torch, and let autograd go back through that."""
    leaves = _leaves(ctx.saved_tensors)
    twice = torch.is_grad_enabled()
    with torch.enable_grad():
        q, k, a, u, g, state = leaves
        g = None if g is None else g.float()
        outputs = reference.step(q.float(), k.float(), a.float(), u.float(), g, state, ctx.scale)
    wanted = [x for x in leaves if x is not None]
    found = iter(torch.autograd.grad(outputs, wanted, (do.float(), dstate), create_graph=twice))
    return (*(None if x is None else next(found) for x in leaves), None)


torch.library.register_autograd(
    "qed::erase_write_step_triton", _step_backward, setup_context=_step_context, lib=_LIBRARY
)
