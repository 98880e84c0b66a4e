"""From what `in_proj` gives to what the op takes, in one pass over memory.

    q, k, v → short convolution, SiLU → L2 norm of q and k → a, u, g as the row of a rule says

The layer's torch functions (`convolution.py`, `Mixer._projections`, `rules.py`) say what this is. They write q, k and v
after the convolution and read them again, compiled or not; here a token's channels stay in registers. It does no rule
with a function of its own. Here it is for inference; `prologue_operator.py` has it with its gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..ops.launching import FUSED, on_its_device
from ..rules import RULES, Operands, Rule
from .sequences import Sequences

if TYPE_CHECKING:
    from .mixer import Gates, Mixer

WIDEST = 256  # channels of a head
STRETCH, WARPS = 4, 2  # tokens and warps of a program, there and back
WIDTHS = {"none": 0, "head": 1, "channel": 2}


def fits(mixer: Mixer) -> bool:
    """Whether the columns of the layer's rule say all there is to say, and heads are not too wide."""
    row, widest = mixer.row, max(mixer.head_dim, mixer.value_head_dim)
    said_by_columns = row.function is None and row.direction != "token"
    one_gate_fits = row.write != "none" or row.erase == "head"
    return said_by_columns and one_gate_fits and widest <= WIDEST


def operands(qkv: Tensor, mixer: Mixer, state: Tensor | None, sequences: Sequences, gates: Gates) -> Operands:
    """qkv [B, T, 2·H·K + H·V] before the convolution, its state [N, W − 1, ·], and gates → operands [B, T, H, ·]."""
    places = owners = None
    if sequences.cu_seqlens is not None:
        places, owners = sequences.positions(qkv)[0].to(torch.int32), sequences.owners(qkv).to(torch.int32)
    weight = mixer.conv.weight.to(qkv.dtype)
    return launch(*arguments(qkv, weight, mixer, gates), state=state, places=places, owners=owners)


def arguments(qkv: Tensor, weight: Tensor, mixer: Mixer, gates: Gates) -> tuple[Any, ...]:
    """Of the operator, with the convolution's weight in qkv's precision."""
    row, decays = mixer.row, mixer.row.decay != "none"
    return (
        *(qkv, weight, gates.b, gates.w, gates.f),
        *((mixer.A_log, mixer.dt_bias) if decays else (None, None)),
        *(gates.strength, mixer.random_direction if row.direction == "head" else None),
        *(mixer.rule, mixer.num_heads, mixer.head_dim),
    )


@on_its_device
def launch(
    qkv: Tensor,
    weight: Tensor,
    b: Tensor | None,
    w: Tensor | None,
    f: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    strength: Tensor | None,
    direction: Tensor | None,
    rule: str,
    heads: int,
    width: int,
    *,
    state: Tensor | None = None,
    places: Tensor | None = None,
    owners: Tensor | None = None,
) -> Operands:
    from .prologue_kernels import operands_kernel

    found = operands_like(qkv, RULES[rule], heads, width)
    qkv, b, w, f = _rows(qkv), *(None if x is None else _rows(x) for x in (b, w, f))
    taps = _taps(weight)
    if qkv.shape[:2].numel():
        operands_kernel[(-(-qkv.shape[:2].numel() // STRETCH) * heads,)](
            *(qkv, taps, taps if state is None else state.to(qkv.dtype).contiguous(), places, owners),
            *(b, w, f, A_log, dt_bias, strength, direction, *found),
            *(0 if x is None else x.stride(1) for x in (qkv, b, w, f)),
            *(qkv.shape[:2].numel(), qkv.shape[1]),
            **{"PACKED": places is not None, "HAS_STATE": state is not None, "BT": STRETCH},
            **_constants(qkv, taps, RULES[rule], heads, width),
            num_warps=WARPS,
        )
    return found


@on_its_device
def backward(
    dq: Tensor,
    dk: Tensor,
    da: Tensor,
    du: Tensor,
    dg: Tensor | None,
    qkv: Tensor,
    weight: Tensor,
    b: Tensor,
    w: Tensor | None,
    f: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    strength: Tensor | None,
    direction: Tensor | None,
    rule: str,
    heads: int,
    width: int,
) -> tuple[Tensor, ...]:
    from .prologue_kernels import gradients_kernel

    grads = gradients_like(qkv, b, w, f, A_log, dt_bias, strength)
    qkv, b, w, f = _rows(qkv), _rows(b), *(None if x is None else _rows(x) for x in (w, f))
    taps, tokens = _taps(weight), qkv.shape[:2].numel()
    stretches = -(-tokens // STRETCH)
    # Of every stretch: what is summed over tokens is summed by torch. No atomics.
    sums = [x.new_empty(stretches, *x.shape, dtype=torch.float32) for x in grads[4:]]
    if tokens:
        gradients_kernel[(stretches * heads,)](
            *(x if x is None else x.contiguous() for x in (dq, dk, da, du, dg)),
            *(qkv, taps, b, w, f, A_log, dt_bias, strength, direction),
            *(*grads[:4], *sums),
            *(0 if x is None else x.stride(1) for x in (qkv, b, w, f)),
            *(tokens, qkv.shape[1]),
            **_constants(qkv, taps, RULES[rule], heads, width),
            BT=STRETCH,
            num_warps=WARPS,
        )
    return *grads[:4], *(x.sum(0).to(y.dtype) for x, y in zip(sums, grads[4:], strict=True))


def _constants(qkv: Tensor, taps: Tensor, row: Rule, H: int, K: int) -> dict[str, Any]:
    V = qkv.shape[2] // H - 2 * K
    return {
        **{"H": H, "K": K, "V": V, "W": taps.shape[0]},
        **{"ERASE": WIDTHS[row.erase], "WRITE": WIDTHS[row.write], "DECAY": WIDTHS[row.decay]},
        **{"CORRECTED": row.strength, "DIRECTED": row.direction == "head"},
        **{"GATE": row.gate, "PROJECT": row.project},
        **{"BK": 1 << (K - 1).bit_length(), "BV": 1 << (V - 1).bit_length()},
        **FUSED,
    }


def _taps(weight: Tensor) -> Tensor:
    """[W, D] float32: channels side by side, as they are in qkv."""
    return torch.empty(weight.shape[::-1], device=weight.device).copy_(weight.t())


def _rows(x: Tensor) -> Tensor:
    """x [B, T, ·], its tokens at one distance from each other."""
    apart = x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)
    return x if x.stride(2) == 1 and apart else x.contiguous()


def operands_like(qkv: Tensor, row: Rule, H: int, K: int) -> Operands:
    q, k, a = (qkv.new_empty(*qkv.shape[:2], H, K) for _ in range(3))
    u, g = qkv.new_empty(*qkv.shape[:2], H, qkv.shape[2] // H - 2 * K), None
    if row.decay != "none":
        g = qkv.new_empty(*qkv.shape[:2], H, K if row.decay == "channel" else 1, dtype=torch.float32)
    return Operands(q, k, a, u, g)


def gradients_like(qkv: Tensor, *inputs: Tensor | None) -> list[Tensor]:
    """Contiguous; empty where there is no such input: an operator returns tensors."""
    return [qkv.new_empty(qkv.shape), *(qkv.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs)]
