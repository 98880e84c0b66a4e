"""Launches the kernels that compute the operands of the recurrence from the output of `in_proj`, in one pass over
memory.

    q, k, v → short convolution, SiLU → L2 norm of q and k → a, u, g as the row of a rule says

In torch (`Mixer.operands_of_convolved`, `rules.py`), compiled or not, q, k and v are written to memory after the
convolution and read again; here a token's channels stay in registers. A rule that has its own function is computed by
that function in torch, not here. This file serves inference; `operator.py` has the same with its gradient.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ...rules import RULES, Operands, Rule
from ..launching import FUSED, Prepared, on_its_device, power_of_two

if TYPE_CHECKING:
    from ...layers.mixer import Gates, Mixer
    from ...layers.sequences import Sequences

WIDEST = 256  # the most channels that a head may have
STRETCH, WARPS = 4, 2  # how many tokens and warps a program has, forward and backward
WIDTHS = {"none": 0, "head": 1, "channel": 2}
# What these kernels and those for one token know of a rule: the values of its columns that they compute. A column that
# is not here has to have its default.
KNOWN_COLUMNS: dict[str, tuple[Any, ...]] = {
    "decay": ("none", "head", "channel"),
    "erase": ("head", "channel"),
    "write": ("none", "head", "channel"),
    "strength": (False, True),
    "gate": (False, True),
    "project": (False, True),
    "direction": ("none", "head"),
    "substeps": (1,),
    "function": (None,),
}


class Inputs(NamedTuple):
    """The arguments of the operator, in their order."""

    qkv: Tensor
    taps: Tensor  # of the convolution, [W, D] float32: channels side by side, as they are in qkv
    b: Tensor | None
    w: Tensor | None
    f: Tensor | None
    A_log: Tensor | None
    dt_bias: Tensor | None
    strength: Tensor | None
    direction: Tensor | None
    rule: str
    heads: int
    width: int

    @property
    def value_width(self) -> int:
        """V, the channels of a head's values."""
        return self.qkv.shape[2] // self.heads - 2 * self.width

    def sizes(self) -> tuple[Rule, int, int, int, int]:
        """Return the rule and the sizes that the kernels are compiled for: H, K, V and the taps of the convolution."""
        return RULES[self.rule], self.heads, self.width, self.value_width, self.taps.shape[0]

    def summed(self) -> list[int]:
        """Return the sizes of A_log, dt_bias and strength, whose gradients are sums over all tokens."""
        return [0 if y is None else y.numel() for y in (self.A_log, self.dt_bias, self.strength)]

    def laid_out(self) -> Inputs:
        """Return the inputs as the kernels read them: in each tensor [B, T, ·] all tokens are equally far apart in
        memory, and parameters are contiguous."""
        b, w, f = (None if y is None else _evenly_spaced(y) for y in (self.b, self.w, self.f))
        parameters = (self.A_log, self.dt_bias, self.strength, self.direction)
        A_log, dt_bias, strength, direction = (None if y is None else y.contiguous() for y in parameters)
        laid = self._replace(qkv=_evenly_spaced(self.qkv), b=b, w=w, f=f)
        return laid._replace(A_log=A_log, dt_bias=dt_bias, strength=strength, direction=direction)

    def strides(self) -> list[int]:
        """Return the distances in memory between tokens in qkv, b, w and f."""
        return [0 if y is None else y.stride(1) for y in (self.qkv, self.b, self.w, self.f)]


def operands(qkv: Tensor, mixer: Mixer, state: Tensor | None, sequences: Sequences, gates: Gates) -> Operands:
    """Return the operands of the recurrence, [B, T, H, ·].

    Args:
        qkv: input of the convolution, [B, T, 2·H·K + H·V].
        mixer: the layer with the parameters and the rule.
        state: the convolution's state [N, W − 1, ·]; None for zeros.
        sequences: where sequences begin and end.
        gates: the other projections, before their activations.
    """
    places = owners = None
    if sequences.cu_seqlens is not None:
        places, owners = sequences.positions(qkv)[0].to(torch.int32), sequences.owners(qkv).to(torch.int32)
    return launch(*arguments(qkv, mixer, gates), state=state, places=places, owners=owners)


def arguments(qkv: Tensor, mixer: Mixer, gates: Gates) -> Inputs:
    """Return the operator's inputs for a layer.

    Args:
        qkv: input of the convolution, [B, T, 2·H·K + H·V].
        mixer: the layer with the parameters and the rule.
        gates: the other projections, before their activations.
    """
    weight = mixer.conv.weight.to(qkv.dtype).t()  # rounded like the weights of a layer in that precision
    # One contiguous copy in every precision: from float32, `to` alone would return a view.
    taps = weight.to(torch.float32, memory_format=torch.contiguous_format).contiguous()
    A_log, dt_bias = (mixer.A_log, mixer.dt_bias) if mixer.row.decay != "none" else (None, None)
    direction = mixer.random_direction if mixer.row.direction == "head" else None
    sizes = mixer.rule, mixer.num_heads, mixer.head_dim
    return Inputs(qkv, taps, gates.b, gates.w, gates.f, A_log, dt_bias, gates.strength, direction, *sizes)


@on_its_device
def launch(
    *given: Any, state: Tensor | None = None, places: Tensor | None = None, owners: Tensor | None = None
) -> Operands:
    """Launch the forward kernel, and return the operands of the recurrence, [B, T, H, ·].

    Args:
        given: the fields of `Inputs`.
        state: the convolution's state; None for zeros.
        places, owners: every token's place in its sequence, and that sequence's number, where sequences are packed.
    """
    x = Inputs(*given)
    outputs, x = operands_like(x), x.laid_out()
    tokens = x.qkv.shape[:2].numel()
    if tokens:
        kernel = _prepared("operands_kernel", *x.sizes(), PACKED=places is not None, HAS_STATE=state is not None)
        kernel(
            (-(-tokens // STRETCH) * x.heads,),
            *(x.qkv, x.taps, x.taps if state is None else state.to(x.qkv.dtype).contiguous(), places, owners),
            *(*x[2:9], *outputs, *x.strides(), tokens, x.qkv.shape[1]),
        )
    return outputs


@on_its_device
def backward(
    dq: Tensor,
    dk: Tensor,
    da: Tensor,
    du: Tensor,
    dg: Tensor | None,
    *given: Any,
    into: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None] | None = None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of qkv, b, w, f and taps, and those of A_log, dt_bias and strength in one vector.

    Args:
        dq, dk, da, du, dg: gradients of the operands.
        given: the fields of `Inputs`.
        into: memory for the first four, whose tokens are evenly spaced; None to allocate it.
    """
    from ..convolution.launch import window_gradients

    x = Inputs(*given)
    if into is None:
        d_qkv, _, db, dw, df, _ = gradients_like(x)
        into = d_qkv, db, dw, df
    widths, x = x.summed(), x.laid_out()
    dz = x.qkv.new_empty(x.qkv.shape)
    apart = [0 if y is None or y.dim() < 3 else y.stride(1) for y in into[1:]]
    tokens = x.qkv.shape[:2].numel()
    stretches = -(-tokens // STRETCH)
    # The kernel writes the sums of every stretch and torch adds these up, so that there are no atomics.
    sums = dz.new_empty(stretches, sum(widths), dtype=torch.float32)
    if tokens:
        kernel = _prepared("gradients_kernel", *x.sizes())
        kernel(
            (stretches * x.heads,),
            *(y if y is None else y.contiguous() for y in (dq, dk, da, du, dg)),
            *(*x[:9], dz, *into[1:], *sums.split(widths, 1)),
            *(*x.strides(), *apart, sum(widths), tokens, x.qkv.shape[1]),
        )
    return *into, window_gradients(dz, x.qkv, x.taps, into[0]), sums.sum(0)


@lru_cache
def _prepared(name: str, row: Rule, H: int, K: int, V: int, W: int, **more: bool) -> Prepared:
    from . import kernels

    sizes = {"H": H, "K": K, "V": V, "W": W, "BT": STRETCH, "BK": power_of_two(K), "BV": power_of_two(V)}
    return Prepared(getattr(kernels, name), **sizes, **rule_constants(row), **more, **FUSED, num_warps=WARPS)


def rule_constants(row: Rule) -> dict[str, Any]:
    """Return the columns of a rule as constants of the kernels that compute a and u."""
    widths = {name.upper(): WIDTHS[getattr(row, name)] for name in ("erase", "write", "decay")}
    correction = {"CORRECTED": row.strength, "DIRECTED": row.direction == "head"}
    return widths | correction | {"GATE": row.gate, "PROJECT": row.project}


def _evenly_spaced(x: Tensor) -> Tensor:
    apart = x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)
    return x if x.stride(2) == 1 and apart else x.contiguous()


def operands_like(x: Inputs) -> Operands:
    """Return uninitialised memory for the operands."""

    def empty(width: int, **options: Any) -> Tensor:
        return x.qkv.new_empty(*x.qkv.shape[:2], x.heads, width, **options)

    decay, g = RULES[x.rule].decay, None
    if decay != "none":
        g = empty(x.width if decay == "channel" else 1, dtype=torch.float32)
    return Operands(empty(x.width), empty(x.width), empty(x.width), empty(x.value_width), g)


def gradients_like(x: Inputs) -> list[Tensor]:
    """Return uninitialised memory for the gradients that `backward` returns. It is contiguous, and empty for an input
    that is None, because an operator has to return tensors."""
    gates = (x.qkv.new_empty(0) if y is None else y.new_empty(y.shape) for y in (x.b, x.w, x.f))
    return [x.qkv.new_empty(x.qkv.shape), torch.empty_like(x.taps), *gates, x.taps.new_empty(sum(x.summed()))]
