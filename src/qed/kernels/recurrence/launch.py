"""Launches the kernels of the op's forward, backward and step: their grids, constants and settings.

A large GPU is done with the first kernel after half a millisecond, so the time that Python takes before a launch
counts. Kernels with their constants are therefore kept by the shapes that they are for.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ...ops.arguments import Arguments
from ...ops.chunkwise import Gradients
from ...ops.packing import sequence_count
from ...ops.validation import offsets_of
from ..launching import FUSED, Prepared, compile_together, on_its_device
from .backward import chunk_gradients, pair_gradients, state_gradients
from .forward import chunk_states, chunk_terms, segment_starts
from .memory import (
    Layout,
    Parts,
    Segments,
    chunk_count,
    decay_gradient_like,
    scratch_like,
    states_like,
)
from .settings import CHUNK, Config, architecture, config, kept_by_settings, multiprocessors, product_tile
from .step import decode_step
from .table import chunk_table

TABLE_CHUNKS, TABLE_SEQUENCES = 32, 128  # how many of each a program of `chunk_table` looks at together


class Shapes(NamedTuple):
    """What the kernels are compiled for."""

    dtype: torch.dtype
    architecture: int
    multiprocessors: int
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
        width, gpu = 0 if g is None else g.shape[-1], (architecture(q.device), multiprocessors(q.device))
        H, K = q.shape[2:]
        return Shapes(q.dtype, *gpu, H, K, u.shape[3], width, cu_seqlens is not None)

    @property
    def sub(self) -> int:
        """How many tokens a sub-block has in chunks that are cut; see `tiles.py`."""
        return 4 if self.dtype == torch.float32 else 8

    def setting(self, kernel: str, lanes: int = 0) -> Config:
        """Return the launch setting of a kernel for these shapes and so many states."""
        sizes = self.dtype.itemsize, self.K, self.V
        return config(kernel, *sizes, lanes, self.architecture, self.multiprocessors)

    def tiles(self, kernel: str, lanes: int = 0) -> int:
        """Return how many programs share the values of a head."""
        return -(-self.V // self.setting(kernel, lanes).BV)

    @kept_by_settings
    def rounds(self, kernel: str, lanes: int) -> list[tuple[int, int]]:
        """Return the launches of a kernel that carries states, as the first lane of each and how many it has. If all
        multiprocessors have had equally many lanes and few are left, these get a launch of their own, with narrower
        programs that fill the GPU better. This was measured where a program has a whole state of 128 channels, of
        which a multiprocessor holds one at a time. Packed sequences end at different times, so they are not parted."""
        left = lanes % self.multiprocessors
        whole, narrow = (self.setting(kernel, x) for x in (lanes, left))
        measured = whole.BK == whole.BV == 128 and self.tiles(kernel, lanes) == 1
        if self.PACKED or left in (0, lanes) or not measured or narrow.BV >= whole.BV:
            return [(0, lanes)]
        return [(0, lanes - left), (lanes - left, left)]


KERNELS = {
    "chunk_terms": chunk_terms,
    "chunk_states": chunk_states,
    "segment_maps": chunk_states,
    "segment_starts": segment_starts,
    "state_gradients": state_gradients,
    "pair_gradients": pair_gradients,
    "chunk_gradients": chunk_gradients,
}
# The constants that each kernel takes.
TAKES = {
    "chunk_terms": ("H", "K", "ALL_K", "G_WIDTH", "PACKED", "C", "LOG_C", "BK", "LEAST", "REACH", "CENTRED"),
    "chunk_states": ("H", "K", "V", "PACKED", "C", "BK", "BV"),
    "segment_maps": ("H", "K", "V", "PACKED", "C", "BK", "BV"),
    "segment_starts": ("H", "K", "V", "BK", "BV"),
    "state_gradients": ("H", "K", "V", "PACKED", "C", "BK", "BV"),
    "pair_gradients": ("H", "V", "PACKED", "C", "BV"),
    "chunk_gradients": ("H", "K", "V", "G_WIDTH", "PACKED", "C", "BK", "BV", "LEAST", "REACH", "CENTRED"),
}


@kept_by_settings
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
    return taken | FUSED | setting.options


@kept_by_settings
def prepared(kernel: str, shapes: Shapes, lanes: int = 0, **more: Any) -> Prepared:
    """Return a kernel with its constants.

    Args:
        kernel, shapes, lanes: as in `constants`.
        more: the constants that depend on the call.
    """
    return Prepared(KERNELS[kernel.removesuffix(", cut")], **constants(kernel, shapes, lanes), **more)


@kept_by_settings
def blockings(kernel: str, shapes: Shapes) -> list[Prepared]:
    """Return the launches of a kernel with pairs of tokens: one for chunks that are one block, and with a decay a
    second one for chunks that decay too far, which are cut into parts, or parts of parts."""
    levels = 2 if shapes.dtype == torch.float32 else 1
    ratio = round((CHUNK // shapes.sub) ** (1 / levels))
    whole = prepared(kernel, shapes, SUB=CHUNK, LEVELS=0, RATIO=ratio)
    if not shapes.G_WIDTH:
        return [whole]
    # With a decay per head, dg has one sum for every tile of K, so both launches must have the same tiles.
    cut = kernel if shapes.G_WIDTH == 1 else f"{kernel}, cut"
    return [whole, prepared(cut, shapes, SUB=shapes.sub, LEVELS=levels, RATIO=ratio)]


_COMPILED: set[tuple[str, Shapes]] = set()


def _each_blocking(kernel: str, blocks: int, arguments: tuple[Any, ...], shapes: Shapes) -> None:
    """Launch a kernel with pairs for `blocks` chunks × heads, once for every blocking. Before the first launch all
    blockings are compiled in parallel."""
    ways = blockings(kernel, shapes)
    if (kernel, shapes) not in _COMPILED:
        compile_together(ways, arguments)
        _COMPILED.add((kernel, shapes))
    for way in ways:
        tiles = -(-shapes.K // way.constants["BK"]) if kernel == "chunk_gradients" else 1
        way((blocks * tiles,), *arguments)


_TABLE = Prepared(chunk_table, C=CHUNK, BN=TABLE_SEQUENCES, BC=TABLE_CHUNKS, sanitize_overflow=False, **FUSED)


class ChunkTable(NamedTuple):
    """Where the chunks of all sequences lie. For packed ones the table is made on the device, so that the host does
    not wait for `cu_seqlens`."""

    chunks: int
    tokens: int  # of each sequence, unless packed
    offsets: Tensor | None = None  # [N + 1]
    starts: Tensor | None = None  # [chunks] first token, with chunks past the end of the last sequence among them
    lengths: Tensor | None = None  # [chunks] number of tokens, 0 for those
    first: Tensor | None = None  # [N] first chunk of every sequence
    order: Tensor | None = None  # [N] in which order the sequences are taken

    @staticmethod
    def of(q: Tensor, cu_seqlens: Tensor | None) -> ChunkTable:
        """Return the table of a batch with queries q [B, T, H, K]."""
        chunks, tokens = chunk_count(q, cu_seqlens), q.shape[1]
        if cu_seqlens is None:
            return ChunkTable(chunks, tokens)
        if cu_seqlens.device.type == "cpu":  # Triton's interpreter has no device-side assertions
            offsets_of(cu_seqlens, tokens)
        cu_seqlens, sequences = cu_seqlens.contiguous(), sequence_count(q, cu_seqlens)
        sizes = [-(-x // 4) * 4 for x in (chunks, chunks, sequences, sequences)]  # each begins at 16 bytes
        parts = torch.empty(sum(sizes), dtype=torch.int32, device=q.device).split_with_sizes(sizes)
        programs = max(1, -(-max(chunks, sequences) // TABLE_CHUNKS))
        _TABLE((programs,), cu_seqlens, *parts, tokens, sequences, chunks)
        return ChunkTable(chunks, tokens, cu_seqlens, *parts)

    @property
    def by_chunk(self) -> tuple[Any, ...]:
        """The arguments by which a kernel finds the tokens of a chunk (`tiles.chunk_place`)."""
        return self.tokens, self.starts, self.lengths

    @property
    def by_sequence(self) -> tuple[Any, ...]:
        """The arguments by which a kernel finds its sequence and the sequence's chunks (`tiles.segment_place`)."""
        return self.offsets, self.first, self.order


@on_its_device
def forward(x: Arguments, save: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return outputs [B, T, H, V], the final state [N, H, K, V], and, if `save`, what the backward starts from."""
    _, _, _, _, g, initial_state, cu_seqlens, scale = x
    q, k, a, u = (y.contiguous() for y in x[:4])
    g = None if g is None else g.contiguous()
    shapes, table, segments = Shapes.of(q, u, g, cu_seqlens), ChunkTable.of(q, cu_seqlens), Segments.of(q, cu_seqlens)
    layout = Layout.of(q, u, table.chunks, segments, save)
    memory = layout.empty(q)
    parts = layout.parts(*memory)
    if table.chunks:
        arguments = (q, k, a, g, *parts.terms, parts.lowest, *table.by_chunk, scale)
        _each_blocking("chunk_terms", table.chunks * shapes.H, arguments, shapes)

    initial_state = None if initial_state is None else initial_state.contiguous()
    o, final_state = torch.empty_like(u), states_like(q, u, segments)
    if segments.each > 1:
        N = torch.empty_like(final_state)
        initial_state = _segment_starts(parts, u, N, initial_state, shapes, table, segments)
    for first, lanes in shapes.rounds("chunk_states", segments.lanes):
        given = {"HAS_STATE": initial_state is not None, "MAPS": 0, "SAVE": save}
        prepared("chunk_states", shapes, lanes, **given)(
            (lanes * shapes.tiles("chunk_states", lanes),),
            *(*parts.terms, u, initial_state, o, final_state, None, parts.starts, parts.R),
            *(first, table.tokens, segments.each, segments.chunks, *table.by_sequence),
        )
    if segments.each > 1:
        final_state = final_state[segments.each - 1 :: segments.each].contiguous()
    return o, final_state, memory if save else []


def _segment_starts(
    parts: Parts,
    u: Tensor,
    N: Tensor,
    initial_state: Tensor | None,
    shapes: Shapes,
    table: ChunkTable,
    segments: Segments,
) -> Tensor:
    """Return the state that every segment starts from, after every segment's map S → M S + N is written: M and Mᵀ where
    the parts have them, and N."""
    M_starts = product_tile(shapes.V)
    maps = prepared("segment_maps", shapes, HAS_STATE=False, MAPS=M_starts, SAVE=False)
    tiles = (M_starts + product_tile(shapes.K)) // shapes.setting("segment_maps").BV
    maps(
        (segments.lanes * tiles,),
        *(*parts.terms, u, None, None, N, parts.maps, None, None),
        *(0, table.tokens, segments.each, segments.chunks, None, None, None),
    )
    return _compose(parts, N, initial_state, shapes, segments, reverse=False)


def _compose(
    parts: Parts, N: Tensor, state: Tensor | None, shapes: Shapes, segments: Segments, reverse: bool
) -> Tensor:
    """Return the state that every segment starts from, like N; in reverse, the gradient of the state that it ends
    with."""
    starts = torch.empty_like(N)
    compose = prepared("segment_starts", shapes, HAS_STATE=state is not None, REVERSE=reverse)
    grid = (segments.lanes // segments.each * shapes.tiles("segment_starts"),)
    compose(grid, parts.maps, N, state, starts, segments.each)
    return starts


@on_its_device
def backward(do: Tensor, dstate: Tensor | None, x: Arguments, saved: list[Tensor]) -> Gradients:
    """Return the six gradients that `chunkwise.backward` returns.

    Args:
        do, dstate, x: as in `chunkwise.backward`.
        saved: what `forward` saved.
    """
    q, k, a, u, g, _, cu_seqlens, scale = x
    shapes, table, segments = Shapes.of(q, u, g, cu_seqlens), ChunkTable.of(q, cu_seqlens), Segments.of(q, cu_seqlens)
    parts = Layout.of(q, u, table.chunks, segments, save=True).parts(*saved)
    do, dstate = do.contiguous(), None if dstate is None else dstate.contiguous()
    du, d_initial, (dP, dA, d_ends) = torch.empty_like(do), states_like(q, u, segments), scratch_like(parts)

    def state_pass(d_final: Tensor | None, du: Tensor | None) -> None:
        given = {"HAS_STATE": d_final is not None, "OUTPUT": du is not None}
        for first, lanes in shapes.rounds("state_gradients", segments.lanes):
            prepared("state_gradients", shapes, lanes, **given)(
                (lanes * shapes.tiles("state_gradients", lanes),),
                *(*parts.terms, do, d_final, du, d_initial, d_ends),
                *(first, table.tokens, segments.each, segments.chunks, *table.by_sequence),
            )

    if segments.each > 1:
        state_pass(None, None)
        dstate = _compose(parts, d_initial, dstate, shapes, segments, reverse=True)
    state_pass(dstate, du)
    if segments.each > 1:
        d_initial = d_initial[:: segments.each].contiguous()

    q, k, a = (y.contiguous() for y in (q, k, a))
    g = None if g is None else g.contiguous()
    if table.chunks:
        pair_grid = (table.chunks * shapes.H,)
        prepared("pair_gradients", shapes)(pair_grid, do, du, parts.R, dP, dA, *table.by_chunk)
    dq, dk, da = (torch.empty_like(y) for y in (q, k, a))
    dg = decay_gradient_like(q, g, -(-shapes.K // shapes.setting("chunk_gradients").BK))
    if table.chunks:
        tensors = (q, k, a, g, parts.lowest, do, du, parts.R, parts.starts, d_ends, dP, dA, dq, dk, da, dg)
        arguments = (*tensors, q.shape[0] * q.shape[1], *table.by_chunk, scale)
        _each_blocking("chunk_gradients", table.chunks * shapes.H, arguments, shapes)
    if g is not None and shapes.G_WIDTH == 1 and shapes.K != 1:
        dg = dg.sum(0).unsqueeze(-1)
    return dq, dk, da, du, dg if g is None else dg.to(g.dtype), d_initial


@kept_by_settings
def _step(dtype: torch.dtype, device: torch.device, K: int, V: int, G_WIDTH: int) -> Prepared:
    setting = config("decode_step", dtype.itemsize, K, V, 0, architecture(device))
    sizes = {"K": K, "V": V, "G_WIDTH": G_WIDTH, "BK": setting.BK, "BV": setting.BV}
    return Prepared(decode_step, **sizes, **FUSED, **setting.options)


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
    o = torch.empty_like(u)
    if lanes:
        one_token = _step(q.dtype, q.device, K, V, 0 if g is None else g.shape[-1])
        tiles = -(-V // one_token.constants["BV"])
        one_token((lanes * tiles,), q, k, a, u, g, state, o, new_state, scale)
    return o
