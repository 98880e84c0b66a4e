"""The arguments of the recurrence in the order of its torch operators, as one value."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Arguments(NamedTuple):
    """What the forms of `erase_write` compute from; `api.erase_write` says what each is."""

    q: Tensor  # [B, T, H, K]
    k: Tensor  # [B, T, H, K]
    a: Tensor  # [B, T, H, K]
    u: Tensor  # [B, T, H, V]
    g: Tensor | None  # [B, T, H, K or 1]
    initial_state: Tensor | None  # [N, H, K, V]
    cu_seqlens: Tensor | None  # [N + 1]
    scale: float
