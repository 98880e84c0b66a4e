"""From what `in_proj` gives to what the op takes, in one pass over memory: for inference.

    q, k, v → short convolution, SiLU → L2 norm of q and k → a, u, g as the row of a rule says

The layer's torch functions (`convolution.py`, `Mixer._projections`, `rules.py`) say what this is. They write q, k and v
after the convolution and read them again, compiled or not; here a token's channels stay in registers. It has no
gradient, and does no rule with a function of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..ops.launching import FUSED, on_its_device
from ..rules import Operands
from .sequences import Sequences

if TYPE_CHECKING:
    from .mixer import Gates, Mixer

WIDEST = 256  # channels of a head
STRETCH, WARPS = 4, 2  # tokens and warps of a program
WIDTHS = {"none": 0, "head": 1, "channel": 2}


def fits(mixer: Mixer) -> bool:
    """Whether the columns of the layer's rule say all there is to say, and heads are not too wide."""
    row, widest = mixer.row, max(mixer.head_dim, mixer.value_head_dim)
    said_by_columns = row.function is None and row.direction != "token"
    one_gate_fits = row.write != "none" or row.erase == "head"
    return said_by_columns and one_gate_fits and widest <= WIDEST


@on_its_device
def operands(qkv: Tensor, mixer: Mixer, state: Tensor | None, sequences: Sequences, gates: Gates) -> Operands:
    """qkv [B, T, 2·H·K + H·V] before the convolution, its state [N, W − 1, ·], and gates → operands [B, T, H, ·]."""
    from .prologue_kernels import operands_kernel

    row, (batch, tokens) = mixer.row, qkv.shape[:2]
    H, K, V = mixer.num_heads, mixer.head_dim, mixer.value_head_dim
    q, k, a = (qkv.new_empty(batch, tokens, H, K) for _ in range(3))
    u, g = qkv.new_empty(batch, tokens, H, V), None
    if row.decay != "none":
        g = qkv.new_empty(batch, tokens, H, K if row.decay == "channel" else 1, dtype=torch.float32)
    qkv, b, w, f = _rows(qkv), *(None if x is None else _rows(x) for x in (gates.b, gates.w, gates.f))
    weight = mixer.conv.weight.to(qkv.dtype).t()
    taps = torch.empty(weight.shape, device=qkv.device).copy_(weight)  # channels side by side, as they are in qkv
    before = taps if state is None else state.to(qkv.dtype).contiguous()
    places = owners = None
    if sequences.cu_seqlens is not None:
        places, owners = sequences.positions(qkv)[0].to(torch.int32), sequences.owners(qkv).to(torch.int32)
    if batch * tokens:
        operands_kernel[(-(-batch * tokens // STRETCH) * H,)](
            *(qkv, taps, before, places, owners, b, w, f),
            *(mixer.A_log, mixer.dt_bias) if g is not None else (None, None),
            *(gates.strength, mixer.random_direction if row.direction == "head" else None),
            *(q, k, a, u, g),
            *(0 if x is None else x.stride(1) for x in (qkv, b, w, f)),
            *(batch * tokens, tokens),
            PACKED=places is not None,
            HAS_STATE=state is not None,
            **{"H": H, "K": K, "V": V, "W": taps.shape[0]},
            **{"ERASE": WIDTHS[row.erase], "WRITE": WIDTHS[row.write], "DECAY": WIDTHS[row.decay]},
            **{"CORRECTED": row.strength, "DIRECTED": row.direction == "head"},
            **{"GATE": row.gate, "PROJECT": row.project},
            **{"BT": STRETCH, "BK": 1 << (K - 1).bit_length(), "BV": 1 << (V - 1).bit_length()},
            **FUSED,
            num_warps=WARPS,
        )
    return Operands(q, k, a, u, g)


def _rows(x: Tensor) -> Tensor:
    """x [B, T, ·], its tokens at one distance from each other."""
    apart = x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)
    return x if x.stride(2) == 1 and apart else x.contiguous()
