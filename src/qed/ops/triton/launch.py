"""The kernels as the op's forward and backward: memory, grids, settings."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ..packing import chunk_bound, sequence_count
from .backward import chunk_gradients, pair_gradients, state_gradients
from .forward import chunk_states, chunk_terms, segment_starts
from .step import decode_step
from .tuning import CHUNK, Config, config, refuse_known_bad

LOG_CHUNK = CHUNK.bit_length() - 1
PROGRAMS = 264  # twice a large GPU's multiprocessors: what it takes to keep them busy
SHORTEST_SEGMENT = 8  # in chunks


class ChunkTable(NamedTuple):
    """Which sequence every chunk belongs to, made on the device: nothing waits for `cu_seqlens`."""

    tokens: int  # of each sequence, unless packed
    offsets: Tensor | None  # [N + 1]
    sequence_of: Tensor | None  # [chunks], those past the last sequence's end included
    chunk_offsets: Tensor | None  # [N] first chunk of every sequence
    chunks: int

    @staticmethod
    def of(q: Tensor, cu_seqlens: Tensor | None) -> ChunkTable:
        batch, tokens = q.shape[:2]
        chunks = chunk_bound(batch, tokens, sequence_count(q, cu_seqlens), CHUNK, cu_seqlens is not None)
        if cu_seqlens is None:
            return ChunkTable(tokens, None, None, None, chunks)
        ends = (cu_seqlens.diff() + (CHUNK - 1)).div(CHUNK, rounding_mode="floor").cumsum(0)
        every = torch.arange(chunks, device=q.device, dtype=ends.dtype)
        sequence_of = torch.searchsorted(ends, every, right=True).clamp_(max=ends.shape[0] - 1)
        return ChunkTable(tokens, cu_seqlens, sequence_of, torch.nn.functional.pad(ends[:-1], (1, 0)), chunks)

    def cut(self, q: Tensor, segments: int) -> ChunkTable:
        """Segments of whole chunks in the place of sequences."""
        batch, tokens = q.shape[:2]
        each = -(-tokens // CHUNK)
        length = -(-each // segments)  # of a segment, in chunks
        first = (torch.arange(segments, device=q.device) * length).repeat(batch)
        sequence = torch.arange(batch, device=q.device).repeat_interleave(segments)
        starts = torch.nn.functional.pad(sequence * tokens + first * CHUNK, (0, 1), value=batch * tokens)
        return ChunkTable(tokens, starts, None, sequence * each + first, self.chunks)


class _Kept(NamedTuple):
    starts: Tensor  # S₀ of every chunk
    R: Tensor


class Shapes(NamedTuple):
    """The constants every kernel is compiled for."""

    H: int
    K: int
    V: int
    G_WIDTH: int
    PACKED: bool
    PRECISION: str
    DIAGONAL: tl.dtype
    SUB: int
    LEVELS: int

    @staticmethod
    def of(q: Tensor, u: Tensor, g: Tensor | None, cu_seqlens: Tensor | None) -> Shapes:
        # Matrix units round float32 to ten bits unless asked for three products: what float32 inputs are owed.
        precision = "tf32x3" if q.dtype == torch.float32 else "tf32"
        diagonal = tl.bfloat16 if q.dtype == torch.bfloat16 else tl.float32  # exp(±80) is beyond float16
        width = 0 if g is None else g.shape[-1]
        sub = 8 if q.dtype == torch.float32 else 16  # see `tiles.py`
        levels = (CHUNK // sub).bit_length() - 1
        return Shapes(
            q.shape[2], q.shape[3], u.shape[3], width, cu_seqlens is not None, precision, diagonal, sub, levels
        )

    def pick(self, *names: str) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}


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
    """Outputs [B, T, H, V], final state [N, H, K, V], and (if `save`) what the backward starts from."""
    refuse_known_bad(q.device)
    q, k, a, u = (x.contiguous() for x in (q, k, a, u))
    g = None if g is None else g.contiguous()
    initial_state = None if initial_state is None else initial_state.contiguous()
    shapes, table = Shapes.of(q, u, g, cu_seqlens), ChunkTable.of(q, cu_seqlens)
    *terms, starts, R = saved_like(q, u, cu_seqlens, states=save)
    setting = _setting("chunk_terms", q, u)
    if table.chunks:
        chunk_terms[(table.chunks * shapes.H,)](
            *(q, k, a, g, *terms),
            *(table.tokens, table.offsets, table.sequence_of, table.chunk_offsets, scale),
            **shapes.pick("H", "K", "G_WIDTH", "PACKED", "PRECISION", "DIAGONAL", "SUB", "LEVELS"),
            **_constants(setting, "BK"),
            LOG_C=LOG_CHUNK,
        )
    o, segments = torch.empty_like(u), segment_count(q, u, cu_seqlens)
    if segments > 1:
        table = table.cut(q, segments)
        M = _segment_maps(terms, shapes, table, q.shape[0] * segments)
        N = _run_states(terms, u, None, None, None, shapes, table, q.shape[0] * segments)
        initial_state = _compose(M, N, initial_state, segments, reverse=False)
    sequences = sequence_count(q, cu_seqlens) * segments
    kept = _Kept(starts, R) if save else None
    final_state = _run_states(terms, u, initial_state, o, kept, shapes, table, sequences)
    if segments > 1:
        final_state = final_state[segments - 1 :: segments].contiguous()
    return o, final_state, [*terms, starts, R] if save else []


def segment_count(q: Tensor, u: Tensor, cu_seqlens: Tensor | None) -> int:
    """Into how many segments sequences are cut: one, unless they are few and long. A function of shapes alone."""
    batch, tokens, heads, K = q.shape
    programs = batch * heads * -(-u.shape[-1] // _setting("chunk_states", q, u).BV)
    chunks = -(-tokens // CHUNK)
    if cu_seqlens is not None or K > 128 or programs * 4 > PROGRAMS:
        return 1
    wanted = max(1, min(PROGRAMS // max(1, programs), chunks // SHORTEST_SEGMENT))
    return -(-chunks // -(-chunks // wanted)) if chunks else 1


def _segment_maps(terms: list[Tensor], shapes: Shapes, table: ChunkTable, count: int) -> Tensor:
    """M of every segment's S → M S + N, [count, H, K, K]: where the identity goes without writes."""
    identity = torch.eye(shapes.K, dtype=torch.float32, device=terms[0].device)
    identity = identity.expand(count, shapes.H, -1, -1).contiguous()
    return _run_states(terms, None, identity, None, None, shapes._replace(V=shapes.K), table, count)


def _compose(M: Tensor, N: Tensor, state: Tensor | None, segments: int, reverse: bool) -> Tensor:
    """The state every segment starts from; in reverse, the gradient of the state it ends with. Like N."""
    (count, H, K, V), found = N.shape, torch.empty_like(N)
    setting = config("segment_starts", 4, K, V)
    segment_starts[(count // segments * H * -(-V // setting.BV),)](
        *(M, N, state, found, segments),
        **{"H": H, "K": K, "V": V, "HAS_STATE": state is not None, "REVERSE": reverse},
        **{"BK": setting.BK, "BV": setting.BV, "num_warps": setting.num_warps, "num_stages": setting.num_stages},
    )
    return found


def _run_states(
    terms: list[Tensor],
    u: Tensor | None,
    initial_state: Tensor | None,
    o: Tensor | None,
    kept: _Kept | None,
    shapes: Shapes,
    table: ChunkTable,
    sequences: int,
) -> Tensor:
    """The final state of every sequence; writes o and what is to be kept where they are given."""
    setting = config("chunk_states", terms[0].element_size(), shapes.K, shapes.V)
    starts, R = kept or (None, None)
    final_state = terms[0].new_empty(sequences, shapes.H, shapes.K, shapes.V, dtype=torch.float32)
    chunk_states[(sequences * shapes.H * -(-shapes.V // setting.BV),)](
        *(*terms, u, initial_state, o, final_state, starts, R),
        *(table.tokens, table.offsets, table.chunk_offsets),
        **shapes.pick("H", "K", "V", "PRECISION"),
        **_constants(setting, "BK", "BV"),
        PACKED=table.offsets is not None,
        HAS_STATE=initial_state is not None,
        WRITES=u is not None,
        OUTPUT=o is not None,
        SAVE=kept is not None,
    )
    return final_state


def _run_state_gradients(
    terms: list[Tensor],
    do: Tensor,
    dstate: Tensor | None,
    du: Tensor | None,
    d_ends: Tensor | None,
    shapes: Shapes,
    table: ChunkTable,
    sequences: int,
) -> Tensor:
    """The gradient of every sequence's initial state; writes du and d_ends where they are given."""
    setting = config("state_gradients", do.element_size(), shapes.K, shapes.V)
    d_initial = do.new_empty(sequences, shapes.H, shapes.K, shapes.V, dtype=torch.float32)
    state_gradients[(sequences * shapes.H * -(-shapes.V // setting.BV),)](
        *(*terms, do, dstate, du, d_initial, d_ends),
        *(table.tokens, table.offsets, table.chunk_offsets),
        **shapes.pick("H", "K", "V", "PRECISION"),
        **_constants(setting, "BK", "BV"),
        PACKED=table.offsets is not None,
        HAS_STATE=dstate is not None,
        OUTPUT=du is not None,
    )
    return d_initial


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
    q, k, a, do, dstate = (x.contiguous() for x in (q, k, a, do, dstate))
    g = None if g is None else g.contiguous()
    shapes, table = Shapes.of(q, u, g, cu_seqlens), ChunkTable.of(q, cu_seqlens)
    *terms, starts, R = saved
    dq, dk, da, du = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, a, u))
    d_ends, d_final, lanes_table, segments = torch.empty_like(starts), dstate, table, segment_count(q, u, cu_seqlens)
    if segments > 1:
        lanes_table = table.cut(q, segments)
        M = _segment_maps(terms, shapes, lanes_table, q.shape[0] * segments)
        N = _run_state_gradients(terms, do, None, None, None, shapes, lanes_table, q.shape[0] * segments)
        d_final = _compose(M, N, dstate, segments, reverse=True)
    d_initial = _run_state_gradients(terms, do, d_final, du, d_ends, shapes, lanes_table, d_final.shape[0])
    if segments > 1:
        d_initial = d_initial[::segments].contiguous()
    d_pairs = torch.empty_like(terms[-1])
    tiles = -(-shapes.K // _setting("chunk_gradients", q, u).BK)
    dg = _decay_gradient(q, g, tiles)
    if table.chunks:
        setting = _setting("pair_gradients", q, u)
        pair_gradients[(table.chunks * shapes.H,)](
            *(do, du, R, d_pairs),
            *(table.tokens, table.offsets, table.sequence_of, table.chunk_offsets),
            **shapes.pick("H", "V", "PACKED", "PRECISION"),
            **_constants(setting, "BV"),
        )
        setting = _setting("chunk_gradients", q, u)
        chunk_gradients[(table.chunks * shapes.H * tiles,)](
            *(q, k, a, g, do, du, R, starts, d_ends, d_pairs, dq, dk, da, dg),
            *(table.tokens, q.shape[0] * q.shape[1]),
            *(table.offsets, table.sequence_of, table.chunk_offsets, scale),
            **shapes.pick("H", "K", "V", "G_WIDTH", "PACKED", "PRECISION", "DIAGONAL", "SUB", "LEVELS"),
            **_constants(setting, "BK", "BV"),
        )
    if g is not None and shapes.G_WIDTH == 1 and shapes.K != 1:
        dg = dg.sum(0).unsqueeze(-1)
    return dq, dk, da, du, dg if g is None else dg.to(g.dtype), d_initial


def step(
    q: Tensor, k: Tensor, a: Tensor, u: Tensor, g: Tensor | None, state: Tensor, scale: float, new_state: Tensor
) -> Tensor:
    """One token: q, k, a [B, H, K], u [B, H, V], state [B, H, K, V] → o. Writes `new_state`, which may be `state`."""
    q, k, a, u = (x.contiguous() for x in (q, k, a, u))
    g = None if g is None else g.contiguous()
    lanes, (K, V) = q.shape[0] * q.shape[1], state.shape[2:]
    o, setting = torch.empty_like(u), _setting("decode_step", q, u)
    if lanes:
        decode_step[(lanes * -(-V // setting.BV),)](
            *(q, k, a, u, g, state, o, new_state, scale),
            **{"K": K, "V": V, "G_WIDTH": 0 if g is None else g.shape[-1], "BK": setting.BK, "BV": setting.BV},
            **{"num_warps": setting.num_warps, "num_stages": setting.num_stages},
        )
    return o


def saved_like(q: Tensor, u: Tensor, cu_seqlens: Tensor | None, states: bool = True) -> list[Tensor]:
    """Uninitialised memory for what `chunk_terms` writes and, if `states`, every chunk's start state and R."""
    (batch, tokens, H, K), V = q.shape, u.shape[-1]
    chunks = chunk_bound(batch, tokens, sequence_count(q, cu_seqlens), CHUNK, cu_seqlens is not None)
    rows = [q.new_empty(chunks, H, CHUNK, K) for _ in range(3)]
    gamma = q.new_empty(chunks, H, K, dtype=torch.float32)
    squares = [q.new_empty(chunks, H, CHUNK, CHUNK) for _ in range(2)]
    kept = chunks if states else 0
    return [*rows, gamma, *squares, q.new_empty(kept, H, K, V), q.new_empty(kept, H, CHUNK, V)]


def _decay_gradient(q: Tensor, g: Tensor | None, tiles: int) -> Tensor:
    if g is None:
        return q.new_empty(0)
    if g.shape[-1] == q.shape[-1]:
        return torch.empty_like(g)
    return q.new_empty(tiles, *q.shape[:3], dtype=torch.float32)


def _setting(kernel: str, q: Tensor, u: Tensor) -> Config:
    return config(kernel, q.element_size(), q.shape[-1], u.shape[-1])


def _constants(setting: Config, *names: str) -> dict[str, int]:
    tiles = {name: getattr(setting, name) for name in names}
    return tiles | {"C": CHUNK, "num_warps": setting.num_warps, "num_stages": setting.num_stages}
