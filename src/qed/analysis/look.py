"""What every token reads from every earlier one: the attention that a recurrence computes without writing it down.

The outputs of the recurrence are linear in the write vectors u, so there is a matrix A for each head with

    o_t = Σ_s A[t, s] u_s          A[t, s] = scale · q_tᵀ (∏_{j=s+1..t} (I − k_j a_jᵀ) Diag(exp g_j)) k_s   for s ≤ t

where later factors stand to the left. The op itself computes it: with the columns of the identity matrix as write
vectors, its outputs are the columns of A.

Where a layer's erase vector has a correction, the same matrix with λ = 0, on the same activations, is what the tokens
would read without it, and the difference is what the correction, made of the query, made the layer forget.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..layers import Mixer
from ..model.causal_lm import QEDForCausalLM
from ..model.inspection import mixer_inputs
from ..ops import erase_write
from ..ops.affine import Affine, segment
from ..rules import Operands

STATES = 256  # states over time whose norms are kept; of a longer text, those after every second token, or third, …
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


@dataclass(frozen=True)
class Look:
    """What the tokens of a text read from one another in a recurrent layer, and what moves its state, in float32 or
    float64."""

    attention: Tensor  # A [B, H, T, T]
    without_correction: Tensor | None  # the same with λ = 0 in this layer; None if its rule has no λ
    writes: Tensor  # u [B, T, H, V]: the layer reads o_t = Σ_s A[t, s] u_s
    gates: dict[str, Tensor]  # [B, T, H, 1 or channels]: of "b", "w" and "decay", which is exp g, those the rule has
    strength: Tensor | None  # λ [H]; None if the rule has none
    correction: Tensor | None  # ‖a − a with λ = 0‖ / ‖a‖ [B, T, H]; None if the rule has no λ
    state: Tensor  # ‖S[i, :]‖ for every key channel i, [B, N, H, K], after `stride` tokens each
    stride: int  # the tokens between two of those states; the last of them is after the last token

    @cached_property
    def forgotten(self) -> Tensor | None:
        """What the correction took out of A: A with λ = 0 less A itself, [B, H, T, T]. None if the rule has no λ."""
        return None if self.without_correction is None else self.without_correction - self.attention

    @property
    def change(self) -> Tensor | None:
        """How much the correction changes a head's reading: Σ |A with λ = 0, less A| / Σ |A with λ = 0|, [B, H]."""
        if self.without_correction is None or self.forgotten is None:
            return None
        sizes = (x.abs().sum((-2, -1)) for x in (self.forgotten, self.without_correction))
        return torch.div(*sizes).nan_to_num(0.0)  # a head that reads nothing has nothing to forget


@torch.no_grad()
def look_at(mixer: Mixer, x: Tensor) -> Look:
    """Return what tokens read from one another in a layer with inputs x [B, T, hidden].

    A rule with several sub-steps per token must write in the last of them alone, as EDA does, whose first sub-step
    only erases. Then the sum over the sub-steps of a source is A between the last sub-steps, and still exact.
    """
    projections = mixer.projections(x)
    operands, substeps = _wide_operands(mixer.row.operands(projections)), mixer.row.substeps
    by_substep = operands.u.unflatten(1, (-1, substeps))
    if by_substep[:, :, :-1].any():
        raise ValueError(f"rule: expected one that writes in a token's last sub-step alone, got {mixer.rule!r}")
    without, correction = None, None
    if mixer.row.strength:
        plain = _wide_operands(mixer.row.operands(projections._replace(strength=0.0)))
        without = _read_by(mixer, plain)
        sizes = ((operands.a - plain.a).norm(dim=-1), operands.a.norm(dim=-1))
        correction = (sizes[0] / sizes[1].clamp(min=1e-30))[:, substeps - 1 :: substeps]
    decay = None if projections.g is None else projections.g.exp()
    gates = {"b": projections.b, "w": projections.w, "decay": decay}
    stride = max(1, -(-x.shape[1] // STATES))
    return Look(
        attention=_read_by(mixer, operands),
        without_correction=without,
        writes=by_substep[:, :, -1],
        gates={name: _wide(gate) for name, gate in gates.items() if gate is not None},
        strength=mixer.strength() if mixer.row.strength else None,
        correction=correction,
        state=_row_norms(operands, stride * substeps),
        stride=stride,
    )


def look_inside(model: QEDForCausalLM, ids: Tensor) -> Iterator[tuple[int, Look]]:
    """Return an iterator over the recurrent layers, by number, with what tokens `ids` [B, T] read in each. A layer's
    maps are computed when it comes, so that those of one layer are in memory at a time."""
    inputs = mixer_inputs(model, ids)
    if not inputs:
        raise ValueError("model: expected one with recurrent layers, got none")
    return ((i, look_at(mixer, x)) for i, (mixer, x) in inputs.items())


def _read_by(mixer: Mixer, operands: Operands) -> Tensor:
    """Return A between tokens."""
    q, k, a, _, g = operands
    return _attention(q, k, a, g, mixer.read_scale, mixer.row.substeps)


def _row_norms(operands: Operands, stride: int) -> Tensor:
    """Return the norms of the state's rows after every `stride` sub-steps, and after the last one: [B, N, H, K].

    The pieces of a text are affine maps of the state, found all at once; the states are then one product each.
    """
    batch, steps = operands.k.shape[:2]
    pieces = max(1, -(-steps // stride))

    def in_pieces(x: Tensor) -> Tensor:
        """Divide a sequence, filled up with tokens that are all zero, which leave the state as it is."""
        filled = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, pieces * stride - steps))
        return filled.unflatten(1, (pieces, stride)).flatten(0, 1)

    k, a, u = (in_pieces(x) for x in operands[1:4])
    maps = segment(k, a, u, None if operands.g is None else in_pieces(operands.g))
    M, N = (x.unflatten(0, (batch, pieces)) for x in maps)
    state, norms = torch.zeros_like(N[:, 0]), []
    for i in range(pieces):
        state = Affine(M[:, i], N[:, i])(state)
        norms.append(state.norm(dim=-1))
    return torch.stack(norms, 1)


def _wide_operands(operands: Operands) -> Operands:
    """Return the operands in at least float32: a difference of two attentions is too fine for 16 bits."""
    q, k, a, u = (_wide(y) for y in operands[:4])
    return Operands(q, k, a, u, None if operands.g is None else operands.g.to(q.dtype))


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
