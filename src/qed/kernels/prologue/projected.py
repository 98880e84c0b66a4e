"""The prologue from all that `in_proj` gives, as a torch operator whose gradient is one tensor.

    qed::projected_operands(projected, taps, f, f_weight, A_log, dt_bias, strength, direction, parts, rule, heads,
        width) -> (q, k, a, u, g, gate)
    qed::projected_operands_backward(dq, dk, da, du, dg, d_gate, the same) -> gradients of projected, taps and f_weight,
        and of A_log … strength in one vector

The parts of `projected` lie side by side. If each had a gradient of its own, laying these side by side again would read
and write as much as the kernels do. Here everything is written where it belongs. For this the operator has to know all
uses of `projected`: `gate` is a copy of the part that becomes the output's gate, and f, which is a product of a part
with `f_weight` where the decay is per channel, is given without its gradient, which goes to both factors here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, mm

from ...ops.registration import register, register_gradient, tensors
from ...rules import Operands
from ..launching import on_its_device
from .launch import Inputs, arguments, backward, gradients_like, launch, operands_like

if TYPE_CHECKING:
    from ...layers.mixer import Gates, Mixer

PARTS = ("qkv", "b", "w", "f", "output_gate")  # in their order
_INPUTS = (
    "Tensor projected, Tensor taps, Tensor? f, Tensor? f_weight, Tensor? A_log, Tensor? dt_bias, Tensor? strength, "
    "Tensor? direction, int[] parts, str rule, int heads, int width"
)


def _parts(projected: Tensor, parts: list[int]) -> list[Tensor | None]:
    return [x if x.shape[-1] else None for x in projected.split(parts, -1)]


def _inputs(
    projected: Tensor, taps: Tensor, f: Tensor | None, f_weight: Tensor | None, *more: Any
) -> tuple[Inputs, Tensor | None, Tensor | None]:
    """Return what the kernels take, the part that f is made of, and the output gate's."""
    A_log, dt_bias, strength, direction, parts, rule, heads, width = more
    qkv, b, w, part, gate = _parts(projected, parts)
    assert qkv is not None
    f = part if f is None else f
    return Inputs(qkv, taps, b, w, f, A_log, dt_bias, strength, direction, rule, heads, width), part, gate


def _results(x: Inputs, operands: Operands, gate: Tensor | None) -> tuple[Tensor, ...]:
    """Return the operator's results, which have to be tensors and none a view of its inputs."""
    nothing = x.qkv.new_empty(0)
    copied = nothing.clone() if gate is None else gate.new_empty(gate.shape).copy_(gate)
    return *operands[:4], nothing if operands.g is None else operands.g, copied


def _run(*given: Any) -> tuple[Tensor, ...]:
    x, _, gate = _inputs(*given)
    return _results(x, launch(*x), gate)


def _like(*given: Any) -> tuple[Tensor, ...]:
    x, _, gate = _inputs(*given)
    return _results(x, operands_like(x), gate)


def _gradients_like(*given: Any) -> tuple[Tensor | None, ...]:
    projected, f_weight, x = given[6], given[9], _inputs(*given[6:])[0]
    _, d_taps, *_, sums = gradients_like(x)
    d_weight = projected.new_empty(0 if f_weight is None else f_weight.shape)
    return projected.new_empty(projected.shape), d_taps, d_weight, sums


@on_its_device
def _run_backward(
    dq: Tensor, dk: Tensor, da: Tensor, du: Tensor, dg: Tensor | None, d_gate: Tensor, *given: Any
) -> tuple[Tensor | None, ...]:
    projected, f, f_weight, parts = given[0], given[2], given[3], given[-4]
    x, part, _ = _inputs(*given)
    whole = projected.new_empty(projected.shape)
    d_qkv, db, dw, d_part, to_gate = _parts(whole, parts)
    d_weight = projected.new_empty(0)
    df = d_part if f is None else f.new_empty(f.shape)
    assert d_qkv is not None
    *_, d_taps, sums = backward(dq, dk, da, du, dg, *x, into=(d_qkv, db, dw, df))
    if f_weight is not None:
        assert df is not None
        assert part is not None
        assert d_part is not None
        rows = df.flatten(0, 1)
        mm(rows, f_weight, out=d_part.flatten(0, 1))
        d_weight = mm(rows.t(), part.flatten(0, 1))
    if to_gate is not None:
        to_gate.copy_(d_gate)
    return whole, d_taps, d_weight, sums


_BACKWARD = register_gradient(
    "projected_operands_backward(Tensor dq, Tensor dk, Tensor da, Tensor du, Tensor? dg, Tensor d_gate, "
    f"{_INPUTS}) -> {tensors(4)}",
    _run_backward,
    _gradients_like,
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:8])
    ctx.sizes = inputs[8:]


def _differentiate(ctx: Any, dq: Tensor, dk: Tensor, da: Tensor, du: Tensor, dg: Tensor, d_gate: Tensor) -> Any:
    saved = ctx.saved_tensors  # asked for once: with gradient checkpointing, asking recomputes them
    given = (*saved, *ctx.sizes)
    whole, d_taps, d_weight, sums = _BACKWARD(dq, dk, da, du, dg if dg.numel() else None, d_gate, *given)
    each = zip(saved[4:7], sums.split(_inputs(*given)[0].summed()), strict=True)
    others = (None if y is None else d.view(y.shape).to(y.dtype) for y, d in each)
    return whole, d_taps, None, None if saved[3] is None else d_weight, *others, None, None, None, None, None


OPERANDS = register(
    f"projected_operands({_INPUTS}) -> {tensors(6)}", _run, _like, differentiate=_differentiate, keep=_keep
)


def operands_of_projected(projected: Tensor, mixer: Mixer, gates: Gates) -> tuple[Operands, Tensor | None]:
    """Return the operands of the recurrence, [B, T, H, ·], and the part that becomes the output's gate, with gradients.

    Args:
        projected: what `in_proj` gives, [B, T, ·].
        mixer: the layer with the parameters and the rule; its `f_proj`, if it has one, is a plain matrix.
        gates: the other projections, before their activations.
    """
    parts = [mixer.parts[name] for name in PARTS]
    x = arguments(projected[..., : parts[0]], mixer, gates)
    f = weight = None
    if mixer.f_proj is not None:
        assert x.f is not None
        f, weight = x.f.detach(), mixer.f_proj.weight.to(projected.dtype)
    q, k, a, u, g, gate = OPERANDS(projected, x.taps, f, weight, *x[5:9], parts, *x[9:])
    return Operands(q, k, a, u, g if mixer.row.decay != "none" else None), gate if parts[4] else None
