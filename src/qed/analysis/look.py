"""What every token reads from every earlier one: the attention that a recurrence computes without writing it down.

The outputs of the recurrence are linear in the write vectors u, so there is a matrix A for each head with

    o_t = Σ_s A[t, s] u_s          A[t, s] = scale · q_tᵀ (∏_{j=s+1..t} (I − k_j a_jᵀ) Diag(exp g_j)) k_s   for s ≤ t

where later factors stand to the left. The op itself computes it: with the columns of the identity matrix as write
vectors, its outputs are the columns of A.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import erase_write

COLUMNS = 256  # sources that one call of the op computes, which bounds its memory; the kernels take no wider u


def implicit_attention(q: Tensor, k: Tensor, a: Tensor, g: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
    """Return A [B, H, T, T] in q's dtype, with o_t = Σ_s A[t, s] u_s for the outputs o of `erase_write` from an empty
    state. It is 0 where s > t.

    For a rule with several sub-steps per token these are sub-steps, [B, H, n·T, n·T], and the outputs of token t are
    Σ_s Σ_i A[n·t + n − 1, n·s + i] u_{n·s + i}, because a token is read after its last sub-step.

    Args:
        q, k, a: queries, keys and erase vectors [B, T, H, K].
        g: log-decay [B, T, H, 1 or K]; None for no decay.
        scale: factor on the read.
    """
    return _attention(q, k, a, g, scale, substeps=1)


def _attention(q: Tensor, k: Tensor, a: Tensor, g: Tensor | None, scale: float, substeps: int) -> Tensor:
    """Return A over tokens, each of which writes and is read in the last of its sub-steps: [B, H, T, T]."""
    if q.dim() != 4:
        raise ValueError(f"q: expected shape [B, T, H, K], got {list(q.shape)}")
    batch, tokens, heads = q.shape[0], q.shape[1] // substeps, q.shape[2]
    attention = q.new_zeros(batch, heads, tokens, tokens)
    for start in range(0, tokens, COLUMNS):
        width = min(COLUMNS, tokens - start)
        columns = q.new_zeros(tokens - start, substeps, width)
        columns[:, -1] = torch.eye(tokens - start, width, dtype=q.dtype, device=q.device)
        u = columns.flatten(0, 1)[None, :, None].expand(batch, -1, heads, -1)
        # The state is empty until the first of these sources is written, so that the op can begin there.
        q_, k_, a_ = (x[:, start * substeps :] for x in (q, k, a))
        o, _ = erase_write(q_, k_, a_, u, None if g is None else g[:, start * substeps :], scale=scale)
        attention[:, :, start:, start : start + width] = o[:, substeps - 1 :: substeps].permute(0, 2, 1, 3)
    return attention
