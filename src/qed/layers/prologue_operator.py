"""The prologue as a torch operator with a gradient, for training: rows of tokens that start from nothing.

    qed::operands(qkv, taps, b, w, f, A_log, dt_bias, strength, direction, rule, heads, width) -> (q, k, a, u, g)
    qed::operands_backward(dq, dk, da, du, dg, the same) -> gradients of qkv … f, and of A_log … strength in one row

Nothing is saved but what goes in: the backward makes the rest again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..rules import Operands
from .convolution_operator import WIDEST as MOST_TAPS
from .fused import has_kernels
from .prologue import Inputs, arguments, backward, fits, gradients_like, launch, operands_like
from .sequences import Sequences

if TYPE_CHECKING:
    from .mixer import Gates, Mixer


def trains(mixer: Mixer, x: Tensor, state: Tensor | None, sequences: Sequences) -> bool:
    """Whether operands that have gradients are made so: of more than one token, from a sequence's beginning."""
    dense = state is None and sequences.cu_seqlens is None and x.shape[1] > 1
    return dense and has_kernels(x) and fits(mixer) and 1 < mixer.conv.weight.shape[1] <= MOST_TAPS


def differentiable_operands(qkv: Tensor, mixer: Mixer, gates: Gates) -> Operands:
    q, k, a, u, g = operands_operator(*arguments(qkv, mixer, gates))
    return Operands(q, k, a, u, g if mixer.row.decay != "none" else None)


_LIBRARY = torch.library.Library("qed", "FRAGMENT")
_INPUTS = (
    "Tensor qkv, Tensor taps, Tensor? b, Tensor? w, Tensor? f, Tensor? A_log, Tensor? dt_bias, Tensor? strength, "
    "Tensor? direction, str rule, int heads, int width"
)
_LIBRARY.define(f"operands({_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)", tags=torch.Tag.pt2_compliant_tag)
_LIBRARY.define(
    f"operands_backward(Tensor dq, Tensor dk, Tensor da, Tensor du, Tensor? dg, {_INPUTS}) -> "
    f"({', '.join(['Tensor'] * 6)})",
    tags=torch.Tag.pt2_compliant_tag,
)


def _whole(qkv: Tensor, found: Operands) -> tuple[Tensor, ...]:
    return *found[:4], qkv.new_empty(0) if found.g is None else found.g


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:9])
    ctx.sizes = inputs[9:]


def _differentiate(ctx: Any, dq: Tensor, dk: Tensor, da: Tensor, du: Tensor, dg: Tensor) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors  # once: a checkpoint makes them again for one who asks
    x = Inputs(*tensors, *ctx.sizes)
    *grads, sums = torch.ops.qed.operands_backward(dq, dk, da, du, dg if dg.numel() else None, *x)
    every = *grads, *sums.split(x.summed())
    given = zip(tensors, every, strict=False)
    return *(None if y is None else d.view(y.shape).to(y.dtype) for y, d in given), None, None, None, None


_LIBRARY.impl("operands", lambda *x: _whole(x[0], launch(*x)), "CompositeExplicitAutograd")
_LIBRARY.impl("operands_backward", backward, "CompositeExplicitAutograd")
torch.library.register_fake("qed::operands", lambda *x: _whole(x[0], operands_like(Inputs(*x))), lib=_LIBRARY)
torch.library.register_fake("qed::operands_backward", lambda *x: tuple(gradients_like(Inputs(*x[5:]))), lib=_LIBRARY)
torch.library.register_autograd("qed::operands", _differentiate, setup_context=_keep, lib=_LIBRARY)
operands_operator: Callable[..., tuple[Tensor, ...]] = torch.ops.qed.operands.default
