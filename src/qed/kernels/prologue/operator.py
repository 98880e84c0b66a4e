"""The prologue as a torch operator with a gradient, for training: sequences that are not packed and start from zeros.

    qed::operands(qkv, taps, b, w, f, A_log, dt_bias, strength, direction, rule, heads, width) -> (q, k, a, u, g)
    qed::operands_backward(dq, dk, da, du, dg, the same) -> gradients of qkv … f, and of A_log … strength in one
        vector

Only the inputs are saved; the backward recomputes the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...ops.registration import register, register_gradient, tensors
from ...rules import Operands
from .launch import Inputs, arguments, backward, gradients_like, launch, operands_like

if TYPE_CHECKING:
    from ...layers.mixer import Gates, Mixer

_INPUTS = (
    "Tensor qkv, Tensor taps, Tensor? b, Tensor? w, Tensor? f, Tensor? A_log, Tensor? dt_bias, Tensor? strength, "
    "Tensor? direction, str rule, int heads, int width"
)


def _with_an_empty_decay(qkv: Tensor, operands: Operands) -> tuple[Tensor, ...]:
    """Return the operands with an empty tensor for no decay, because an operator has to return tensors."""
    return *operands[:4], qkv.new_empty(0) if operands.g is None else operands.g


def _run_backward(*given: Any) -> tuple[Tensor | None, ...]:
    d_qkv, db, dw, df, d_taps, sums = backward(*given)
    return d_qkv, d_taps, db, dw, df, sums


_BACKWARD = register_gradient(
    f"operands_backward(Tensor dq, Tensor dk, Tensor da, Tensor du, Tensor? dg, {_INPUTS}) -> {tensors(6)}",
    _run_backward,
    lambda *x: tuple(gradients_like(Inputs(*x[5:]))),
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:9])
    ctx.sizes = inputs[9:]


def _differentiate(ctx: Any, dq: Tensor, dk: Tensor, da: Tensor, du: Tensor, dg: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # asked for once: with gradient checkpointing, asking recomputes them
    x = Inputs(*saved, *ctx.sizes)
    *gradients, sums = _BACKWARD(dq, dk, da, du, dg if dg.numel() else None, *x)
    each = zip(saved, (*gradients, *sums.split(x.summed())), strict=False)
    return *(None if y is None else d.view(y.shape).to(y.dtype) for y, d in each), None, None, None, None


OPERANDS = register(
    f"operands({_INPUTS}) -> {tensors(5)}",
    lambda *x: _with_an_empty_decay(x[0], launch(*x)),
    lambda *x: _with_an_empty_decay(x[0], operands_like(Inputs(*x))),
    differentiate=_differentiate,
    keep=_keep,
)


def differentiable_operands(qkv: Tensor, mixer: Mixer, gates: Gates) -> Operands:
    """Return the operands of the recurrence, [B, T, H, ·], with a gradient.

    Args:
        qkv: input of the convolution, [B, T, 2·H·K + H·V].
        mixer: the layer with the parameters and the rule.
        gates: the other projections, before their activations.
    """
    q, k, a, u, g = OPERANDS(*arguments(qkv, mixer, gates))
    return Operands(q, k, a, u, g if mixer.row.decay != "none" else None)
