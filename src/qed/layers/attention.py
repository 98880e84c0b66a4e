"""Softmax attention over all tokens or a window of them, with rotary positions, for hybrid stacks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..routes import AUTO, Impl
from .projections import into_residual
from .routes import project
from .sequences import DENSE, Sequences


class AttentionState(NamedTuple):
    """What an attention layer keeps of the tokens so far. It grows with them, up to the window if there is one."""

    keys: Tensor  # [B, H, L, D], rotated
    values: Tensor  # [B, H, L, D]
    positions: Tensor  # [B, L], the position of every key in its sequence, −1 where there is none
    seen: Tensor  # [B], how many tokens there were so far

    def without(self, removed: Tensor) -> AttentionState:
        """Return the state without the last `removed` [B] tokens of every row."""
        seen = self.seen - removed
        positions = self.positions.masked_fill(self.positions >= seen[:, None], -1)
        kept = (positions >= 0).any(0)
        return AttentionState(self.keys[:, :, kept], self.values[:, :, kept], positions[:, kept], seen)


class Attention(nn.Module):
    """Softmax attention with rotary positions."""

    impl: Impl = AUTO

    def __init__(
        self, *, hidden_size: int, num_heads: int, head_dim: int, window: int | None = None, rope_theta: float = 1e4
    ):
        """Make a layer with random weights.

        Args:
            hidden_size: width of the residual stream.
            num_heads: number of heads.
            head_dim: channels of a head, an even number.
            window: how many tokens a query sees, itself included; None for all.
            rope_theta: base of the rotary positions' wavelengths.
        """
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"head_dim: expected an even number for rotary positions, got {head_dim}")
        self.num_heads, self.head_dim, self.window, self.rope_theta = num_heads, head_dim, window, rope_theta
        width = num_heads * head_dim
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(hidden_size, width, bias=False) for _ in range(3))
        self.o_proj = into_residual(width, hidden_size)

    def forward(
        self,
        x: Tensor,
        state: AttentionState | None = None,
        sequences: Sequences = DENSE,
        *,
        residual: Tensor | None = None,
        rewind: int = 0,
    ) -> tuple[Tensor, AttentionState]:
        """Return outputs like x, and the state after the last token.

        Args:
            x, sequences, residual: as in `Mixer.forward`.
            state: what the layer keeps of earlier tokens; None for the beginning of a sequence.
            rewind: how many of the last tokens the returned state can go back: a window keeps so many keys more.
        """
        places, there = sequences.positions(x), sequences.there(x.shape[1])
        if state is not None:
            places = places + state.seen[:, None]
        q, k, v = (y.transpose(1, 2) for y in self.rotated(x, places))
        key_places = places if there is None else torch.where(there, places, -1)
        seen = places.new_full(places.shape[:1], x.shape[1]) if sequences.lengths is None else sequences.lengths
        if state is not None:
            k, v = torch.cat([state.keys, k], 2), torch.cat([state.values, v], 2)
            key_places, seen = torch.cat([state.positions, key_places], 1), state.seen + seen
        plain = state is None and there is None and sequences.cu_seqlens is None and self.window is None
        mask = None if plain else self._mask(places, key_places, sequences, x)
        o = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=plain)
        new_state = self._trim(AttentionState(k, v, key_places, seen), rewind)
        return project(self.o_proj, o.transpose(1, 2).flatten(2), residual, self.impl), new_state

    def rotated(self, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys, rotated by the places [B, T] of their tokens, and values: each [B, T, H, D]."""
        matrices = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (project(w, x, impl=self.impl).unflatten(-1, (self.num_heads, -1)) for w in matrices)
        return self._rotate(q, places), self._rotate(k, places), v

    def _mask(self, places: Tensor, key_places: Tensor, sequences: Sequences, x: Tensor) -> Tensor:
        """Return which keys a query sees, [B, 1, T, L]. A query that does not exist sees itself, so that its result is
        finite."""
        distance = places[:, :, None] - key_places[:, None, :]
        seen = (distance >= 0) & (key_places[:, None, :] >= 0)
        if self.window is not None:
            seen = seen & (distance < self.window)
        if sequences.cu_seqlens is not None:
            owners = sequences.owners(x)
            seen = seen & (owners[:, None] == owners)
        tokens, length = seen.shape[1:]
        itself = (
            torch.arange(length, device=x.device) == torch.arange(tokens, device=x.device)[:, None] + length - tokens
        )
        return (seen | itself)[:, None]

    def _trim(self, state: AttentionState, rewind: int) -> AttentionState:
        """Return the state with only the last `window` keys of each row, by position, and `rewind` more."""
        if self.window is None or state.keys.shape[2] <= self.window + rewind:
            return state
        places, index = state.positions.topk(self.window + rewind, 1, sorted=True)
        places, index = places.flip(1), index.flip(1)
        rows = index[:, None, :, None].expand(-1, self.num_heads, -1, self.head_dim)
        return AttentionState(state.keys.gather(2, rows), state.values.gather(2, rows), places, state.seen)

    def _rotate(self, x: Tensor, places: Tensor) -> Tensor:
        """Apply rotary positions: channels i and i + D/2 are rotated by the angle place · theta^(−2i/D)."""
        half = self.head_dim // 2
        rates = self.rope_theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
        angle = places[..., None].float() * rates
        cos, sin = angle.cos()[:, :, None], angle.sin()[:, :, None]
        first, second = x.float().split(half, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
