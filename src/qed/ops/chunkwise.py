"""The chunk form of the recurrence in torch, forward and backward. It is the fast path on CPUs, and says what each
stage of the kernels has to compute.

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
forward keeps R of every chunk, P and T, which share one square matrix, and S₀ of every few chunks. The rest is cheaper
to recompute than to keep.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .arguments import Arguments
from .decay import ChannelDecay, Decay, HeadDecay
from .packing import Schedule, Slab, chunk_bound, sequence_count
from .precision import compute_dtype
from .scratch import Scratch

KEEP = 4  # the start state of every so many chunks is kept, and those of the others are recomputed from it and R
CHUNK = 32  # longer chunks cost more arithmetic, shorter ones more states and steps: measured best on CPU
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
SLAB_ELEMENTS = 2**18  # tokens × heads × max(K, V) worked on at once: large enough for threads, small enough to cache


class Inputs(NamedTuple):
    """The inputs as slabs gather from them: q, k, a [B, T, H, K]; u [B, T, H, V]; g [B, T, H, K or 1]."""

    q: Tensor
    k: Tensor
    a: Tensor
    u: Tensor
    g: Tensor

    @staticmethod
    def of(q: Tensor, k: Tensor, a: Tensor, u: Tensor, g: Tensor | None) -> Inputs:
        """Return the inputs contiguous, since every slab gathers from them, with g = 0 per head where there is no
        decay.

        Args:
            q, k, a: [B, T, H, K].
            u: [B, T, H, V].
            g: [B, T, H, K], [B, T, H, 1] or None.
        """
        decay = q.new_zeros(*q.shape[:3], 1) if g is None else g
        return Inputs(*(x.contiguous() for x in (q, k, a, u, decay)))


class ChunkTerms:
    """A slab's tokens chunk by chunk, and the decays between them. b = chunks × heads.

    x stacks a and q, which meet the same keys and the same states.
    """

    def __init__(self, slab: Slab, inputs: Inputs, scale: float, scratch: Scratch):
        q, k, a, _, g = inputs
        heads, width = q.shape[2:]
        b = slab.chunks * heads
        self.here = slice(slab.first_chunk * heads, slab.first_chunk * heads + b)  # among all chunks
        self.x = scratch("x", 2, b, CHUNK, width)
        slab.gather(a, self.x[0])
        slab.gather(q, self.x[1])
        if scale != 1:
            self.x[1] *= scale
        self.k = slab.gather(k, scratch("k", b, CHUNK, width))
        each = slab.gather(g, scratch("g", b, CHUNK, g.shape[-1]))
        self.decay: Decay = (HeadDecay if g.shape[-1] == 1 else ChannelDecay)(each, self.x, self.k, scratch)


def forward(x: Arguments, save: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return outputs [B, T, H, V], the final state [N, H, K, V], and, if `save`, what the backward starts from."""
    q, k, a, u, g, initial_state, cu_seqlens, scale = x
    schedule = Schedule.of(q, cu_seqlens, CHUNK)
    inputs = Inputs.of(q, k, a, u, g)
    scratch = Scratch.lent(q.device, compute_dtype(q.dtype))
    state = _lanes_of(initial_state, schedule, q, u)
    o = q.new_empty(u.shape)
    saved = saved_like(q, u, cu_seqlens) if save else []

    for slab in schedule.slabs(_slab_tokens(q, u), KEEP):
        c = ChunkTerms(slab, inputs, scale, scratch)
        shape = b, chunk, _width = (c.k.shape[0], CHUNK, u.shape[-1])
        U = slab.gather(inputs.u, scratch("u", *shape))
        A, P = pairs = scratch("pairs", 2, b, chunk, chunk)
        (a_tilde, q_tilde), k_bar, gamma = c.decay.pairs(pairs)
        torch.sum(torch.mul(c.x[1], c.k, out=scratch("qk", *c.k.shape)), -1, out=P.diagonal(dim1=-2, dim2=-1))
        identity = torch.eye(chunk, dtype=P.dtype, device=P.device)
        T = torch.linalg.solve_triangular(A, identity, upper=False, unitriangular=True)

        s0, erased = scratch("s0", b, *state.shape[1:]), scratch("erased", *shape)
        R = saved[2][c.here] if save else scratch("R", *shape)
        broken = _without_broken(U)
        for here, lanes, kept in slab.steps:
            s = state[lanes]
            s0[here] = s
            if save and kept is not None:
                saved[0][kept] = s
            torch.bmm(a_tilde[here], s, out=erased[here])
            torch.bmm(T[here], U[here].sub_(erased[here]), out=R[here])
            added = R[here] if broken is None else R[here].masked_fill(broken[here], torch.nan)
            s.mul_(gamma[here]).baddbmm_(k_bar[here].mT, added)
        outputs = torch.bmm(q_tilde, s0, out=erased).baddbmm_(P, R)
        slab.scatter(outputs if broken is None else outputs.masked_fill_(broken, torch.nan), o)
        if save:
            torch.add(P, T.mT.triu_(1), out=saved[1][c.here])
    _clear_beyond(saved, schedule, q.shape[2])
    return o, _sequences_of(state, schedule, u.shape[2]), saved


def backward(do: Tensor, dstate: Tensor | None, x: Arguments, saved: list[Tensor]) -> Gradients:
    """Return the gradients of q, k, a, u, g (empty without one) and of the initial state.

    Args:
        do: gradient of the outputs, [B, T, H, V].
        dstate: gradient of the final state, [N, H, K, V]; None for zeros.
        x: the forward's arguments; the initial state is not looked at.
        saved: what the forward saved.
    """
    q, k, a, u, g, _, cu_seqlens, scale = x
    schedule = Schedule.of(q, cu_seqlens, CHUNK)
    inputs = Inputs.of(q, k, a, u, g)
    scratch = Scratch.lent(q.device, compute_dtype(q.dtype))
    ds, do = _lanes_of(dstate, schedule, q, u), do.contiguous()
    dq, dk, da, du = (x.new_empty(x.shape) for x in (q, k, a, u))
    dg = q.new_empty(0) if g is None else g.new_empty(g.shape)

    for slab in reversed(list(schedule.slabs(_slab_tokens(q, u), KEEP))):
        c = ChunkTerms(slab, inputs, scale, scratch)
        P_and_T, R = saved[1][c.here], saved[2][c.here]
        b, chunk, _ = R.shape
        P = torch.tril(P_and_T, out=scratch("P", b, chunk, chunk))
        T_mT = torch.triu(P_and_T, 1, out=scratch("T_mT", b, chunk, chunk))
        T_mT.diagonal(dim1=-2, dim2=-1).fill_(1)
        (a_tilde, q_tilde), k_bar, gamma = c.decay.keep_pairs()
        s0 = _start_states(slab, saved[0], gamma, k_bar, R, scratch)

        dO = slab.gather(do, scratch("dO", *R.shape))
        dR = torch.bmm(P.mT, dO, out=scratch("dR", *R.shape))
        ds_read = torch.bmm(q_tilde.mT, dO, out=scratch("ds_read", *s0.shape))
        ds_end, E = scratch("ds_end", *s0.shape), scratch("E", *R.shape)
        for here, lanes, _ in reversed(slab.steps):
            s = ds[lanes]
            ds_end[here] = s
            torch.bmm(T_mT[here], dR[here].baddbmm_(k_bar[here], s), out=E[here])
            torch.addcmul(ds_read[here], s, gamma[here], out=s).baddbmm_(a_tilde[here].mT, E[here], alpha=-1)

        # The working set is what limits the speed: dx and dk take the memory of ds_read and dR, which have been used.
        dx, dm = scratch("ds_read", *c.x.shape), scratch("dm", 2, b, chunk, chunk)
        for i, y, sign in ((0, E, -1), (1, dO, 1)):
            torch.baddbmm(dx[i], y, s0.mT, beta=0, alpha=sign, out=dx[i])
            torch.baddbmm(dm[i], y, R.mT, beta=0, alpha=sign, out=dm[i])
        d_k = torch.bmm(R, ds_end.mT, out=scratch("dR", *c.k.shape))
        d_g = c.decay.backward(dm, dx, d_k, ds_end.mul_(s0).sum(-1) * gamma.squeeze(-1))
        d_diagonal = dm[1].diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        dx[1].addcmul_(d_diagonal, c.k)
        d_k.addcmul_(d_diagonal, c.x[1])

        slab.scatter(dx[0], da)
        slab.scatter(dx[1] if scale == 1 else dx[1].mul_(scale), dq)
        slab.scatter(d_k, dk)
        slab.scatter(E, du)
        if g is not None:
            slab.scatter(d_g, dg)
    return dq, dk, da, du, dg, _sequences_of(ds, schedule, u.shape[2])


def _without_broken(U: Tensor) -> Tensor | None:
    """Set what is not finite in U to 0, in place, and return the tokens and columns [b, C, V] from the first such write
    of their chunk on; None if every write is finite.

    A product with T or P would carry a value that is not finite to tokens before its own, as 0 · ∞. Whether
    there are any is checked on a CPU alone: elsewhere the check would wait for the device, so some are assumed."""
    if U.device.type == "cpu" and bool(U.sum().isfinite()):
        return None
    broken = ~U.isfinite()
    U.masked_fill_(broken, 0)
    return broken.cumsum(1) > 0


def step(
    q: Tensor, k: Tensor, a: Tensor, u: Tensor, g: Tensor | None, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return o and the new state after a chunk of one token: A is empty, P = q·k, and one product reads the old state
    for both a and q.

    Args:
        q, k, a, u, g, state, scale: as in `reference.step`.
    """
    q = q * scale
    if g is not None:
        state = g.exp().unsqueeze(-1) * state
    erased, read = (torch.stack([a, q], -2) @ state).unbind(-2)
    residual = u - erased
    o = read + (q * k).sum(-1, keepdim=True) * residual
    return o, torch.addcmul(state, k.unsqueeze(-1), residual.unsqueeze(-2))


def saved_like(q: Tensor, u: Tensor, cu_seqlens: Tensor | None) -> list[Tensor]:
    """Return uninitialised memory for what the backward starts from, sized from shapes alone: some start states, every
    chunk's P with Tᵀ above its diagonal, and every chunk's R.

    Args:
        q: queries [B, T, H, K].
        u: write vectors [B, T, H, V].
        cu_seqlens: offsets of packed sequences, or None.
    """
    batch, tokens, heads, width = q.shape
    sequences, packed = sequence_count(q, cu_seqlens), cu_seqlens is not None
    states, b = (heads * chunk_bound(batch, tokens, sequences, n, packed) for n in (KEEP * CHUNK, CHUNK))
    shapes = [(states, width, u.shape[-1]), (b, CHUNK, CHUNK), (b, CHUNK, u.shape[-1])]
    return [q.new_empty(shape, dtype=compute_dtype(q.dtype)) for shape in shapes]


def _clear_beyond(saved: list[Tensor], schedule: Schedule, heads: int) -> None:
    """Set to 0 what is saved for chunks beyond the last: packed sequences may have fewer chunks than the bound, and
    nothing uninitialised may leave the op."""
    for kept, chunks_each in zip(saved, (KEEP, 1, 1), strict=False):
        kept[schedule.chunks(chunks_each) * heads :] = 0


def _start_states(slab: Slab, kept_states: Tensor, gamma: Tensor, k_bar: Tensor, R: Tensor, scratch: Scratch) -> Tensor:
    """Return S₀ [b, K, V] of every chunk: the one that was kept, or S_C of the chunk before."""
    s0 = scratch("s0", R.shape[0], *kept_states.shape[1:])
    before = slice(0)
    for here, _, kept in slab.steps:
        s = s0[here]
        if kept is not None:
            s.copy_(kept_states[kept])
        else:  # fewer lanes may be alive than in the step before
            last = slice(before.start, before.start + s.shape[0])
            torch.mul(s0[last], gamma[last], out=s).baddbmm_(k_bar[last].mT, R[last])
        before = here
    return s0


def _slab_tokens(q: Tensor, u: Tensor) -> int:
    return SLAB_ELEMENTS // max(q.shape[-1], u.shape[-1])


def _lanes_of(state: Tensor | None, schedule: Schedule, q: Tensor, u: Tensor) -> Tensor:
    """Return a new state buffer [N × H, K, V] in lane order."""
    shape = (len(schedule.order) * q.shape[2], q.shape[3], u.shape[3])
    if state is None:
        return q.new_zeros(shape, dtype=compute_dtype(q.dtype))
    return state.index_select(0, torch.tensor(schedule.order, device=state.device)).view(shape)


def _sequences_of(lanes: Tensor, schedule: Schedule, heads: int) -> Tensor:
    """Return the states [N, H, K, V] in the caller's order, from those in lane order."""
    back = torch.tensor(schedule.order, device=lanes.device).argsort()
    return lanes.unflatten(0, (-1, heads)).index_select(0, back)
