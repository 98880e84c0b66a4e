"""A layer's maps made small enough for a page: of every token its strongest sources, in one byte each.

The maps of 24 heads and 1,024 tokens are 200 MB as they are. Here a row of a map keeps the n sources of the largest
size, strongest first, rounded to 1/127 of the strongest. What rounds to 0 is not kept. A row says which share of it is
kept: the sizes of the kept sources over those of all.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..analysis.look import Look

LEVELS, FINE = 127, 32767  # to which the sizes of a row are rounded, and those of another map beside them
BANDS = (0.1, 0.9)  # quantiles over channels between which most of a gate lies
STATE_ROWS = 32  # of the picture of the state; where a head has more key channels, neighbours are taken together


@dataclass(frozen=True)
class Sources:
    """The strongest sources of every token in one map."""

    index: np.ndarray  # [T, n] uint16, strongest first
    level: np.ndarray  # [T, n] int8: the value is level / LEVELS · scale; 0 where there is no source any more
    scale: np.ndarray  # [T] float32: the largest size in the row
    share: np.ndarray  # [T] uint8: at least share / 255 of the row's size is kept
    beside: np.ndarray | None = None  # [T, n] int16: another map's values there, as 1/FINE of that map's scale

    def packed(self) -> dict[str, str]:
        """The arrays by name, each as base64 of its bytes, the lowest first."""
        return {name: packed(x) for name, x in self.__dict__.items() if x is not None}


def strongest(rows: Tensor, count: int, other: Tensor | None = None) -> Sources:
    """Return the strongest sources of every row of a map.

    Args:
        rows: a map [T, T] of finite values.
        count: how many sources a row keeps.
        other: another map [T, T], whose values at the kept places are kept beside them.
    """
    sizes = rows.abs()
    scale = sizes.amax(-1, keepdim=True)
    index = sizes.topk(min(count, rows.shape[-1]), dim=-1).indices
    level = (LEVELS * _over(rows.gather(-1, index), scale)).round().to(torch.int8)
    kept = _over((sizes.gather(-1, index) * (level != 0)).sum(-1), sizes.sum(-1))
    beside = None
    if other is not None:
        parts = _over(other.gather(-1, index), other.abs().amax(-1, keepdim=True))
        beside = (FINE * parts).round().cpu().numpy().astype(np.int16)
    return Sources(
        index=index.cpu().numpy().astype(np.uint16),
        level=level.cpu().numpy(),
        scale=scale[:, 0].cpu().numpy().astype(np.float32),
        share=torch.where(sizes.any(-1), (255 * kept).floor(), 255).clamp(max=255).to(torch.uint8).cpu().numpy(),
        beside=beside,
    )


def _over(part: Tensor, whole: Tensor) -> Tensor:
    """Return part / whole, which is 0 where the whole is."""
    return part / torch.where(whole > 0, whole, 1)


def packed(x: np.ndarray) -> str:
    """Return the bytes of an array, lowest first, as base64."""
    return base64.b64encode(x.astype(x.dtype.newbyteorder("<")).tobytes()).decode()


def series(values: Tensor) -> dict[str, Any]:
    """Return numbers of 0 or more as 16 bits of the largest of them or of 1, whichever is more."""
    most = max(1.0, float(values.max())) if values.numel() else 1.0
    return {"most": most, "values": packed((65535 * values / most).round().cpu().numpy().astype(np.uint16))}


def over_channels(gate: Tensor) -> dict[str, dict[str, Any]]:
    """Return the mean over channels of a gate [T, channels] and, if it has several, the BANDS over channels."""
    named = {"mean": series(gate.mean(-1))}
    if gate.shape[-1] > 1:
        low, high = gate.quantile(torch.tensor(BANDS, dtype=gate.dtype, device=gate.device), dim=-1)
        named |= {"low": series(low), "high": series(high)}
    return named


def state_picture(norms: Tensor) -> dict[str, Any]:
    """Return norms of the state's rows over time [N, K] as at most STATE_ROWS rows of bytes, relative to the largest.

    Neighbouring channels are taken together by the norm of their part of the state.
    """
    together = -(-norms.shape[-1] // STATE_ROWS)
    parts = norms.square().split(together, -1)
    rows = torch.stack([part.sum(-1) for part in parts], -1).sqrt()
    most = float(rows.max())
    levels = (255 * _over(rows, rows.max())).round().cpu().numpy().astype(np.uint8)
    return {"most": most, "rows": rows.shape[-1], "together": together, "values": packed(levels)}


def head(look: Look, number: int, count: int) -> dict[str, Any]:
    """Return everything that the page shows of one head, for the only text of a batch.

    Args:
        look: what its layer does.
        number: the head's number in the layer.
        count: how many sources of a token are kept.
    """
    attention, forgotten = look.attention[0, number], look.forgotten
    gates = {name: over_channels(gate[0, :, number]) for name, gate in look.gates.items()}
    shown: dict[str, Any] = {
        "head": number,
        "read": strongest(attention, count).packed(),
        "gates": gates,
        "state": state_picture(look.state[0, :, number]) | {"stride": look.stride},
        **dict.fromkeys(("strength", "change", "lost", "correction", "erased")),
    }
    if forgotten is None or look.without_correction is None:
        return shown
    assert look.strength is not None
    assert look.correction is not None
    assert look.change is not None
    lost = forgotten[0, number]
    sizes = lost.abs().sum(-1), look.without_correction[0, number].abs().sum(-1)
    return shown | {
        "strength": float(look.strength[number]),
        "change": float(look.change[0, number]),
        "lost": strongest(lost, count, attention).packed(),
        "correction": series(look.correction[0, :, number]),
        "erased": series(_over(*sizes)),
    }


def bytes_per_token(count: int) -> int:
    """Return at most how many bytes a token takes on the page for each head, but for the state's picture."""
    maps = count * (2 + 1) + count * (2 + 1 + 2) + 2 * (4 + 1)
    along = 2 * (3 * 3 + 2)
    return -(-(maps + along) * 4 // 3)  # base64 writes three bytes as four characters
