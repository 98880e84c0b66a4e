"""The short convolution as Triton kernels and a torch operator: `convolution.py` says what it computes.

Tokens lie flat, [tokens, D], whatever sequences they belong to. Token t's tap s is token t − s if that belongs to the
same sequence, `place[t] ≥ s`; otherwise it lies in the sequence's state.

    qed::short_convolution(x, weight, state, place, owner) -> y
    qed::short_convolution_backward(dy, x, weight, state, place, owner) -> (dx, dweight)

The state gets no gradient here. The weight's is summed over blocks of tokens by torch: no atomics.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_TOKENS, BLOCK_CHANNELS = 64, 64


@triton.jit
def tap(
    x, x_stride, state, t, place, owner, channels, s, tokens,
    D: tl.constexpr, W: tl.constexpr, HAS_STATE: tl.constexpr,
):  # fmt: skip
    """Input s before each token t [BT], for `channels` [BD]; zeros before a sequence without a state."""
    there = (t < tokens) & (t >= 0)
    mine = there & (place >= s)
    inside = channels < D
    found = tl.load(
        x + (t - s).to(tl.int64)[:, None] * x_stride + channels[None, :],
        mask=mine[:, None] & inside[None, :],
        other=0.0,
    ).to(tl.float32)
    if HAS_STATE:
        before = there & (place < s)
        row = owner.to(tl.int64) * (W - 1) + (W - 1 - s + place)
        found += tl.load(
            state + row[:, None] * D + channels[None, :], mask=before[:, None] & inside[None, :], other=0.0
        ).to(tl.float32)
    return found


@triton.jit
def convolved(
    x, x_stride, weight, state, places, owners, t, channels, tokens,
    D: tl.constexpr, W: tl.constexpr, HAS_STATE: tl.constexpr,
):  # fmt: skip
    """Σ_s weight[W − 1 − s] · x_{t−s}, and where the tokens are in their sequences."""
    there = (t < tokens) & (t >= 0)
    place = tl.load(places + t, mask=there, other=0)
    owner = tl.load(owners + t, mask=there, other=0)
    z = tl.zeros((t.shape[0], channels.shape[0]), tl.float32)
    for s in tl.static_range(W):
        w = tl.load(weight + channels * W + (W - 1 - s), mask=channels < D, other=0.0).to(tl.float32)
        z += w[None, :] * tap(x, x_stride, state, t, place, owner, channels, s, tokens, D, W, HAS_STATE)
    return z, place, owner


@triton.jit
def forward_kernel(
    x, weight, state, places, owners, y, x_stride, tokens,
    D: tl.constexpr, W: tl.constexpr, HAS_STATE: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    channels = tl.program_id(1) * BD + tl.arange(0, BD)
    z, _, _ = convolved(x, x_stride, weight, state, places, owners, t, channels, tokens, D, W, HAS_STATE)
    inside = (t < tokens)[:, None] & (channels < D)[None, :]
    tl.store(
        y + t.to(tl.int64)[:, None] * D + channels[None, :], (z * tl.sigmoid(z)).to(y.dtype.element_ty), mask=inside
    )


@triton.jit
def backward_kernel(
    dy, x, weight, state, places, owners, dx, d_weight,  # d_weight [blocks of tokens, D, W]
    x_stride, tokens,
    D: tl.constexpr, W: tl.constexpr, HAS_STATE: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    channels = tl.program_id(1) * BD + tl.arange(0, BD)
    inside = channels < D
    here = tl.load(places + t, mask=t < tokens, other=0)
    sum_ = tl.zeros((BT, BD), tl.float32)
    for s in tl.static_range(W):
        later = t + s
        z, place, owner = convolved(
            x, x_stride, weight, state, places, owners, later, channels, tokens, D, W, HAS_STATE
        )
        where = later.to(tl.int64)[:, None] * D + channels[None, :]
        d = tl.load(dy + where, mask=(later < tokens)[:, None] & inside[None, :], other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(z)
        dz = d * sigmoid * (1 + z * (1 - sigmoid))
        w = tl.load(weight + channels * W + (W - 1 - s), mask=inside, other=0.0).to(tl.float32)
        same = (later < tokens) & (place == here + s)
        sum_ += tl.where(same[:, None], w[None, :] * dz, 0.0)
        if s == 0:
            block = tl.program_id(0).to(tl.int64) * D * W
            for i in tl.static_range(W):
                given = tap(x, x_stride, state, t, place, owner, channels, i, tokens, D, W, HAS_STATE)
                tl.store(d_weight + block + channels * W + (W - 1 - i), tl.sum(dz * given, 0), mask=inside)
    where = t.to(tl.int64)[:, None] * D + channels[None, :]
    tl.store(dx + where, sum_.to(dx.dtype.element_ty), mask=(t < tokens)[:, None] & inside[None, :])


def _arguments(x: Tensor, weight: Tensor, state: Tensor | None) -> tuple[Tensor, tuple[int, int], dict[str, Any]]:
    x = x if x.stride(1) == 1 else x.contiguous()
    tokens, D = x.shape
    grid = (triton.cdiv(tokens, BLOCK_TOKENS), triton.cdiv(D, BLOCK_CHANNELS))
    constants = {"D": D, "W": weight.shape[1], "HAS_STATE": state is not None}
    return x, grid, constants | {"BT": BLOCK_TOKENS, "BD": BLOCK_CHANNELS, "num_warps": 4}


def forward(x: Tensor, weight: Tensor, state: Tensor | None, place: Tensor, owner: Tensor) -> Tensor:
    """x [tokens, D], weight [D, W], state [N, W − 1, D], place and owner [tokens] → y [tokens, D]."""
    x, grid, constants = _arguments(x, weight, state)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    state = None if state is None else state.contiguous()
    if x.shape[0]:
        forward_kernel[grid](x, weight.contiguous(), state, place, owner, y, x.stride(0), x.shape[0], **constants)
    return y


def backward(
    dy: Tensor, x: Tensor, weight: Tensor, state: Tensor | None, place: Tensor, owner: Tensor
) -> tuple[Tensor, Tensor]:
    x, grid, constants = _arguments(x, weight, state)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    d_weight = torch.empty(grid[0], *weight.shape, dtype=torch.float32, device=x.device)
    state = None if state is None else state.contiguous()
    if x.shape[0]:
        backward_kernel[grid](
            *(dy.contiguous(), x, weight.contiguous(), state, place, owner, dx, d_weight),
            *(x.stride(0), x.shape[0]),
            **constants,
        )
    return dx, d_weight.sum(0).to(weight.dtype)
