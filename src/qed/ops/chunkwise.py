"""The chunk form of the recurrence in torch, forward and backward: the fast CPU path and the specification of
every kernel stage.

A chunk of C tokens with start state S₀ maps to outputs O and end state S_C. With γ_i the decay from the chunk's
start through token i and rows ã = a∘γ, q̃ = q∘γ, k̄_j = k_j ∘ (decay after token j to the chunk's end):

    A_ij = Σ_c a_ic k_jc (decay between j and i)_c   i > j        T = (I + A)⁻¹
    P_ij = the same with q                           i ≥ j
    R    = T (U − ã S₀)                   what each token adds at its key: its write minus what it erases
    O    = q̃ S₀ + P R                     S_C = Diag(γ_C) S₀ + k̄ᵀ R

and, given dO and dS = dS_C,

    E  = Tᵀ (Pᵀ dO + k̄ dS) = dU           dA = −E Rᵀ (i > j)       dP = dO Rᵀ (i ≥ j)
    dS₀ = Diag(γ_C) dS + q̃ᵀ dO − ãᵀ E
    dã = −E S₀ᵀ      dq̃ = dO S₀ᵀ      dk̄ = R dSᵀ      dγ_C = rowsum(S₀ ∘ dS)

with `decay.py` carrying dA, dP and the three decayed rows back to a, q, k and g. (`scale` multiplies q once.)

Chunks are worked on in *slabs* of a few steps: everything inside a chunk is one batched product over the slab,
and only R, q̃ S₀ and S run from chunk to chunk. Temporary memory is therefore constant in T. For the backward, the
forward keeps S₀, P, T and R of every chunk; the decayed rows are cheaper to make again than to keep.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .decay import ChannelDecay, Decay, HeadDecay
from .packing import Schedule, Slab, chunk_bound, sequence_count
from .precision import compute_dtype
from .scratch import Scratch

CHUNK = 32  # longer chunks cost more arithmetic, shorter ones more states and steps: measured best on CPU
SLAB_ELEMENTS = 2**18  # tokens × heads × max(K, V) worked on at once: large enough for threads, small enough to cache


class Inputs(NamedTuple):
    """q, k, a [B, T, H, K]; u [B, T, H, V]; g [B, T, H, K or 1]."""

    q: Tensor
    k: Tensor
    a: Tensor
    u: Tensor
    g: Tensor

    @staticmethod
    def of(q: Tensor, k: Tensor, a: Tensor, u: Tensor, g: Tensor | None) -> Inputs:
        """Contiguous, since every slab gathers from them; no decay is a decay of log 0 per head."""
        decay = q.new_zeros(*q.shape[:3], 1) if g is None else g
        return Inputs(*(x.contiguous() for x in (q, k, a, u, decay)))


class ChunkTerms:
    """Everything about a slab's chunks that depends on no state, but for the pair products. b = chunks × heads.

    x stacks a and q, which meet the same keys and the same states.
    """

    def __init__(self, slab: Slab, inputs: Inputs, scale: float, scratch: Scratch):
        q, k, a, _, g = inputs
        chunk, width = slab.chunk, q.shape[-1]
        b = slab.rows.shape[0] // chunk
        first = slab.first_chunk * q.shape[2]
        self.here = slice(first, first + b)  # this slab in the tensors kept for the backward
        self.x = scratch("x", 2, b, chunk, width)
        slab.gather(a, self.x[0])
        slab.gather(q, self.x[1])
        if scale != 1:
            self.x[1] *= scale
        self.k = slab.gather(k, scratch("k", b, chunk, width))
        decay = slab.gather(g, scratch("g", b, chunk, g.shape[-1]))
        self.decay: Decay = (HeadDecay if g.shape[-1] == 1 else ChannelDecay)(decay, scratch)
        self.scratch = scratch

    def decayed(self) -> tuple[Tensor, Tensor, Tensor]:
        """x̃ [b, 2C, K], k̄ [b, C, K] and γ_C [b, K or 1, 1], once the decay's tree has grown to the whole chunk."""
        b, chunk, width = self.k.shape
        x_tilde = self.scratch("x_tilde", b, 2, chunk, width)
        torch.mul(self.x, self.decay.after_start, out=x_tilde.transpose(0, 1))
        k_bar = torch.mul(self.k, self.decay.until_end, out=self.scratch("k_bar", b, chunk, width))
        return x_tilde.view(b, 2 * chunk, width), k_bar, self.decay.after_start[:, -1].unsqueeze(-1)


def forward(
    q: Tensor,
    k: Tensor,
    a: Tensor,
    u: Tensor,
    g: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    save: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Outputs [B, T, H, V], final state [N, H, K, V], and (if `save`) what the backward starts from: every chunk's
    start state, P, T and R."""
    schedule = Schedule.of(q, cu_seqlens, CHUNK)
    inputs = Inputs.of(q, k, a, u, g)
    scratch = Scratch.lent(q.device, compute_dtype(q.dtype))
    state = _lanes_of(initial_state, schedule, q, u)
    o = q.new_empty(u.shape)
    saved = [state.new_empty(shape) for shape in saved_shapes(q, u, cu_seqlens)] if save else []
    for kept in saved:  # packed sequences may have fewer chunks than the bound: nothing uninitialised leaves the op
        kept[schedule.chunks * q.shape[2] :] = 0

    for slab in schedule.slabs(_slab_tokens(q, u)):
        c = ChunkTerms(slab, inputs, scale, scratch)
        shape = b, chunk, width = (c.k.shape[0], slab.chunk, u.shape[-1])
        U = slab.gather(u, scratch("u", *shape))
        pairs = scratch("pairs", 2, b, chunk, chunk)
        c.decay.pairs(c.x, c.k, pairs)
        P = pairs[1]
        torch.sum(torch.mul(c.x[1], c.k, out=scratch("qk", *c.k.shape)), -1, out=P.diagonal(dim1=-2, dim2=-1))
        identity = torch.eye(chunk, dtype=P.dtype, device=P.device)
        T = torch.linalg.solve_triangular(pairs[0], identity, upper=False, unitriangular=True)
        x_tilde, k_bar, gamma = c.decayed()

        states = saved[0][c.here] if save else None
        R = saved[3][c.here] if save else scratch("R", *shape)
        read = scratch("read", b, 2 * chunk, width)  # what ã, then q̃, read from the start state
        for here, lanes in slab.steps:
            s = state[lanes]
            if states is not None:
                states[here] = s
            torch.bmm(x_tilde[here], s, out=read[here])
            torch.bmm(T[here], U[here].sub_(read[here, :chunk]), out=R[here])
            s.mul_(gamma[here]).baddbmm_(k_bar[here].mT, R[here])
        out = torch.baddbmm(read[:, chunk:], P, R, out=scratch("out", *shape))
        slab.scatter(out, o)
        if save:
            saved[1][c.here], saved[2][c.here] = P, T
    return o, _sequences_of(state, schedule, u.shape[2]), saved


def backward(
    do: Tensor,
    dstate: Tensor,
    q: Tensor,
    k: Tensor,
    a: Tensor,
    u: Tensor,
    g: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    saved: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, a, u, g (empty without one) and of the initial state."""
    schedule = Schedule.of(q, cu_seqlens, CHUNK)
    inputs = Inputs.of(q, k, a, u, g)
    scratch = Scratch.lent(q.device, compute_dtype(q.dtype))
    ds, do = _lanes_of(dstate, schedule, q, u), do.contiguous()
    dq, dk, da, du = (x.new_empty(x.shape) for x in (q, k, a, u))
    dg = q.new_empty(0) if g is None else g.new_empty(g.shape)

    for slab in reversed(list(schedule.slabs(_slab_tokens(q, u)))):
        c = ChunkTerms(slab, inputs, scale, scratch)
        s0, P, T, R = (kept[c.here] for kept in saved)
        b, chunk, _ = R.shape
        c.decay.keep_pairs(c.x, c.k)
        x_tilde, k_bar, gamma = c.decayed()

        dO = slab.gather(do, scratch("dO", *R.shape))
        dR = torch.bmm(P.mT, dO, out=scratch("dR", *R.shape))
        ds_read = torch.bmm(x_tilde[:, chunk:].mT, dO, out=scratch("ds_read", *s0.shape))
        ds_end, E = scratch("ds_end", *s0.shape), scratch("E", *R.shape)
        for here, lanes in reversed(slab.steps):
            s = ds[lanes]
            ds_end[here] = s
            torch.bmm(T[here].mT, dR[here].baddbmm_(k_bar[here], s), out=E[here])
            torch.addcmul(ds_read[here], s, gamma[here], out=s).baddbmm_(x_tilde[here, :chunk].mT, E[here], alpha=-1)

        dx, dm = scratch("dx", *c.x.shape), scratch("dm", 2, b, chunk, chunk)
        for i, y, sign in ((0, E, -1), (1, dO, 1)):
            torch.baddbmm(dx[i], y, s0.mT, beta=0, alpha=sign, out=dx[i])
            torch.baddbmm(dm[i], y, R.mT, beta=0, alpha=sign, out=dm[i])
        dx *= c.decay.after_start
        d_k = torch.bmm(R, ds_end.mT, out=scratch("dk", *c.k.shape)).mul_(c.decay.until_end)
        d_after_start = torch.mul(c.x[0], dx[0], out=scratch("d_after_start", *c.k.shape)).addcmul_(c.x[1], dx[1])
        d_after_start[:, -1] += gamma.squeeze(-1) * ds_end.mul_(s0).sum(-1)
        d_until_end = torch.mul(c.k, d_k, out=scratch("d_until_end", *c.k.shape))
        if inputs.g.shape[-1] == 1:
            d_after_start, d_until_end = (d.sum(-1, keepdim=True) for d in (d_after_start, d_until_end))
        c.decay.begin_gradient(d_after_start, d_until_end)
        c.decay.pairs_backward(dm, c.x, c.k, dx, d_k)
        d_diagonal = dm[1].diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        dx[1].addcmul_(d_diagonal, c.k)
        d_k.addcmul_(d_diagonal, c.x[1])

        slab.scatter(dx[0], da)
        slab.scatter(dx[1] if scale == 1 else dx[1].mul_(scale), dq)
        slab.scatter(d_k, dk)
        slab.scatter(E, du)
        if g is not None:
            slab.scatter(c.decay.dg, dg)
    return dq, dk, da, du, dg, _sequences_of(ds, schedule, u.shape[2])


def step(
    q: Tensor, k: Tensor, a: Tensor, u: Tensor, g: Tensor | None, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """The chunk of one token: A is empty, P = q·k, and one product reads the old state for both a and q."""
    q = q * scale
    if g is not None:
        state = g.exp().unsqueeze(-1) * state
    erased, read = (torch.stack([a, q], -2) @ state).unbind(-2)
    residual = u - erased
    o = read + (q * k).sum(-1, keepdim=True) * residual
    return o, torch.addcmul(state, k.unsqueeze(-1), residual.unsqueeze(-2))


def saved_shapes(q: Tensor, u: Tensor, cu_seqlens: Tensor | None) -> list[tuple[int, int, int]]:
    """Shapes of the tensors kept for the backward (start states, P, T, R), from shapes alone."""
    batch, tokens, heads, width = q.shape
    b = heads * chunk_bound(batch, tokens, sequence_count(q, cu_seqlens), CHUNK, cu_seqlens is not None)
    return [(b, width, u.shape[-1]), (b, CHUNK, CHUNK), (b, CHUNK, CHUNK), (b, CHUNK, u.shape[-1])]


def _slab_tokens(q: Tensor, u: Tensor) -> int:
    return SLAB_ELEMENTS // max(q.shape[-1], u.shape[-1])


def _lanes_of(state: Tensor | None, schedule: Schedule, q: Tensor, u: Tensor) -> Tensor:
    """A fresh state buffer [N × H, K, V] in lane order."""
    shape = (len(schedule.order) * q.shape[2], q.shape[3], u.shape[3])
    if state is None:
        return q.new_zeros(shape, dtype=compute_dtype(q.dtype))
    return state.index_select(0, torch.tensor(schedule.order, device=state.device)).view(shape)


def _sequences_of(lanes: Tensor, schedule: Schedule, heads: int) -> Tensor:
    """Back from lane order to [N, H, K, V] in the caller's order."""
    back = torch.tensor(schedule.order, device=lanes.device).argsort()
    return lanes.unflatten(0, (-1, heads)).index_select(0, back)
