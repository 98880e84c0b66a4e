"""Short causal convolution of every channel by itself, then SiLU.

    y_t = silu(Σ_s weight[W − 1 − s] · x_{t−s}),  s = 0 … W − 1

Before a sequence's first token lies its *state*: the W − 1 inputs that came before, zeros at the beginning.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .sequences import DENSE, Sequences


class ShortConvolution(nn.Module):
    def __init__(self, channels: int, width: int):
        super().__init__()
        if width < 1:
            raise ValueError(f"width: expected a positive number of taps, got {width}")
        self.weight = nn.Parameter(torch.empty(channels, width))

    def forward(self, x: Tensor, state: Tensor | None = None, sequences: Sequences = DENSE) -> tuple[Tensor, Tensor]:
        return short_convolution(x, self.weight.to(x.dtype), state, sequences)

    def extra_repr(self) -> str:
        return "{}, width={}".format(*self.weight.shape)


def short_convolution(
    x: Tensor, weight: Tensor, state: Tensor | None = None, sequences: Sequences = DENSE
) -> tuple[Tensor, Tensor]:
    """x [B, T, D], weight [D, W], state [N, W − 1, D] → y like x, and the state after the last token."""
    before, N = weight.shape[1] - 1, x.shape[0]
    if sequences.cu_seqlens is not None:
        return _packed(x, weight, state, sequences)
    if state is None:
        state = x.new_zeros(N, before, x.shape[-1])
    extended = torch.cat([state.to(x.dtype), x], 1)
    y = extended[:, : x.shape[1]] * weight[:, 0]
    for i in range(1, before + 1):
        y = y + extended[:, i : i + x.shape[1]] * weight[:, i]
    if sequences.lengths is None:
        last = extended[:, x.shape[1] :]
    else:
        last = _rows(extended, sequences.lengths[:, None] + torch.arange(before, device=x.device))
    return nn.functional.silu(y), last


def _packed(x: Tensor, weight: Tensor, state: Tensor | None, sequences: Sequences) -> tuple[Tensor, Tensor]:
    cu_seqlens, before = sequences.cu_seqlens, weight.shape[1] - 1
    assert cu_seqlens is not None
    if state is None:
        state = x.new_zeros(cu_seqlens.shape[0] - 1, before, x.shape[-1])
    owner, place, flat = sequences.owners(x), sequences.positions(x)[0], x[0]
    y = flat * weight[:, before]
    for s in range(1, before + 1):
        here = torch.nn.functional.pad(flat, (0, 0, s, 0))[: flat.shape[0]]  # x_{t−s}, of whichever sequence
        from_state = state[owner, (before - s + place).clamp(max=before - 1)].to(x.dtype)
        y = y + torch.where((place >= s)[:, None], here, from_state) * weight[:, before - s]
    # The last W − 1 inputs of each sequence with its state in front.
    starts, lengths = cu_seqlens[:-1, None], cu_seqlens.diff()[:, None]
    index = lengths + torch.arange(before, device=x.device)  # in state and tokens together
    tokens = flat[(starts + index - before).clamp(0, max(flat.shape[0] - 1, 0))] if flat.shape[0] else state.to(x.dtype)
    last = torch.where((index >= before)[..., None], tokens, _rows(state.to(x.dtype), index.clamp(max=before - 1)))
    return nn.functional.silu(y)[None], last


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """x [N, L, D], index [N, M] → [N, M, D]"""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))
