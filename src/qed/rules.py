"""Every model of the family as a row of one table: its erase vector a, write vector u and log-decay g in

    S_t = (I − k_t a_tᵀ) Diag(exp g_t) S_{t−1} + k_t u_tᵀ          o_t = scale · S_tᵀ q_t

q and k are L2-normalised, b ∈ (0, 1) is the erase gate (β when it is one number per head), w the write gate, λ the
strength of the query-derived correction and P⊥ₖ(x) = x − k (kᵀx). To add a rule, write its row, and a function too if
the columns of a row cannot say what its a and u are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .ops import erase_write, erase_write_step

Width = Literal["none", "head", "channel"]  # not used · one number per head · one per channel


class Projections(NamedTuple):
    """What a layer computes from its tokens. A rule declares which of the optional ones it uses."""

    q: Tensor  # [B, T, H, K]
    k: Tensor  # [B, T, H, K]
    v: Tensor  # [B, T, H, V]
    g: Tensor | None = None  # log-decay [B, T, H, 1 or K]
    b: Tensor | None = None  # erase gate [B, T, H, 1 or K]
    w: Tensor | None = None  # write gate [B, T, H, 1 or V]
    strength: Tensor | float | None = None  # λ: a number, or one per head [H]
    direction: Tensor | None = None  # erase direction: fixed [H, K] or per token [B, T, H, K]


class Operands(NamedTuple):
    """The first five arguments of `erase_write`."""

    q: Tensor
    k: Tensor
    a: Tensor
    u: Tensor
    g: Tensor | None


def orthogonal(x: Tensor, k: Tensor) -> Tensor:
    """Return P⊥ₖ(x): x without its part along the unit vector k."""
    return x - k * (k * x).sum(-1, keepdim=True)


def corrected_erase(
    k: Tensor, b: Tensor, strength: Tensor | float, source: Tensor, *, gate: bool, project: bool
) -> Tensor:
    """Return the erase vector b⊙k + λ·d (eq. 6), [B, T, H, K].

    Args:
        k: keys [B, T, H, K], of unit length if `project`.
        b: erase gate [B, T, H, 1 or K].
        strength: λ, a number or one per head [H].
        source: what d is made of: queries [B, T, H, K], or a direction per head [H, K].
        gate: whether d is gated by b.
        project: whether d is made orthogonal to k.
    """
    correction = b * source if gate else source
    if project:
        correction = orthogonal(correction, k)
    per_head = strength.unsqueeze(-1) if isinstance(strength, Tensor) and strength.dim() == 1 else strength
    return b * k + per_head * correction


# Projections of which `Rule.operands` has checked that they are those that the rule declares.
Checked: TypeAlias = Any


def linear(x: Checked) -> Operands:
    """Return the operands of linear attention, which erases nothing."""
    return Operands(x.q, x.k, torch.zeros_like(x.k), x.v, None)


def eda(x: Checked) -> Operands:
    """Return the operands of two sub-steps per token: decay and erase along the direction e, then a delta-rule write
    without decay."""
    e, nothing = x.direction, torch.zeros_like
    return Operands(
        q=_then(nothing(x.q), x.q),
        k=_then(e, x.k),
        a=_then(x.b * e, x.w * x.k),
        u=_then(nothing(x.v), x.w * x.v),
        g=_then(x.g, nothing(x.g)),
    )


def _then(first: Tensor, second: Tensor) -> Tensor:
    """Put two sub-steps of every token one after the other along T: [B, T, ...] twice → [B, 2T, ...]."""
    return torch.stack([first, second], 2).flatten(1, 2)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A row of the table. It says which projections a rule uses, so that a layer computes no others, and how a and u
    are made of them."""

    erase_vector: str  # the equation of a, for readers
    decay: Width = "channel"
    erase: Width = "channel"
    write: Width = "channel"  # "none": b gates the write too
    strength: bool = False  # whether a has a correction, made of the query or, if the rule has one, the direction …
    gate: bool = True  # … gated by b …
    project: bool = True  # … and made orthogonal to k
    direction: Literal["none", "head", "token"] = "none"
    substeps: int = 1
    function: Callable[[Checked], Operands] | None = None  # computes the operands, where the columns do not say how

    def default(self, column: str) -> Any:
        """Return what a row has in a column that it does not mention."""
        return next(field.default for field in fields(self) if field.name == column)

    def operands(self, x: Projections) -> Operands:
        """Return the arguments of `erase_write`, [B, T × substeps, H, ·], in q's dtype (g keeps its own)."""
        self._check(x)
        operands = (self.function or self._gated)(x)
        q, k, a, u = (t.to(x.q.dtype) for t in operands[:4])
        return Operands(q, k, a, u, operands.g)

    def _gated(self, x: Checked) -> Operands:
        """a = b⊙k, with a correction if there is one, and u = w⊙v or b⊙v (eqs. 1–6)."""
        if self.strength:
            source = x.q if x.direction is None else x.direction
            a = corrected_erase(x.k, x.b, x.strength, source, gate=self.gate, project=self.project)
        else:
            a = x.b * x.k
        return Operands(x.q, x.k, a, (x.b if x.w is None else x.w) * x.v, x.g)

    def attend(
        self,
        x: Projections,
        *,
        scale: float = 1.0,
        initial_state: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        there: Tensor | None = None,
        impl: str = "auto",
    ) -> tuple[Tensor, Tensor]:
        """Return outputs [B, T, H, V] and the final state [N, H, K, V].

        Args:
            x: the projections that the rule declares.
            scale, initial_state, cu_seqlens, impl: as in `erase_write`.
            there: [B, T] bool, which tokens exist; the others leave the state as it is. None if all exist.
        """
        operands = self.operands(x)
        return self.run(
            operands, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens, there=there, impl=impl
        )

    def run(
        self,
        operands: Operands,
        *,
        scale: float,
        initial_state: Tensor | None,
        cu_seqlens: Tensor | None,
        there: Tensor | None,
        impl: str,
    ) -> tuple[Tensor, Tensor]:
        """Do the same as `attend` with operands instead of projections.

        Args:
            operands: what `operands` returned.
            scale, initial_state, cu_seqlens, there, impl: as in `attend`.
        """
        offsets = None if cu_seqlens is None else cu_seqlens * self.substeps
        if there is not None:  # with k = 0 and g = 0, S_t = S_{t−1}
            exists = there[..., None].expand(-1, -1, self.substeps).flatten(1)[..., None, None]
            g = None if operands.g is None else torch.where(exists, operands.g, 0)
            operands = operands._replace(k=torch.where(exists, operands.k, 0), g=g)
        o, state = erase_write(*operands, scale=scale, initial_state=initial_state, cu_seqlens=offsets, impl=impl)
        return o[:, self.substeps - 1 :: self.substeps], state

    def attend_step(
        self, x: Projections, *, state: Tensor, scale: float = 1.0, inplace: bool = False, impl: str = "auto"
    ) -> tuple[Tensor, Tensor]:
        """Run one token, and return its outputs [B, 1, H, V] and the new state [B, H, K, V].

        Args:
            x: the projections that the rule declares, with T = 1.
            state, scale, inplace, impl: as in `erase_write_step`.
        """
        if x.q.dim() != 4 or x.q.shape[1] != 1:
            raise ValueError(f"q: expected one token, [B, 1, H, K], got {list(x.q.shape)}")
        return self.run_step(self.operands(x), state=state, scale=scale, inplace=inplace, impl=impl)

    def run_step(
        self, operands: Operands, *, state: Tensor, scale: float, inplace: bool, impl: str
    ) -> tuple[Tensor, Tensor]:
        """Do the same as `attend_step` with operands instead of projections.

        Args:
            operands: what `operands` returned.
            state, scale, inplace, impl: as in `erase_write_step`.
        """
        for i in range(self.substeps):
            q, k, a, u = (t[:, i] for t in operands[:4])
            g = None if operands.g is None else operands.g[:, i]
            o, state = erase_write_step(q, k, a, u, g, state=state, scale=scale, inplace=inplace, impl=impl)
        return o.unsqueeze(1), state

    def _check(self, x: Projections) -> None:
        if x.q.dim() != 4 or x.k.shape != x.q.shape or x.v.dim() != 4 or x.v.shape[:-1] != x.q.shape[:-1]:
            raise ValueError(
                "q, k, v: expected [B, T, H, K], the same, and [B, T, H, V], "
                f"got {list(x.q.shape)}, {list(x.k.shape)}, {list(x.v.shape)}"
            )
        heads = list(x.q.shape[2:3])
        widths = {"none": None, "head": [*x.q.shape[:-1], 1], "channel": list(x.q.shape)}
        write = list(x.v.shape) if self.write == "channel" else widths[self.write]
        directions = {"none": None, "head": list(x.q.shape[2:]), "token": list(x.q.shape)}
        _expect("g", x.g, [widths[self.decay]])
        _expect("b", x.b, [widths[self.erase]])
        _expect("w", x.w, [write])
        _expect("strength", x.strength, [heads, []] if self.strength else [None])
        _expect("direction", x.direction, [directions[self.direction]])


def _expect(name: str, x: Tensor | float | None, shapes: list[list[int] | None]) -> None:
    """Refuse a projection of the wrong shape, a missing one, and one the rule would ignore."""
    got = None if x is None else list(x.shape) if isinstance(x, Tensor) else []
    if got not in shapes:
        expected = " or ".join("nothing (the rule does not use it)" if s is None else str(s) for s in shapes)
        raise ValueError(f"{name}: expected {expected}, got {'nothing' if got is None else got}")


# What a row declares: kernels run a rule only if they know its value in every one of these columns.
COLUMNS = tuple(field.name for field in fields(Rule) if field.name != "erase_vector")

RULES: dict[str, Rule] = {
    "linear": Rule(erase_vector="0", decay="none", erase="none", write="none", function=linear),
    "deltanet": Rule(erase_vector="βk", decay="none", erase="head", write="none"),
    "gdn": Rule(erase_vector="βk", decay="head", erase="head", write="none"),
    "kda": Rule(erase_vector="βk", erase="head", write="none"),
    "gdn2": Rule(erase_vector="b⊙k"),
    "qed": Rule(erase_vector="b⊙k + λ·P⊥ₖ(b⊙q)", strength=True),
    "qed-nogate": Rule(erase_vector="b⊙k + λ·P⊥ₖ(q)", strength=True, gate=False),
    "qed-nogate-noproj": Rule(erase_vector="b⊙k + λ·q", strength=True, gate=False, project=False),
    "qed-rand": Rule(erase_vector="b⊙k + λ·P⊥ₖ(b⊙r_h)", strength=True, direction="head"),
    "eda": Rule(erase_vector="βₑe, then βk", erase="head", write="head", direction="token", substeps=2, function=eda),
}


def l2_normalize(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Return x / √(‖x‖² + eps) over the last dimension, computed in at least float32. It is smooth at zero and has unit
    length elsewhere."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def qed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    b: Tensor,
    w: Tensor,
    strength: Tensor | float,
    *,
    normalize_qk: bool = True,
    gate: bool = True,
    project: bool = True,
    direction: Tensor | None = None,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Run the paper's operator in one call, for use in a layer of one's own.

    Args:
        q, k: [B, T, H, K]; L2-normalised here unless `normalize_qk` is False (then they must be unit vectors for
            the projection to be one).
        v: [B, T, H, V].
        g: log-decay ≤ 0, [B, T, H, K] (or [B, T, H, 1], or None).
        b: erase gate [B, T, H, K]. w: write gate [B, T, H, V].
        strength: λ, a number or one per head [H]; 0 is Gated DeltaNet-2.
        gate, project: whether the correction is gated by b and made orthogonal to k.
        direction: [H, K] to erase along instead of the query (the random control).
        scale, initial_state, cu_seqlens, impl: as in `erase_write`.

    Returns:
        o [B, T, H, V] in q's dtype, and the final state [N, H, K, V].
    """
    if q.dim() != 4 or k.shape != q.shape:
        raise ValueError(f"q, k: expected [B, T, H, K] both, got {list(q.shape)} and {list(k.shape)}")
    _expect("b", b, [list(q.shape)])
    _expect("w", w, [list(v.shape)])
    _expect("strength", strength, [list(q.shape[2:3]), []])
    if direction is not None:
        _expect("direction", direction, [list(q.shape[2:])])
    if normalize_qk:
        q, k = l2_normalize(q), l2_normalize(k)
    a = corrected_erase(k, b, strength, q if direction is None else direction, gate=gate, project=project)
    return erase_write(
        *(q, k, a.to(q.dtype), (w * v).to(q.dtype), g),
        scale=scale,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        impl=impl,
    )
