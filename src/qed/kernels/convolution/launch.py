"""Launches the kernels of the short convolution, and registers them as a torch operator.

qed::short_convolution(x, weight, state, place, owner) -> y
qed::short_convolution_backward(dy, x, weight, state, place, owner) -> (dx, dweight)
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...ops.registration import register, register_gradient
from ..launching import FUSED, Prepared, on_its_device

MOST_TAPS = 4  # the kernels keep the inputs of so many taps in registers
BLOCK_TOKENS, BLOCK_CHANNELS = 64, 256  # of one warp, each of whose threads has 16 bytes of a row
_INPUTS = "Tensor x, Tensor weight, Tensor? state, Tensor place, Tensor owner"


def _contiguous_rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


@lru_cache
def _prepared(name: str, D: int, W: int, **more: bool) -> Prepared:
    from . import kernels

    return Prepared(getattr(kernels, name), D=D, W=W, **more, **FUSED, BT=BLOCK_TOKENS, BD=BLOCK_CHANNELS, num_warps=1)


def _grid(x: Tensor) -> tuple[int, int]:
    tokens, D = x.shape
    return -(-tokens // BLOCK_TOKENS), -(-D // BLOCK_CHANNELS)


@on_its_device
def forward(x: Tensor, weight: Tensor, state: Tensor | None, place: Tensor, owner: Tensor) -> Tensor:
    """Return the convolution and SiLU of x, [tokens, D].

    Args:
        x: [tokens, D], the tokens of all sequences one behind the other.
        weight: [D, W].
        state: [N, W − 1, D], the inputs before each sequence's first token; None for zeros.
        place: [tokens], every token's place in its sequence.
        owner: [tokens], the number of the sequence that it belongs to.
    """
    x, state = _contiguous_rows(x), None if state is None else state.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.shape[0]:
        kernel = _prepared("forward_kernel", *weight.shape, HAS_STATE=state is not None)
        kernel(_grid(x), x, weight.contiguous(), state, place, owner, y, x.stride(0), x.shape[0])
    return y


@on_its_device
def backward(
    dy: Tensor, x: Tensor, weight: Tensor, state: Tensor | None, place: Tensor, owner: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of the weight; the state gets none. torch adds up the weight's gradient over the
    stretches of tokens, so that there are no atomics.

    Args:
        dy: gradient of y, [tokens, D].
        x, weight, state, place, owner: as in `forward`.
    """
    dy, x, grid = _contiguous_rows(dy), _contiguous_rows(x), _grid(x)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    d_weight = torch.empty(grid[0], *weight.shape, dtype=torch.float32, device=x.device)
    state = None if state is None else state.contiguous()
    if x.shape[0]:
        kernel = _prepared("backward_kernel", *weight.shape, HAS_STATE=state is not None)
        tensors = (dy, x, weight.contiguous(), state, place, owner, dx, d_weight)
        kernel(grid, *tensors, dy.stride(0), x.stride(0), x.shape[0])
    return dx, d_weight.sum(0).to(weight.dtype)


@on_its_device
def window_gradients(dz: Tensor, x: Tensor, taps: Tensor, dx: Tensor) -> Tensor:
    """Write the gradient of x in the sums Σ_s taps[W − 1 − s] · x_{t−s}, for the prologue's backward, and return that
    of taps.

    Args:
        dz: gradient of the sums, [B, T, D], contiguous.
        x: like dz, its tokens evenly spaced in memory.
        taps: [W, D].
        dx: memory for the gradient of x, its tokens evenly spaced too.
    """
    B, T, D = x.shape
    stretches = -(-T // BLOCK_TOKENS)
    d_taps = torch.empty(B * stretches, *taps.shape, dtype=torch.float32, device=x.device)
    if B * T:
        grid = (B * stretches, -(-D // BLOCK_CHANNELS))
        kernel = _prepared("window_gradients_kernel", D, taps.shape[0])
        kernel(grid, dz, x, taps, dx, d_taps, x.stride(1), dx.stride(1), T, stretches)
    return d_taps.sum(0)


_BACKWARD = register_gradient(
    f"short_convolution_backward(Tensor dy, {_INPUTS}) -> (Tensor, Tensor)",
    backward,
    lambda dy, x, weight, *_: (x.new_empty(x.shape), weight.new_empty(weight.shape)),
)


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    dx, d_weight = _BACKWARD(dy, *ctx.saved_tensors)
    return dx, d_weight, None, None, None


SHORT_CONVOLUTION = register(
    f"short_convolution({_INPUTS}) -> Tensor", forward, lambda x, *_: x.new_empty(x.shape), differentiate=_differentiate
)
