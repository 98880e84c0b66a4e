"""The short convolution as Triton kernels: `layers/convolution.py` defines what it computes.

The tokens of all sequences lie one behind the other, [tokens, D]. A program has a stretch of tokens and some channels,
and goes from token to token with the last three inputs in registers, so that every input is read once. Where a sequence
begins, `place` = 0, these three inputs are replaced by its state.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..activations import silu, silu_gradient


@triton.jit
def tap_weight(
    weight, channels, s: tl.constexpr, D: tl.constexpr, W: tl.constexpr, apart: tl.constexpr, taps_apart: tl.constexpr
):
    """Load the weights [BD] of the input s tokens before; they are 0 beyond W taps. `apart` and `taps_apart` are the
    distances in memory between channels and between taps."""
    if s < W:
        found = tl.load(weight + channels * apart + (W - 1 - s) * taps_apart, mask=channels < D, other=0.0)
        return found.to(tl.float32)
    return tl.zeros((channels.shape[0],), tl.float32)


@triton.jit
def tap_weights(
    weight, channels, D: tl.constexpr, W: tl.constexpr, apart: tl.constexpr, taps_apart: tl.constexpr
):  # fmt: skip
    """Load the weights of a token and of the three before it."""
    w0 = tap_weight(weight, channels, 0, D, W, apart, taps_apart)
    w1 = tap_weight(weight, channels, 1, D, W, apart, taps_apart)
    w2 = tap_weight(weight, channels, 2, D, W, apart, taps_apart)
    w3 = tap_weight(weight, channels, 3, D, W, apart, taps_apart)
    return w0, w1, w2, w3


@triton.jit
def row(x, t, stride, channels, there, D: tl.constexpr):
    """Load token t of x, [BD]; zeros if it is not there."""
    inside = channels < tl.where(there, D, 0)
    return tl.load(x + t.to(tl.int64) * stride + channels, mask=inside, other=0.0)


@triton.jit
def earlier(
    x, stride, state, t, place, owner, channels, s: tl.constexpr,
    D: tl.constexpr, W: tl.constexpr, HAS_STATE: tl.constexpr,
):  # fmt: skip
    """Load the input s tokens before token t, from the state of its sequence if that lies before its first token."""
    found = row(x, t - s, stride, channels, place >= s, D).to(tl.float32)
    if HAS_STATE and s < W:
        where = owner.to(tl.int64) * (W - 1) + (W - 1 - s + place)
        found += row(state, where, D, channels, place < s, D).to(tl.float32)
    return found


@triton.jit
def three_earlier(
    x, stride, state, t, place, owner, channels, D: tl.constexpr, W: tl.constexpr, HAS_STATE: tl.constexpr
):  # fmt: skip
    """Load the inputs one, two and three tokens before token t."""
    x1 = earlier(x, stride, state, t, place, owner, channels, 1, D, W, HAS_STATE)
    x2 = earlier(x, stride, state, t, place, owner, channels, 2, D, W, HAS_STATE)
    x3 = earlier(x, stride, state, t, place, owner, channels, 3, D, W, HAS_STATE)
    return x1, x2, x3


@triton.jit
def forward_kernel(
    x, weight, state, places, owners, y, x_stride, tokens,
    D: tl.constexpr, W: tl.constexpr, HAS_STATE: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute the convolution and SiLU of BT tokens and BD channels."""
    first = tl.program_id(0) * BT
    last = tl.minimum(first + BT, tokens)
    channels = tl.program_id(1) * BD + tl.arange(0, BD)
    w0, w1, w2, w3 = tap_weights(weight, channels, D, W, W, 1)
    place, owner = tl.load(places + first), tl.load(owners + first)
    x1, x2, x3 = three_earlier(x, x_stride, state, first, place, owner, channels, D, W, HAS_STATE)
    next0 = row(x, first, x_stride, channels, first < last, D)
    next1 = row(x, first + 1, x_stride, channels, first + 1 < last, D)
    next2 = row(x, first + 2, x_stride, channels, first + 2 < last, D)
    next_place = place
    for i in range(last - first):
        t = first + i
        x0, next0, next1 = next0.to(tl.float32), next1, next2
        next2 = row(x, t + 3, x_stride, channels, t + 3 < last, D)  # is loaded while three tokens are computed
        place, next_place = next_place, tl.load(places + t + 1, mask=t + 1 < last, other=0)
        if place == 0:
            owner = tl.load(owners + t)
            x1, x2, x3 = three_earlier(x, x_stride, state, t, place, owner, channels, D, W, HAS_STATE)
        z = w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3
        tl.store(y + t.to(tl.int64) * D + channels, silu(z).to(y.dtype.element_ty), mask=channels < D)
        x3, x2, x1 = x2, x1, x0


@triton.jit
def backward_kernel(
    dy, x, weight, state, places, owners, dx, d_weight,  # d_weight [stretches of tokens, D, W]
    dy_stride, x_stride, tokens,
    D: tl.constexpr, W: tl.constexpr, HAS_STATE: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of inputs and taps. An input's gradient is complete three tokens later, so the pass goes
    that far into the next stretch."""
    first = tl.program_id(0) * BT
    last = tl.minimum(first + BT, tokens)
    channels = tl.program_id(1) * BD + tl.arange(0, BD)
    inside = channels < D
    w0, w1, w2, w3 = tap_weights(weight, channels, D, W, W, 1)
    place, owner = tl.load(places + first), tl.load(owners + first)
    x1, x2, x3 = three_earlier(x, x_stride, state, first, place, owner, channels, D, W, HAS_STATE)
    x_next0 = row(x, first, x_stride, channels, first < tokens, D)
    d_next0 = row(dy, first, dy_stride, channels, first < tokens, D)
    x_next1 = row(x, first + 1, x_stride, channels, first + 1 < tokens, D)
    d_next1 = row(dy, first + 1, dy_stride, channels, first + 1 < tokens, D)
    nothing = tl.zeros((BD,), tl.float32)
    d1, d2, d3 = nothing, nothing, nothing  # of the inputs one, two and three tokens ago, not yet complete
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
            x1, x2, x3 = three_earlier(x, x_stride, state, t, place, owner, channels, D, W, HAS_STATE)
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
    x_stride, dx_stride, tokens, stretches,
    D: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of inputs and taps from those of the window sums, where sequences start from zeros. Unlike
    `backward_kernel` it has no sums to recompute and no places to look up, so it can load three tokens ahead."""
    sequence, first = tl.program_id(0) // stretches, tl.program_id(0) % stretches * BT
    channels = tl.program_id(1) * BD + tl.arange(0, BD)
    start = sequence.to(tl.int64) * tokens
    dz += start * D
    dx += start * dx_stride
    x += start * x_stride
    last = tl.minimum(first + BT, tokens)
    w0, w1, w2, w3 = tap_weights(taps, channels, D, W, 1, D)
    x1 = row(x, first - 1, x_stride, channels, first - 1 >= 0, D).to(tl.float32)
    x2 = row(x, first - 2, x_stride, channels, first - 2 >= 0, D).to(tl.float32)
    x3 = row(x, first - 3, x_stride, channels, first - 3 >= 0, D).to(tl.float32)
    x_next0 = row(x, first, x_stride, channels, first < last, D)
    d_next0 = row(dz, first, D, channels, first < tokens, D)
    x_next1 = row(x, first + 1, x_stride, channels, first + 1 < last, D)
    d_next1 = row(dz, first + 1, D, channels, first + 1 < tokens, D)
    x_next2 = row(x, first + 2, x_stride, channels, first + 2 < last, D)
    d_next2 = row(dz, first + 2, D, channels, first + 2 < tokens, D)
    # Each gets its own zeros. If they were two names of one value, d3 = d2 would change nothing in the first pass of
    # the loop, and Triton takes what the first pass does not change for a constant.
    d1, d2, d3 = tl.zeros((BD,), tl.float32), tl.zeros((BD,), tl.float32), tl.zeros((BD,), tl.float32)
    dw0, dw1, dw2, dw3 = d1, d1, d1, d1
    for i in range(last - first + 3):
        t = first + i
        x0, x_next0, x_next1 = x_next0.to(tl.float32), x_next1, x_next2
        d0, d_next0, d_next1 = d_next0.to(tl.float32), d_next1, d_next2
        x_next2 = row(x, t + 3, x_stride, channels, t + 3 < last, D)
        d_next2 = row(dz, t + 3, D, channels, t + 3 < tokens, D)
        to = dx + (t - 3).to(tl.int64) * dx_stride + channels
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
