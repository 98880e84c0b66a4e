"""Short causal convolution of every channel by itself, then SiLU.

    y_t = silu(Σ_s weight[W − 1 − s] · x_{t−s}),  s = 0 … W − 1

Before a sequence's first token lies its *state*: the W − 1 inputs that came before, zeros at the beginning.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..ops.forms import TRITON_INSTALLED
from .convolution_operator import WIDEST, convolution_operator
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
    x: Tensor, weight: Tensor, state: Tensor | None = None, sequences: Sequences = DENSE, impl: str = "auto"
) -> tuple[Tensor, Tensor]:
    """x [B, T, D], weight [D, W], state [N, W − 1, D] → y like x, and the state after the last token.

    `impl`: "torch", "triton", or "auto" for the kernels where they can run: on CUDA, for more than one token and up to
    four taps."""
    kernels = impl == "triton" or (impl == "auto" and _kernels_can_run(x, weight, state))
    y = _with_kernels(x, weight, state, sequences) if kernels else _with_torch(x, weight, state, sequences)
    return y, last_inputs(x, weight.shape[1] - 1, state, sequences)


def _kernels_can_run(x: Tensor, weight: Tensor, state: Tensor | None) -> bool:
    fit = x.shape[1] > 1 and x.dtype != torch.float64 and 1 < weight.shape[1] <= WIDEST
    if not (TRITON_INSTALLED and x.is_cuda and fit):
        return False
    return state is None or not (state.requires_grad and torch.is_grad_enabled())


def _with_torch(x: Tensor, weight: Tensor, state: Tensor | None, sequences: Sequences) -> Tensor:
    before = weight.shape[1] - 1
    if sequences.cu_seqlens is None:
        first = x.new_zeros(x.shape[0], before, x.shape[-1]) if state is None else state.to(x.dtype)
        extended = torch.cat([first, x], 1)
        y = extended[:, : x.shape[1]] * weight[:, 0]
        for i in range(1, before + 1):
            y = y + extended[:, i : i + x.shape[1]] * weight[:, i]
        return nn.functional.silu(y)
    owner, place, flat = sequences.owners(x), sequences.positions(x)[0], x[0]
    y = flat * weight[:, before]
    for s in range(1, before + 1):
        given = nn.functional.pad(flat, (0, 0, s, 0))[: flat.shape[0]]  # x_{t−s}, of whichever sequence
        earlier = given.new_zeros(()) if state is None else state[owner, (before - s + place).clamp(max=before - 1)]
        y = y + torch.where((place >= s)[:, None], given, earlier.to(x.dtype)) * weight[:, before - s]
    return nn.functional.silu(y)[None]


def _with_kernels(x: Tensor, weight: Tensor, state: Tensor | None, sequences: Sequences) -> Tensor:
    places = sequences.positions(x)
    if sequences.cu_seqlens is None:
        owner = torch.arange(x.shape[0], device=x.device)[:, None].expand(x.shape[:2])
    else:
        owner = sequences.owners(x)[None]
    y = convolution_operator(
        x.flatten(0, 1),
        weight,
        None if state is None else state.detach(),
        places.flatten().to(torch.int32),
        owner.flatten().to(torch.int32),
    )
    return y.view(*x.shape)


def last_inputs(x: Tensor, before: int, state: Tensor | None, sequences: Sequences) -> Tensor:
    """[N, W − 1, D]: of each sequence, with its state in front."""
    N = x.shape[0] if sequences.cu_seqlens is None else sequences.cu_seqlens.shape[0] - 1
    state = x.new_zeros(N, before, x.shape[-1]) if state is None else state.to(x.dtype)
    if sequences.cu_seqlens is not None:
        starts, lengths = sequences.cu_seqlens[:-1, None], sequences.cu_seqlens.diff()[:, None]
        index = lengths + torch.arange(before, device=x.device)  # in state and tokens together
        rows = (starts + index - before).clamp(0, max(x.shape[1] - 1, 0))
        tokens = x[0, rows] if x.shape[1] else state
        return torch.where((index >= before)[..., None], tokens, _rows(state, index.clamp(max=before - 1)))
    if sequences.lengths is not None:
        index = sequences.lengths[:, None] + torch.arange(before, device=x.device)
        return _rows(torch.cat([state, x], 1), index)
    if x.shape[1] >= before:
        return x[:, x.shape[1] - before :].clone()  # a view would keep all of x
    return torch.cat([state, x], 1)[:, x.shape[1] :]


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """x [N, L, D], index [N, M] → [N, M, D]"""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))
