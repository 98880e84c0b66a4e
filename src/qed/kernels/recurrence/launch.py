"""Launches the kernels of the op's forward, backward and step: their memory, grids and settings.

A large GPU is done with the first kernel after half a millisecond, so the time that Python takes before a launch
counts. Constants are therefore cached, and memory is allocated only when the kernel that writes it is next.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.arguments import Arguments
from ...ops.chunkwise import Gradients
from ...ops.packing import chunk_bound, sequence_count
from ...ops.validation import offsets_of
from ..launching import FUSED, on_its_device
from .backward import chunk_gradients, pair_gradients, state_gradients
from .forward import chunk_states, chunk_terms, segment_starts
from .settings import CHUNK, SLOTS, Config, architecture, config, product_tile
from .step import decode_step
from .table import chunk_table

SHORTEST_SEGMENT = 8  # in chunks
TABLE_CHUNKS, TABLE_SEQUENCES = 64, 128  # how many of each a program of `chunk_table` looks at together


class Shapes(NamedTuple):
    """What the kernels are compiled for."""

    dtype: torch.dtype
    architecture: int
    H: int
    K: int
    V: int
    G_WIDTH: int
    PACKED: bool

    @staticmethod
    def of(q: Tensor, u: Tensor, g: Tensor | None, cu_seqlens: Tensor | None) -> Shapes:
        """Return the shapes of a call.

        Args:
            q: queries [B, T, H, K].
            u: write vectors [B, T, H, V].
            g: log-decays [B, T, H, K or 1], or None.
            cu_seqlens: offsets of packed sequences, or None.
        """
        width = 0 if g is None else g.shape[-1]
        H, K = q.shape[2:]
        return Shapes(q.dtype, architecture(q.device), H, K, u.shape[3], width, cu_seqlens is not None)

    @property
    def sub(self) -> int:
        """How many tokens a sub-block has in chunks that are cut; see `tiles.py`."""
        return 4 if self.dtype == torch.float32 else 8

    def setting(self, kernel: str, lanes: int = 0) -> Config:
        """Return the launch setting of a kernel for these shapes and so many states."""
        return config(kernel, self.dtype.itemsize, self.K, self.V, lanes, self.architecture)


# The constants that each kernel takes.
TAKES = {
    "chunk_terms": ("H", "K", "ALL_K", "G_WIDTH", "PACKED", "C", "LOG_C", "BK", "LEAST", "REACH", "CENTRED"),
    "chunk_states": ("H", "K", "V", "PACKED", "C", "BK", "BV"),
    "segment_maps": ("H", "K", "V", "PACKED", "C", "BK", "BV"),  # `chunk_states` again
    "segment_starts": ("H", "K", "V", "BK", "BV"),
    "state_gradients": ("H", "K", "V", "PACKED", "C", "BK", "BV"),
    "pair_gradients": ("H", "V", "PACKED", "C", "BV"),
    "chunk_gradients": ("H", "K", "V", "G_WIDTH", "PACKED", "C", "BK", "BV", "LEAST", "REACH", "CENTRED"),
}


@lru_cache
def constants(kernel: str, shapes: Shapes, lanes: int = 0) -> dict[str, Any]:
    """Return the constants and options that all launches of a kernel with these shapes have in common.

    Args:
        kernel: a name of `TAKES`; ", cut" behind it for chunks that are cut.
        shapes: what the kernel is compiled for.
        lanes: how many states there are, for kernels that carry one.
    """
    setting = shapes.setting(kernel, lanes)
    known: dict[str, Any] = shapes._asdict() | {"BK": setting.BK, "BV": setting.BV}
    known |= {"C": CHUNK, "LOG_C": CHUNK.bit_length() - 1, "ALL_K": product_tile(shapes.K)}
    reach = 80.0 if shapes.dtype == torch.float32 else 110.0
    known |= {"REACH": reach, "LEAST": -reach / shapes.sub}
    known |= {"CENTRED": tl.bfloat16 if shapes.dtype == torch.bfloat16 else tl.float32}
    taken = {name: known[name] for name in TAKES[kernel.removesuffix(", cut")]}
    # Matrix units round float32 to a mantissa of ten bits unless they are asked for three products ("tf32x3"), which
    # float32 inputs get.
    taken["PRECISION"] = "tf32x3" if shapes.dtype == torch.float32 else "tf32"
    return taken | FUSED | {"num_warps": setting.num_warps, "num_stages": setting.num_stages}


@lru_cache
def blockings(kernel: str, shapes: Shapes) -> list[dict[str, Any]]:
    """Return the constants of the launches of a kernel with pairs of tokens: one launch for chunks that are one block,
    and with a decay a second one for chunks that decay too far, which are cut into parts, or parts of parts."""
    levels = 2 if shapes.dtype == torch.float32 else 1
    ratio = round((CHUNK // shapes.sub) ** (1 / levels))
    # With a decay per head, dg has one sum for every tile of K, so both launches must have the same tiles.
    common, cut = constants(kernel, shapes), constants(kernel if shapes.G_WIDTH == 1 else f"{kernel}, cut", shapes)
    whole = common | {"SUB": CHUNK, "LEVELS": 0, "RATIO": ratio}
    return [whole, cut | {"SUB": shapes.sub, "LEVELS": levels, "RATIO": ratio}] if shapes.G_WIDTH else [whole]


_COMPILED: set[tuple[Any, Shapes]] = set()


def _each_blocking(kernel: Any, blocks: int, arguments: tuple[Any, ...], shapes: Shapes) -> None:
    """Launch a kernel with pairs for `blocks` chunks × heads, once for every blocking. Before the first launch all
    blockings are compiled in parallel."""
    ways = blockings(kernel.__name__, shapes)
    if (kernel, shapes) not in _COMPILED and isinstance(kernel, triton.JITFunction):
        with ThreadPoolExecutor(len(ways)) as threads, triton.AsyncCompileMode(threads):
            for blocking in ways:
                kernel.warmup(*arguments, grid=(1,), **blocking)
    _COMPILED.add((kernel, shapes))
    for blocking in ways:
        tiles = -(-shapes.K // blocking["BK"]) if kernel.__name__ == "chunk_gradients" else 1
        kernel[(blocks * tiles,)](*arguments, **blocking)


def chunk_count(q: Tensor, cu_seqlens: Tensor | None) -> int:
    """Return for how many chunks memory is allocated: for all there are, or, if sequences are packed, for as many as
    there can be."""
    batch, tokens = q.shape[:2]
    return chunk_bound(batch, tokens, sequence_count(q, cu_seqlens), CHUNK, cu_seqlens is not None)


class ChunkTable(NamedTuple):
    """Which sequence every chunk belongs to. The table is made on the device, so that the host does not wait for
    `cu_seqlens`."""

    chunks: int
    tokens: int  # of each sequence, unless packed
    offsets: Tensor | None = None  # [N + 1]
    sequence_of: Tensor | None = None  # [chunks], with chunks past the end of the last sequence among them
    first: Tensor | None = None  # [N] first chunk of every sequence

    @staticmethod
    def of(q: Tensor, cu_seqlens: Tensor | None) -> ChunkTable:
        """Return the table of a batch with queries q [B, T, H, K]."""
        chunks, tokens = chunk_count(q, cu_seqlens), q.shape[1]
        if cu_seqlens is None:
            return ChunkTable(chunks, tokens)
        if cu_seqlens.device.type == "cpu":  # Triton's interpreter has no device-side assertions
            offsets_of(cu_seqlens, tokens)
        cu_seqlens, sequences = cu_seqlens.contiguous(), sequence_count(q, cu_seqlens)
        sequence_of, first = (torch.empty(size, dtype=torch.int32, device=q.device) for size in (chunks, sequences))
        chunk_table[(max(1, -(-chunks // TABLE_CHUNKS)),)](
            *(cu_seqlens, sequence_of, first, tokens, sequences, chunks),
            **{"C": CHUNK, "BN": TABLE_SEQUENCES, "BC": TABLE_CHUNKS, "sanitize_overflow": False},
            **FUSED,
        )
        return ChunkTable(chunks, tokens, cu_seqlens, sequence_of, first)

    @property
    def by_chunk(self) -> tuple[Any, ...]:
        """The arguments by which a kernel finds the tokens of a chunk (`tiles.chunk_place`)."""
        return self.tokens, self.offsets, self.sequence_of, self.first


class Segments(NamedTuple):
    """Into how many segments of how many chunks every sequence is cut. This depends on shapes alone."""

    each: int
    chunks: int
    lanes: int  # sequences × segments × heads

    @staticmethod
    def of(q: Tensor, cu_seqlens: Tensor | None) -> Segments:
        """Return one segment for each sequence, or more where sequences are few and long."""
        (_, tokens, heads, K), each = q.shape, 1
        chunks, lanes = -(-tokens // CHUNK), sequence_count(q, cu_seqlens) * heads
        if cu_seqlens is None and K <= 128 and 0 < lanes * 4 <= SLOTS:
            each = max(1, min(SLOTS // lanes, chunks // SHORTEST_SEGMENT))
        length = max(1, -(-chunks // each))
        each = max(1, -(-chunks // length))  # so that no segment is empty
        return Segments(each, length, lanes * each)


@on_its_device
def forward(x: Arguments, save: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return outputs [B, T, H, V], the final state [N, H, K, V], and, if `save`, what the backward starts from."""
    _, _, _, _, g, initial_state, cu_seqlens, scale = x
    q, k, a, u = (y.contiguous() for y in x[:4])
    g = None if g is None else g.contiguous()
    initial_state = None if initial_state is None else initial_state.contiguous()
    shapes, table = Shapes.of(q, u, g, cu_seqlens), ChunkTable.of(q, cu_seqlens)
    terms, lowest = terms_like(q, table.chunks)
    if table.chunks:
        arguments = (q, k, a, g, *terms, lowest, *table.by_chunk, scale)
        _each_blocking(chunk_terms, table.chunks * shapes.H, arguments, shapes)

    segments = Segments.of(q, cu_seqlens)
    o, kept, maps = torch.empty_like(u), kept_like(q, u, table.chunks if save else 0), q.new_empty(0)
    if segments.each > 1:
        maps, initial_state = _segment_starts(terms, u, initial_state, shapes, table, segments)
    final_state = _states_like(q, u, segments)
    chunk_states[(segments.lanes * _tiles("chunk_states", shapes, segments),)](
        *(*terms, u, initial_state, o, final_state, None, *kept),
        *(table.tokens, segments.each, segments.chunks, table.offsets, table.first),
        **constants("chunk_states", shapes, segments.lanes),
        HAS_STATE=initial_state is not None,
        MAPS=0,
        SAVE=save,
    )
    if segments.each > 1:
        final_state = final_state[segments.each - 1 :: segments.each].contiguous()
    return o, final_state, [*terms, lowest, *kept, maps] if save else []


def _segment_starts(
    terms: list[Tensor],
    u: Tensor,
    initial_state: Tensor | None,
    shapes: Shapes,
    table: ChunkTable,
    segments: Segments,
) -> tuple[Tensor, Tensor]:
    """Return M and Mᵀ of every segment's map S → M S + N, and the state that every segment starts from."""
    N = _states_like(terms[0], u, segments)
    maps = N.new_empty(*N.shape[:2], 2, shapes.K, shapes.K)
    M_starts = product_tile(shapes.V)
    tiles = (M_starts + product_tile(shapes.K)) // shapes.setting("segment_maps").BV
    chunk_states[(segments.lanes * tiles,)](
        *(*terms, u, None, None, N, maps, None, None),
        *(table.tokens, segments.each, segments.chunks, None, None),
        **constants("segment_maps", shapes),
        HAS_STATE=False,
        MAPS=M_starts,
        SAVE=False,
    )
    return maps, _compose(maps, N, initial_state, shapes, segments, reverse=False)


def _compose(
    maps: Tensor, N: Tensor, state: Tensor | None, shapes: Shapes, segments: Segments, reverse: bool
) -> Tensor:
    """Return the state that every segment starts from, like N; in reverse, the gradient of the state that it ends
    with."""
    starts = torch.empty_like(N)
    segment_starts[(segments.lanes // segments.each * _tiles("segment_starts", shapes, segments),)](
        *(maps, N, state, starts, segments.each),
        **constants("segment_starts", shapes),
        HAS_STATE=state is not None,
        REVERSE=reverse,
    )
    return starts


@on_its_device
def backward(do: Tensor, dstate: Tensor | None, x: Arguments, saved: list[Tensor]) -> Gradients:
    """Return the six gradients that `chunkwise.backward` returns.

    Args:
        do, dstate, x: as in `chunkwise.backward`.
        saved: what `forward` saved.
    """
    q, k, a, u, g, _, cu_seqlens, scale = x
    *terms, lowest, starts, R, maps = saved
    shapes, table, segments = Shapes.of(q, u, g, cu_seqlens), ChunkTable.of(q, cu_seqlens), Segments.of(q, cu_seqlens)
    do, dstate = do.contiguous(), None if dstate is None else dstate.contiguous()
    du, d_ends, d_initial = torch.empty_like(do), torch.empty_like(starts), _states_like(q, u, segments)

    def state_pass(d_final: Tensor | None, du: Tensor | None) -> None:
        state_gradients[(segments.lanes * _tiles("state_gradients", shapes, segments),)](
            *(*terms, do, d_final, du, d_initial, d_ends),
            *(table.tokens, segments.each, segments.chunks, table.offsets, table.first),
            **constants("state_gradients", shapes, segments.lanes),
            HAS_STATE=d_final is not None,
            OUTPUT=du is not None,
        )

    if segments.each > 1:
        state_pass(None, None)
        dstate = _compose(maps, d_initial, dstate, shapes, segments, reverse=True)
    state_pass(dstate, du)
    if segments.each > 1:
        d_initial = d_initial[:: segments.each].contiguous()

    q, k, a = (y.contiguous() for y in (q, k, a))
    g = None if g is None else g.contiguous()
    dP, dA = torch.empty_like(terms[-1]), torch.empty_like(terms[-1])
    if table.chunks:
        pair_gradients[(table.chunks * shapes.H,)](
            do, du, R, dP, dA, *table.by_chunk, **constants("pair_gradients", shapes)
        )
    dq, dk, da = (torch.empty_like(y) for y in (q, k, a))
    tiles = -(-shapes.K // shapes.setting("chunk_gradients").BK)
    dg = _decay_gradient(q, g, tiles)
    if table.chunks:
        tensors = (q, k, a, g, lowest, do, du, R, starts, d_ends, dP, dA, dq, dk, da, dg)
        arguments = (*tensors, q.shape[0] * q.shape[1], *table.by_chunk, scale)
        _each_blocking(chunk_gradients, table.chunks * shapes.H, arguments, shapes)
    if g is not None and shapes.G_WIDTH == 1 and shapes.K != 1:
        dg = dg.sum(0).unsqueeze(-1)
    return dq, dk, da, du, dg if g is None else dg.to(g.dtype), d_initial


@on_its_device
def step(
    q: Tensor, k: Tensor, a: Tensor, u: Tensor, g: Tensor | None, state: Tensor, scale: float, new_state: Tensor
) -> Tensor:
    """Return o [B, H, V] of one token, and write the state after it.

    Args:
        q, k, a, u, g, scale: as in `reference.step`.
        state: [B, H, K, V], contiguous.
        new_state: where the new state is written, like `state`; it may be `state` itself.
    """
    q, k, a, u = (x.contiguous() for x in (q, k, a, u))
    g = None if g is None else g.contiguous()
    lanes, (K, V) = q.shape[0] * q.shape[1], state.shape[2:]
    setting = config("decode_step", q.element_size(), K, V, 0, architecture(q.device))
    o = torch.empty_like(u)
    if lanes:
        decode_step[(lanes * -(-V // setting.BV),)](
            *(q, k, a, u, g, state, o, new_state, scale),
            **{"K": K, "V": V, "G_WIDTH": 0 if g is None else g.shape[-1], "BK": setting.BK, "BV": setting.BV},
            **FUSED | {"num_warps": setting.num_warps, "num_stages": setting.num_stages},
        )
    return o


def saved_like(q: Tensor, u: Tensor, cu_seqlens: Tensor | None) -> list[Tensor]:
    """Return uninitialised memory for what the backward starts from: the chunks' terms, their start states and R, and
    the maps of segments where sequences are cut.

    Args:
        q, u, cu_seqlens: as in `chunkwise.saved_like`.
    """
    chunks, segments = chunk_count(q, cu_seqlens), Segments.of(q, cu_seqlens)
    K = q.shape[-1]
    shape = (segments.lanes // q.shape[2], q.shape[2], 2, K, K) if segments.each > 1 else (0,)
    maps = q.new_empty(shape, dtype=torch.float32 if segments.each > 1 else q.dtype)
    terms, lowest = terms_like(q, chunks)
    return [*terms, lowest, *kept_like(q, u, chunks), maps]


def terms_like(q: Tensor, chunks: int) -> tuple[list[Tensor], Tensor]:
    """Return uninitialised memory for what `chunk_terms` writes: the terms that the states are computed from, and the
    most that a channel of each chunk decays, which decides how the chunk is cut."""
    H, K = q.shape[2:]
    rows = [q.new_empty(chunks, H, CHUNK, K) for _ in range(3)]
    gamma = q.new_empty(chunks, H, K, dtype=torch.float32)
    terms = [*rows, gamma, *(q.new_empty(chunks, H, CHUNK, CHUNK) for _ in range(2))]
    return terms, q.new_empty(chunks, H, dtype=torch.float32)


def kept_like(q: Tensor, u: Tensor, chunks: int) -> tuple[Tensor, Tensor]:
    """Return uninitialised memory for every chunk's S₀ᵀ [chunks, H, V, K] and Rᵀ [chunks, H, V, C].

    Args:
        q: queries [B, T, H, K].
        u: write vectors [B, T, H, V].
        chunks: how many chunks there are.
    """
    (H, K), V = q.shape[2:], u.shape[-1]
    return q.new_empty(chunks, H, V, K), q.new_empty(chunks, H, V, CHUNK)


def _states_like(q: Tensor, u: Tensor, segments: Segments) -> Tensor:
    H, V = u.shape[2:]
    return q.new_empty(segments.lanes // H, H, q.shape[-1], V, dtype=torch.float32)


def _decay_gradient(q: Tensor, g: Tensor | None, tiles: int) -> Tensor:
    if g is None:
        return q.new_empty(0)
    if g.shape[-1] == q.shape[-1]:
        return torch.empty_like(g)
    return q.new_empty(tiles, *q.shape[:3], dtype=torch.float32)


def _tiles(kernel: str, shapes: Shapes, segments: Segments) -> int:
    return -(-shapes.V // shapes.setting(kernel, segments.lanes).BV)
