"""The short convolution as Triton kernels and a torch operator: `convolution.py` says what it computes.

Tokens lie flat, [tokens, D], whatever sequences they belong to. A program has a stretch of tokens and some channels,
and goes from token to token with the last three inputs in registers: every input is read once. Where a sequence begins,
`place` = 0, they are replaced by its state.

    qed::short_convolution(x, weight, state, place, owner) -> y
    qed::short_convolution_backward(dy, x, weight, state, place, owner) -> (dx, dweight)

The state gets no gradient here. The weight's is summed over stretches of tokens by torch: no atomics. The prologue
convolves by itself, and takes `window_gradients` from here.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops.launching import FUSED, on_its_device
from .sigmoid import silu, silu_gradient

BLOCK_TOKENS, BLOCK_CHANNELS = 64, 256  # one warp, and 16 bytes of each thread's in a row


@triton.jit
def tap_weight(
    weight, channels, s: tl.constexpr, D: tl.constexpr, W: tl.constexpr, apart: tl.constexpr, taps_apart: tl.constexpr
):
    """What input s before a token counts [BD]; nothing beyond W taps. Channels lie so far apart, and taps."""
    if s < W:
        found = tl.load(weight + channels * apart + (W - 1 - s) * taps_apart, mask=channels < D, other=0.0)
        return found.to(tl.float32)
    return tl.zeros((channels.shape[0],), tl.float32)


@triton.jit
def row(x, t, stride, channels, there, D: tl.constexpr):
    """x_t [BD], zeros if it is not there."""
    inside = channels < tl.where(there, D, 0)
    return tl.load(x + t.to(tl.int64) * stride + channels, mask=inside, other=0.0)


@triton.jit
def earlier(
    x, stride, state, t, place, owner, channels, s: tl.constexpr,
    D: tl.constexpr, W: tl.constexpr, HAS_STATE: tl.constexpr,
):  # fmt: skip
    """Input s before token t, or what its sequence's state has for it."""
    found = row(x, t - s, stride, channels, place >= s, D).to(tl.float32)
    if HAS_STATE and s < W:
        where = owner.to(tl.int64) * (W - 1) + (W - 1 - s + place)
        found += row(state, where, D, channels, place < s, D).to(tl.float32)
    return found


@triton.jit
def forward_kernel(
    x, weight, state, places, owners, y, x_stride, tokens,
    D: tl.constexpr, W: tl.constexpr, HAS_STATE: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BT
    last = tl.minimum(first + BT, tokens)
    channels = tl.program_id(1) * BD + tl.arange(0, BD)
    w0, w1 = tap_weight(weight, channels, 0, D, W, W, 1), tap_weight(weight, channels, 1, D, W, W, 1)
    w2, w3 = tap_weight(weight, channels, 2, D, W, W, 1), tap_weight(weight, channels, 3, D, W, W, 1)
    place, owner = tl.load(places + first), tl.load(owners + first)
    x1 = earlier(x, x_stride, state, first, place, owner, channels, 1, D, W, HAS_STATE)
    x2 = earlier(x, x_stride, state, first, place, owner, channels, 2, D, W, HAS_STATE)
    x3 = earlier(x, x_stride, state, first, place, owner, channels, 3, D, W, HAS_STATE)
    next0 = row(x, first, x_stride, channels, first < last, D)
    next1 = row(x, first + 1, x_stride, channels, first + 1 < last, D)
    next2 = row(x, first + 2, x_stride, channels, first + 2 < last, D)
    next_place = place
    for i in range(last - first):
        t = first + i
        x0, next0, next1 = next0.to(tl.float32), next1, next2
        next2 = row(x, t + 3, x_stride, channels, t + 3 < last, D)  # on its way while three tokens are worked on
        place, next_place = next_place, tl.load(places + t + 1, mask=t + 1 < last, other=0)
        if place == 0:
            owner = tl.load(owners + t)
            x1 = earlier(x, x_stride, state, t, place, owner, channels, 1, D, W, HAS_STATE)
            x2 = earlier(x, x_stride, state, t, place, owner, channels, 2, D, W, HAS_STATE)
            x3 = earlier(x, x_stride, state, t, place, owner, channels, 3, D, W, HAS_STATE)
        z = w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3
        tl.store(y + t.to(tl.int64) * D + channels, silu(z).to(y.dtype.element_ty), mask=channels < D)
        x3, x2, x1 = x2, x1, x0


@triton.jit
def backward_kernel(
    dy, x, weight, state, places, owners, dx, d_weight,  # d_weight [stretches of tokens, D, W]
    dy_stride, x_stride, tokens,
    D: tl.constexpr, W: tl.constexpr, HAS_STATE: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """An input's gradient is whole three tokens later: the pass goes on that far into the next stretch."""
    first = tl.program_id(0) * BT
    last = tl.minimum(first + BT, tokens)
    channels = tl.program_id(1) * BD + tl.arange(0, BD)
    inside = channels < D
    w0, w1 = tap_weight(weight, channels, 0, D, W, W, 1), tap_weight(weight, channels, 1, D, W, W, 1)
    w2, w3 = tap_weight(weight, channels, 2, D, W, W, 1), tap_weight(weight, channels, 3, D, W, W, 1)
    place, owner = tl.load(places + first), tl.load(owners + first)
    x1 = earlier(x, x_stride, state, first, place, owner, channels, 1, D, W, HAS_STATE)
    x2 = earlier(x, x_stride, state, first, place, owner, channels, 2, D, W, HAS_STATE)
    x3 = earlier(x, x_stride, state, first, place, owner, channels, 3, D, W, HAS_STATE)
    x_next0 = row(x, first, x_stride, channels, first < tokens, D)
    d_next0 = row(dy, first, dy_stride, channels, first < tokens, D)
    x_next1 = row(x, first + 1, x_stride, channels, first + 1 < tokens, D)
    d_next1 = row(dy, first + 1, dy_stride, channels, first + 1 < tokens, D)
    nothing = tl.zeros((BD,), tl.float32)
    d1, d2, d3 = nothing, nothing, nothing  # of the inputs one, two and three tokens ago, as far as it has come
    dw0, dw1, dw2, dw3 = nothing, nothing, nothing, nothing
    next_place = place
    for i in range(last - first + 3):
        t = first + i
        here, then = t < tokens, t + 2 < tokens
        x0, d = x_next0.to(tl.float32), d_next0.to(tl.float32)
        x_next0, d_next0 = x_next1, d_next1
        x_next1 = row(x, t + 2, x_stride, channels, then, D)
        d_next1 = row(dy, t + 2, dy_stride, channels, then, D)
        place, next_place = next_place, tl.load(places + t + 1, mask=t + 1 < tokens, other=0)
        if place == 0:
            owner = tl.load(owners + t, mask=here, other=0)
            x1 = earlier(x, x_stride, state, t, place, owner, channels, 1, D, W, HAS_STATE)
            x2 = earlier(x, x_stride, state, t, place, owner, channels, 2, D, W, HAS_STATE)
            x3 = earlier(x, x_stride, state, t, place, owner, channels, 3, D, W, HAS_STATE)
        z = w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3
        dz = silu_gradient(z, d)
        d1 += tl.where(place >= 1, w1 * dz, 0.0)
        d2 += tl.where(place >= 2, w2 * dz, 0.0)
        d3 += tl.where(place >= 3, w3 * dz, 0.0)
        whole = t - 3
        tl.store(
            dx + whole.to(tl.int64) * D + channels,
            d3.to(dx.dtype.element_ty),
            mask=channels < tl.where(whole >= first, D, 0),
        )
        mine = tl.where(t < last, dz, 0.0)
        dw0 += mine * x0
        dw1 += mine * x1
        dw2 += mine * x2
        dw3 += mine * x3
        d3, d2, d1 = d2, d1, w0 * dz
        x3, x2, x1 = x2, x1, x0
    to = d_weight + tl.program_id(0).to(tl.int64) * D * W + channels * W + (W - 1)
    tl.store(to, dw0, mask=inside)
    if W > 1:
        tl.store(to - 1, dw1, mask=inside)
    if W > 2:
        tl.store(to - 2, dw2, mask=inside)
    if W > 3:
        tl.store(to - 3, dw3, mask=inside)


@triton.jit
def window_gradients_kernel(
    dz, x, taps, dx, d_taps,  # taps [W, D]; d_taps like it, of every stretch of tokens
    x_stride, tokens, stretches,
    D: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Of inputs and taps, from that of the sums, where rows of tokens start from nothing: as above, but with no sums to
    make again and no places to ask for, so the next three tokens are on their way."""
    sequence, first = tl.program_id(0) // stretches, tl.program_id(0) % stretches * BT
    channels = tl.program_id(1) * BD + tl.arange(0, BD)
    start = sequence.to(tl.int64) * tokens
    dz += start * D
    dx += start * D
    x += start * x_stride
    last = tl.minimum(first + BT, tokens)
    w0, w1 = tap_weight(taps, channels, 0, D, W, 1, D), tap_weight(taps, channels, 1, D, W, 1, D)
    w2, w3 = tap_weight(taps, channels, 2, D, W, 1, D), tap_weight(taps, channels, 3, D, W, 1, D)
    x1 = row(x, first - 1, x_stride, channels, first - 1 >= 0, D).to(tl.float32)
    x2 = row(x, first - 2, x_stride, channels, first - 2 >= 0, D).to(tl.float32)
    x3 = row(x, first - 3, x_stride, channels, first - 3 >= 0, D).to(tl.float32)
    x_next0 = row(x, first, x_stride, channels, first < last, D)
    d_next0 = row(dz, first, D, channels, first < tokens, D)
    x_next1 = row(x, first + 1, x_stride, channels, first + 1 < last, D)
    d_next1 = row(dz, first + 1, D, channels, first + 1 < tokens, D)
    x_next2 = row(x, first + 2, x_stride, channels, first + 2 < last, D)
    d_next2 = row(dz, first + 2, D, channels, first + 2 < tokens, D)
    # Each with zeros of its own: of two names for one value, d3 = d2 changes nothing in the loop's first pass, and what
    # the first pass does not change Triton takes for constant.
    d1, d2, d3 = tl.zeros((BD,), tl.float32), tl.zeros((BD,), tl.float32), tl.zeros((BD,), tl.float32)
    dw0, dw1, dw2, dw3 = d1, d1, d1, d1
    for i in range(last - first + 3):
        t = first + i
        x0, x_next0, x_next1 = x_next0.to(tl.float32), x_next1, x_next2
        d0, d_next0, d_next1 = d_next0.to(tl.float32), d_next1, d_next2
        x_next2 = row(x, t + 3, x_stride, channels, t + 3 < last, D)
        d_next2 = row(dz, t + 3, D, channels, t + 3 < tokens, D)
        to = dx + (t - 3).to(tl.int64) * D + channels
        whole = channels < tl.where(i >= 3, D, 0)
        tl.store(to, (w0 * d3 + w1 * d2 + w2 * d1 + w3 * d0).to(dx.dtype.element_ty), mask=whole)
        mine = tl.where(t < last, d0, 0.0)
        dw0 += mine * x0
        dw1 += mine * x1
        dw2 += mine * x2
        dw3 += mine * x3
        d3, d2, d1 = d2, d1, d0
        x3, x2, x1 = x2, x1, x0
    d_taps += tl.program_id(0).to(tl.int64) * (W * D) + (W - 1) * D + channels
    inside = channels < D
    tl.store(d_taps, dw0, mask=inside)
    if W > 1:
        tl.store(d_taps - D, dw1, mask=inside)
    if W > 2:
        tl.store(d_taps - 2 * D, dw2, mask=inside)
    if W > 3:
        tl.store(d_taps - 3 * D, dw3, mask=inside)


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _settings(x: Tensor, weight: Tensor, state: Tensor | None) -> tuple[tuple[int, int], dict[str, Any]]:
    tokens, D = x.shape
    grid = (-(-tokens // BLOCK_TOKENS), -(-D // BLOCK_CHANNELS))
    constants = {"D": D, "W": weight.shape[1], "HAS_STATE": state is not None}
    return grid, constants | FUSED | {"BT": BLOCK_TOKENS, "BD": BLOCK_CHANNELS, "num_warps": 1}


@on_its_device
def forward(x: Tensor, weight: Tensor, state: Tensor | None, place: Tensor, owner: Tensor) -> Tensor:
    """x [tokens, D], weight [D, W], state [N, W − 1, D], place and owner [tokens] → y [tokens, D]."""
    x, (grid, constants) = _rows(x), _settings(x, weight, state)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    state = None if state is None else state.contiguous()
    if x.shape[0]:
        forward_kernel[grid](x, weight.contiguous(), state, place, owner, y, x.stride(0), x.shape[0], **constants)
    return y


@on_its_device
def backward(
    dy: Tensor, x: Tensor, weight: Tensor, state: Tensor | None, place: Tensor, owner: Tensor
) -> tuple[Tensor, Tensor]:
    dy, x, (grid, constants) = _rows(dy), _rows(x), _settings(x, weight, state)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    d_weight = torch.empty(grid[0], *weight.shape, dtype=torch.float32, device=x.device)
    state = None if state is None else state.contiguous()
    if x.shape[0]:
        backward_kernel[grid](
            *(dy, x, weight.contiguous(), state, place, owner, dx, d_weight),
            *(dy.stride(0), x.stride(0), x.shape[0]),
            **constants,
        )
    return dx, d_weight.sum(0).to(weight.dtype)


@on_its_device
def window_gradients(dz: Tensor, x: Tensor, taps: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of Σ_s taps[W − 1 − s] · x_{t−s}: dz like x, x [B, T, D] with tokens at one distance, taps [W, D]."""
    B, T, D = x.shape
    stretches = -(-T // BLOCK_TOKENS)
    dx = torch.empty_like(dz)
    d_taps = torch.empty(B * stretches, *taps.shape, dtype=torch.float32, device=x.device)
    if B * T:
        window_gradients_kernel[(B * stretches, -(-D // BLOCK_CHANNELS))](
            *(dz, x, taps, dx, d_taps, x.stride(1), T, stretches),
            **{"D": D, "W": taps.shape[0], "BT": BLOCK_TOKENS, "BD": BLOCK_CHANNELS},
            **FUSED,
            num_warps=1,
        )
    return dx, d_taps.sum(0)
