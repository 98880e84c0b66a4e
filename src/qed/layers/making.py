"""How the operands of the recurrence are made from what `in_proj` gives: what the routes of `OPERANDS` run.

Each returns the operands, and the part of `in_proj` that becomes the output's gate, if there is one.
"""

from __future__ import annotations

from functools import cache
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..kernels.prologue import launch as prologue
from ..kernels.prologue import operator, projected
from ..routes import Impl
from ..rules import Operands
from . import obstacles
from .sequences import Sequences

if TYPE_CHECKING:
    from .mixer import Gates, Mixer

Inputs = dict[str, Tensor]
Made = tuple[Operands, Tensor | None]


def operands_by_kernel(
    mixer: Mixer, inputs: Inputs, state: Tensor | None, sequences: Sequences, gates: Gates, impl: Impl
) -> Made:
    """By the prologue's kernels. With a gradient, that of all of `in_proj` is one tensor if f's matrix is plain.

    Args:
        mixer: the layer.
        inputs: what `in_proj` gives, by part, and "all" of it.
        state: the convolution's state, or None for zeros.
        sequences: where sequences begin and end.
        gates: the other projections, before their activations.
        impl: the routes.
    """
    if torch.is_grad_enabled() and _is_plain(mixer.f_proj):
        return projected.operands_of_projected(inputs["all"], mixer, gates)
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return operator.differentiable_operands(inputs["qkv"], mixer, gates), _gate_part(mixer, inputs)
    return prologue.operands(inputs["qkv"], mixer, state, sequences, gates), _gate_part(mixer, inputs)


def _is_plain(f_proj: Any) -> bool:
    """Whether f is a product with a matrix and nothing else, or no product."""
    return f_proj is None or (obstacles.plain_linear_obstacle(f_proj) is None and f_proj.bias is None)


def _gate_part(mixer: Mixer, inputs: Inputs) -> Tensor | None:
    return inputs["output_gate"] if mixer.parts["output_gate"] else None


def operands_in_torch(
    mixer: Mixer, inputs: Inputs, state: Tensor | None, sequences: Sequences, gates: Gates, impl: Impl
) -> Made:
    """The convolution, then the rule in torch.

    Args:
        mixer, inputs, state, sequences, gates, impl: as in `operands_by_kernel`.
    """
    convolved = mixer.conv(inputs["qkv"], state, sequences, impl=impl)
    return mixer.operands_of_convolved(convolved, gates), _gate_part(mixer, inputs)


def operands_compiled(
    mixer: Mixer, inputs: Inputs, state: Tensor | None, sequences: Sequences, gates: Gates, impl: Impl
) -> Made:
    """The convolution, then the rule's own function compiled by torch.

    Args:
        mixer, inputs, state, sequences, gates, impl: as in `operands_by_kernel`.
    """
    convolved = mixer.conv(inputs["qkv"], state, sequences, impl=impl)
    return _compiled_rule(mixer.rule)(mixer, convolved, gates), _gate_part(mixer, inputs)


@cache
def _compiled_rule(rule: str) -> Any:
    """The rule's own function, compiled."""

    def operands(mixer: Mixer, convolved: Tensor, gates: Gates) -> Operands:
        return mixer.operands_of_convolved(convolved, gates)

    return torch.compile(copied(operands))


def copied(function: Any) -> Any:
    """A copy of a function for one rule. torch keeps eight programs for one code, and a rule needs a few, by shapes."""
    code = function.__code__.replace()
    return FunctionType(code, function.__globals__, function.__name__, None, function.__closure__)
