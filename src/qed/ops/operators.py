"""The chunk form and the kernels of the recurrence as torch operators.

    qed::erase_write_<form>(q, k, a, u, g, initial_state, cu_seqlens, scale) -> (o, state)
    qed::erase_write_<form>_saving_<n>(the same) -> (o, state, and the n tensors that the backward starts from)
    qed::erase_write_<form>_backward_<n>(do, dstate, q, k, a, u, g, cu_seqlens, scale, saved) -> six gradients
    qed::erase_write_step_triton(q, k, a, u, g, state, scale) -> (o, new state), and one that writes over the state

An operator saves a fixed number of tensors, not a list: a list would take more time before a kernel starts.

Whoever looks at operators, such as torch.compile, sees these. Where nobody looks, the same functions are called without
torch's search for what an operator has to do, which takes longer than all of our own code before the first kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..routes import kernel
from . import chunkwise, reference
from .arguments import Arguments
from .packing import sequence_count
from .precision import compute_dtype, without_autocast
from .registration import keep_nothing, leaves_of, refusal, register, register_gradient, tensors
from .validation import check_values

_INPUTS = "Tensor q, Tensor k, Tensor a, Tensor u, Tensor? g"
_FORWARD = f"({_INPUTS}, Tensor? initial_state, Tensor? cu_seqlens, float scale)"
_BACKWARD = f"(Tensor do, Tensor? dstate, {_INPUTS}, Tensor? cu_seqlens, float scale, Tensor[] saved)"
_PLAIN = (Tensor, torch.nn.Parameter)


class Form(NamedTuple):
    """What a form of the recurrence has to provide to become operators."""

    name: str
    forward: Callable[[Arguments, bool], tuple[Tensor, Tensor, list[Tensor]]]
    backward: Callable[[Tensor, Tensor | None, Arguments, list[Tensor]], chunkwise.Gradients]
    saved_like: Callable[[Tensor, Tensor, Tensor | None], list[Tensor]]
    saved_count: int


class SequenceOperator:
    """One form as torch operators; called with the arguments of the recurrence, it returns o and the final state."""

    def __init__(self, form: Form):
        self.form, name = form, f"erase_write_{form.name}"
        count = form.saved_count
        self.run = without_autocast(self._run)
        self.run_backward = without_autocast(form.backward)
        self.plain = register(
            f"{name}{_FORWARD} -> {tensors(2)}",
            lambda *inputs: self.run(Arguments(*inputs), save=False),
            lambda *inputs: self._like(Arguments(*inputs), save=False),
            differentiate=refusal(f"{name} saves nothing for a backward; {name}_saving_{count} does"),
            keep=keep_nothing,
        )
        self.saving = register(
            f"{name}_saving_{count}{_FORWARD} -> {tensors(2 + count)}",
            lambda *inputs: self.run(Arguments(*inputs), save=True),
            lambda *inputs: self._like(Arguments(*inputs), save=True),
            differentiate=self._differentiate,
            keep=_keep,
        )
        self._backward = register_gradient(
            f"{name}_backward_{count}{_BACKWARD} -> {tensors(6)}",
            lambda do, dstate, *x: self.run_backward(do, dstate, _without_state(*x[:-1]), x[-1]),
            lambda do, dstate, *x: _gradients_like(_without_state(*x[:-1])),
            instead="erase_write",
        )

    def __call__(self, x: Arguments, save: bool) -> tuple[Tensor, Tensor]:
        if _is_watched(*x[:7]):
            o, state, *_ = (self.saving if save else self.plain)(*x)
        elif save:
            o, state = _Unwatched.apply(self, *x)
        else:
            o, state = self.run(x, save=False)
        return o, state

    def _run(self, x: Arguments, save: bool) -> tuple[Tensor, ...]:
        check_values(x.g, x.initial_state, x.cu_seqlens, x.q.shape[1], "initial_state")
        o, state, saved = self.form.forward(x, save)
        return o, state, *saved

    def _like(self, x: Arguments, save: bool) -> tuple[Tensor, ...]:
        saved = self.form.saved_like(x.q, x.u, x.cu_seqlens) if save else []
        return x.q.new_empty(x.u.shape), _state_like(x), *saved

    def _differentiate(self, ctx: Any, do: Tensor | None, dstate: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # asked for once: with gradient checkpointing, asking recomputes them
        q, k, a, u, g, initial_state, cu_seqlens = saved[:7]
        x = Arguments(q, k, a, u, g, initial_state, cu_seqlens, ctx.scale)
        if do is None:
            do = x.q.new_zeros(x.u.shape)
        if torch.is_grad_enabled() or is_dual(do, dstate):  # gradients of these gradients are wanted, or tangents
            return *_loop_gradients(do, dstate, x), None, None
        if _is_watched(*x[:7], do, dstate):
            dq, dk, da, du, dg, ds = self._backward(do, dstate, *x[:5], x.cu_seqlens, x.scale, saved[7:])
        else:
            dq, dk, da, du, dg, ds = self.run_backward(do, dstate, x, list(saved[7:]))
        return (
            *(dq, dk, da, du),
            None if x.g is None else dg,
            None if x.initial_state is None else ds,
            *(None, None),
        )


class _Unwatched(torch.autograd.Function):
    """The saving operator as a function of autograd alone."""

    @staticmethod
    def forward(ctx: Any, operator: SequenceOperator, *inputs: Any) -> tuple[Tensor, Tensor]:
        ctx.operator = operator
        o, state, *saved = operator.run(Arguments(*inputs), save=True)
        _keep(ctx, inputs, (o, state, *saved))
        return o, state

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return None, *ctx.operator._differentiate(ctx, *gradients)


def is_dual(*given: Tensor | None) -> bool:
    """Return whether a tensor is a dual number of forward-mode differentiation."""
    return forward_ad._current_level >= 0 and any(
        x is not None and forward_ad.unpack_dual(x).tangent is not None for x in given
    )


def _is_watched(q: Tensor, *others: Tensor | None) -> bool:
    """Whether anything but autograd has to see a call as an operator: a compiler, a transform, a mode such as that of
    selective checkpointing or of a default device, a profiler, or a tensor that is more than its values, or less."""
    return (
        torch.compiler.is_compiling()
        or torch._C._functorch.maybe_current_level() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._get_tracing_state() is not None
        or torch._C._autograd._profiler_enabled()
        or q.is_meta
        or not all(x is None or type(x) in _PLAIN for x in (q, *others))
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *given, ctx.scale = inputs
    ctx.save_for_backward(*given, *output[2:])
    ctx.set_materialize_grads(False)  # or torch would make zeros as large as what is saved


def _without_state(
    q: Tensor, k: Tensor, a: Tensor, u: Tensor, g: Tensor | None, cu_seqlens: Tensor | None, scale: float
) -> Arguments:
    return Arguments(q, k, a, u, g, None, cu_seqlens, scale)


def _state_like(x: Arguments) -> Tensor:
    shape = (sequence_count(x.q, x.cu_seqlens), *x.q.shape[2:], x.u.shape[-1])
    return x.q.new_empty(shape, dtype=compute_dtype(x.q.dtype))


def _gradients_like(x: Arguments) -> chunkwise.Gradients:
    dq, dk, da, du = (y.new_empty(y.shape) for y in x[:4])
    dg = x.q.new_empty(0) if x.g is None else x.g.new_empty(x.g.shape)
    return dq, dk, da, du, dg, _state_like(x)


def _loop_gradients(do: Tensor, dstate: Tensor | None, x: Arguments) -> list[Tensor | None]:
    """Return gradients of q, k, a, u, g and the initial state that can be differentiated again, and have tangents where
    `do` and `dstate` have them: those of the token loop."""
    leaves, twice = leaves_of(x[:6]), torch.is_grad_enabled()
    q, k, a, u, g, initial_state = leaves
    with torch.enable_grad():
        o, state = reference.erase_write(x._replace(q=q, k=k, a=a, u=u, g=g, initial_state=initial_state))
    outputs = (o,) if dstate is None else (o, state)
    cotangents = (do,) if dstate is None else (do, dstate)
    wanted = [y for y in leaves if y is not None]
    gradients = iter(torch.autograd.grad(outputs, wanted, cotangents, create_graph=twice, materialize_grads=True))
    return [None if y is None else next(gradients) for y in leaves]


def _launch(name: str) -> Callable[..., Any]:
    return kernel("recurrence.launch", name)


CHUNKWISE = SequenceOperator(Form("chunkwise", chunkwise.forward, chunkwise.backward, chunkwise.saved_like, 3))
_SAVED_LIKE = kernel("recurrence.memory", "saved_like")
TRITON = SequenceOperator(Form("triton", _launch("forward"), _launch("backward"), _SAVED_LIKE, 2))
SAVING_OPERATORS = (CHUNKWISE.saving, TRITON.saving)


def _step(
    q: Tensor, k: Tensor, a: Tensor, u: Tensor, g: Tensor | None, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    new_state = torch.empty_like(state, memory_format=torch.contiguous_format)
    return _launch("step")(q, k, a, u, g, state.contiguous(), scale, new_state), new_state


def _keep_step(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *given, ctx.scale = inputs
    ctx.save_for_backward(*given)


def _differentiate_step(ctx: Any, do: Tensor, dstate: Tensor) -> tuple[Tensor | None, ...]:
    """Run the token again in torch, which is cheap, and let autograd differentiate that."""
    leaves = leaves_of(ctx.saved_tensors)
    twice = torch.is_grad_enabled()
    with torch.enable_grad():
        q, k, a, u, g, state = leaves
        g = None if g is None else g.float()
        outputs = reference.step(q.float(), k.float(), a.float(), u.float(), g, state, ctx.scale)
    wanted = [x for x in leaves if x is not None]
    gradients = iter(torch.autograd.grad(outputs, wanted, (do.float(), dstate), create_graph=twice))
    return (*(None if x is None else next(gradients) for x in leaves), None)


STEP_TRITON = register(
    f"erase_write_step_triton({_INPUTS}, Tensor state, float scale) -> {tensors(2)}",
    _step,
    lambda q, k, a, u, g, state, scale: (u.new_empty(u.shape), state.new_empty(state.shape)),
    differentiate=_differentiate_step,
    keep=_keep_step,
)
STEP_TRITON_IN_PLACE = register(
    f"erase_write_step_triton_({_INPUTS}, Tensor(a!) state, float scale) -> Tensor",
    lambda q, k, a, u, g, state, scale: _launch("step")(q, k, a, u, g, state, scale, state),
    lambda q, k, a, u, *_: u.new_empty(u.shape),
)
