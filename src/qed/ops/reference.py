"""The definition: one token at a time.

    S_t = (I − k_t a_tᵀ) Diag(exp g_t) S_{t−1} + k_t u_tᵀ          o_t = scale · S_tᵀ q_t

Everything else in this package is tested against these lines. They are plain torch, so autograd, double backward and
any float dtype work; a sequence of T tokens takes T small steps, one after the other.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from .arguments import Arguments
from .precision import compute_dtype
from .validation import offsets_of


def step(
    q: Tensor, k: Tensor, a: Tensor, u: Tensor, g: Tensor | None, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return o [B, H, V] and the new state after one token.

    Args:
        q, k, a: [B, H, K].
        u: [B, H, V].
        g: [B, H, K], [B, H, 1] or None.
        state: [B, H, K, V].
        scale: factor on the read.
    """
    if g is not None:
        state = g.exp().unsqueeze(-1) * state
    residual = u - _read(state, a)
    state = state + k.unsqueeze(-1) * residual.unsqueeze(-2)
    return scale * _read(state, q), state


def erase_write(x: Arguments) -> tuple[Tensor, Tensor]:
    """Return o [B, T, H, V] and the final state [N, H, K, V]."""
    if x.cu_seqlens is not None:
        return _each_sequence(x, offsets_of(x.cu_seqlens, x.q.shape[1]))
    q, k, a, u, g, initial_state, _, scale = x
    dtype = compute_dtype(q.dtype)
    state = q.new_zeros(q.shape[0], *q.shape[2:], u.shape[-1], dtype=dtype) if initial_state is None else initial_state
    out_dtype, g = q.dtype, None if g is None else g.to(dtype)
    q, k, a, u = (y.to(dtype) for y in (q, k, a, u))
    outputs = [u.new_empty(0, *u.shape[:1], *u.shape[2:])]
    for t in range(q.shape[1]):
        o, state = step(q[:, t], k[:, t], a[:, t], u[:, t], None if g is None else g[:, t], state, scale)
        outputs.append(o.unsqueeze(0))
    return torch.cat(outputs).transpose(0, 1).to(out_dtype), state


def _read(state: Tensor, x: Tensor) -> Tensor:
    """Sᵀ x, as a sum of products: torch.autocast would run a matrix product, and its gradient, in 16 bits."""
    return (x.unsqueeze(-1) * state).sum(-2)


def _each_sequence(x: Arguments, offsets: list[int]) -> tuple[Tensor, Tensor]:
    """Packed sequences are, by definition, separate ones."""
    outputs, states = [], []
    for n, (start, end) in enumerate(pairwise(offsets)):
        q, k, a, u = (y[:, start:end] for y in x[:4])
        g = None if x.g is None else x.g[:, start:end]
        first = None if x.initial_state is None else x.initial_state[n : n + 1]
        o, state = erase_write(x._replace(q=q, k=k, a=a, u=u, g=g, initial_state=first, cu_seqlens=None))
        outputs.append(o)
        states.append(state)
    return torch.cat(outputs, 1), torch.cat(states)
