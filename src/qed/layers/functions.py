"""What the layers compute besides products with their matrices, in plain torch: the definitions that every faster route
is held to (`routes.py`)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .sequences import Sequences

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": nn.functional.silu, "sigmoid": torch.sigmoid}


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, gate: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """x / √(mean x² + eps) · weight over the last dimension, statistics in float32; times activation(gate) if given.

    Args:
        x: [..., width].
        weight: [width].
        eps: what is added to the mean square.
        gate: like x, or None.
        activation: a name of `ACTIVATIONS`, with a gate.
    """
    # Autocast would return float32 from here on.
    y = nn.functional.rms_norm(x, weight.shape, weight.to(x.dtype), eps).to(x.dtype)
    return _gated(y, gate, activation)


def rms_norm_written_out(
    x: Tensor, weight: Tensor, eps: float, gate: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """`rms_norm` in parts that torch.compile can see: then a backward can keep the scales, one number a row, instead of
    reading every row once more.

    Args:
        x, weight, eps, gate, activation: as in `rms_norm`.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    x_ = x.to(wide)
    scales = torch.rsqrt(x_.square().mean(-1, keepdim=True) + eps)
    return _gated((x_ * scales * weight.to(wide)).to(x.dtype), gate, activation)


def _gated(y: Tensor, gate: Tensor | None, activation: str | None) -> Tensor:
    return y if gate is None or activation is None else y * ACTIVATIONS[activation](gate)


def silu_product(both: Tensor) -> Tensor:
    """silu(gate) ⊙ up of [..., gate and up side by side]."""
    gate, up = both.chunk(2, -1)
    return nn.functional.silu(gate) * up


def short_convolution(x: Tensor, weight: Tensor, state: Tensor | None, sequences: Sequences) -> Tensor:
    """y_t = silu(Σ_s weight[W − 1 − s] · x_{t−s}) for s = 0 … W − 1, every channel by itself.

    Args:
        x: [B, T, D].
        weight: [D, W].
        state: [N, W − 1, D] the inputs before each sequence's first token; None for zeros.
        sequences: where sequences begin and end.
    """
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


def last_inputs(x: Tensor, before: int, state: Tensor | None, sequences: Sequences) -> Tensor:
    """The convolution's state after the last token of each sequence, [N, W − 1, D].

    Args:
        x: the convolution's inputs [B, T, D].
        before: W − 1, how many inputs a token's window reaches back.
        state: the state it started from, or None for zeros.
        sequences: where sequences begin and end.
    """
    N = x.shape[0] if sequences.cu_seqlens is None else sequences.cu_seqlens.shape[0] - 1
    state = x.new_zeros(N, before, x.shape[-1]) if state is None else state.to(x.dtype)
    if sequences.cu_seqlens is not None:
        starts, lengths = sequences.cu_seqlens[:-1, None], sequences.cu_seqlens.diff()[:, None]
        index = lengths + torch.arange(before, device=x.device)  # in state and tokens together
        rows = (starts + index - before).clamp(0, max(x.shape[1] - 1, 0))
        tokens = x[0, rows] if x.shape[1] else state
        return torch.where((index >= before)[..., None], tokens, _gathered(state, index.clamp(max=before - 1)))
    if sequences.lengths is not None:
        index = sequences.lengths[:, None] + torch.arange(before, device=x.device)
        return _gathered(torch.cat([state, x], 1), index)
    if x.shape[1] >= before:
        return x[:, x.shape[1] - before :].clone()  # a view would keep all of x
    return torch.cat([state, x], 1)[:, x.shape[1] :]


def _gathered(x: Tensor, index: Tensor) -> Tensor:
    """x [N, L, D], index [N, M] → [N, M, D]"""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))


def projection(linear: nn.Module, x: Tensor, residual: Tensor | None) -> Tensor:
    """W x, or residual + W x.

    Args:
        linear: an `nn.Linear`, or what has taken its place in a quantised or adapted model.
        x: [..., in].
        residual: [..., out], or None.
    """
    y: Tensor = linear(x)
    return y if residual is None else residual + y


def projection_of_a_vector(linear: nn.Linear, x: Tensor, residual: Tensor | None) -> Tensor:
    """`projection` of one row as a sum over the matrix's rows, in at least float32. Its time is that of reading the
    matrix: compiled, this reads it faster than kernels for matrix products do, and fuses with what comes before and
    after.

    Args:
        linear, x, residual: as in `projection`; x has one row.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    y = (linear.weight.to(wide) * x.reshape(1, -1).to(wide)).sum(-1)
    y = y if linear.bias is None else y + linear.bias.to(wide)
    y = y.to(x.dtype).view(*x.shape[:-1], -1)
    return y if residual is None else residual + y


def projection_in_place(linear: nn.Linear, x: Tensor, residual: Tensor | None) -> Tensor:
    """`projection` written over the residual stream, if there is one, by the matrix product itself.

    Args:
        linear, x, residual: as in `projection`.
    """
    if residual is None:
        return linear(x)
    return residual.flatten(0, -2).addmm_(x.flatten(0, -2), linear.weight.t()).view_as(residual)
