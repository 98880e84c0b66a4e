"""Launches the kernels for one token through a block. They are few, because launching a kernel takes as long as most of
them run.

    one sequence: RMSNorm, in_proj, convolution │ gates, step, output gate │ norm, o_proj, + │
                  RMSNorm, gate_up_proj, SwiGLU │ down_proj, +
    several:      RMSNorm │ in_proj │ convolution, gates │ step │ norm, output gate │ o_proj, + │
                  RMSNorm │ gate_up_proj │ SwiGLU │ down_proj, +

The states are written in place. A state's columns are spread over programs, so none of them knows the mean square of a
head's outputs: for one sequence the mixer leaves sums of squares, and the product with o_proj divides. The matrices of
several sequences are multiplied by torch, and so are those of one that are too wide for a program. The layers define
in torch what all this computes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ...rules import Rule
from ..launching import FUSED, Prepared, early, on_its_device, power_of_two
from ..prologue.launch import rule_constants
from ..rows.launch import ACTIVATIONS, rms_norm, silu_product

if TYPE_CHECKING:
    from ...layers import Mixer, RMSNorm

MOST = 512  # sequences: for more, blocks are compiled by torch
# One sequence
NUMBERS = 8192  # how many numbers of a matrix a program of `vector_kernel` has
ALONE_COLUMNS, ALONE_WARPS = 32, 8  # of a state in a program of `mixer_kernel`, and its warps
# Several sequences
COLUMNS, STEP_WARPS = 32, 2  # of a state in a program of `step_kernel`, and its warps
OPERANDS_ROWS, OPERANDS_WARPS = 16, 8  # sequences of a program of `operands_kernel` (16 or more), and its warps
BLOCK = 8192  # logits that a program of `likeliest_kernel` looks at together


class Parts(NamedTuple):
    """The outputs of a mixer's heads [B, H·V] before the norm's division, and sums of their squares [B, H, slices]."""

    y: Tensor
    squares: Tensor
    width: int  # channels of a head
    eps: float


def block_step(block: Any, x: Tensor, conv: Tensor, recurrent: Tensor) -> Tensor:
    """Return the residual stream [B, hidden] after the block. Both states are written over.

    Args:
        block: a block whose parts are all the package's own.
        x: the residual stream before the block, which may be written over.
        conv: the convolution's state [B, W − 1, ·].
        recurrent: the recurrent state [B, H, K, V].
    """
    mixer, mlp = block.mixer, block.mlp
    if is_alone(mixer, x.shape[0]):
        projected = times_vector(x, mixer.in_proj.weight, block.mixer_norm, convolved=(mixer.conv.weight, conv))
        x = times_vector(mix_alone(projected, mixer, recurrent), mixer.o_proj.weight, residual=x)
    else:
        projected = normed_projection(mixer.in_proj, x, block.mixer_norm)
        x = _added(mixer.o_proj, mix(projected, mixer, conv, recurrent), x)
    if _fits(mlp.gate_up_proj.weight, x):
        y = times_vector(x, mlp.gate_up_proj.weight, block.mlp_norm, swiglu=True)
    else:
        y = silu_product(normed_projection(mlp.gate_up_proj, x, block.mlp_norm))
    if _fits(mlp.down_proj.weight, y):
        return times_vector(y, mlp.down_proj.weight, residual=x)
    return _added(mlp.down_proj, y, x)


def is_alone(mixer: Mixer, batch: int) -> bool:
    """Return whether a mixer's token is one of a single sequence, with matrices that programs can have rows of."""
    return batch == 1 and max(mixer.in_proj.weight.shape[1], mixer.o_proj.weight.shape[1]) <= NUMBERS


def shared_memory_of(mixer: Mixer) -> int:
    """Return how many KiB of shared memory a program of `operands_kernel` takes to multiply with a matrix in float32:
    both of its operands lie there. In 16 bits most of them are in registers."""
    widths = ((mixer.f_proj, mixer.head_dim), (mixer.g_proj, mixer.value_head_dim))
    wide = [(x.in_features, width) for x, width in widths if x is not None and x.weight.dtype == torch.float32]
    tiles = [(max(16, power_of_two(rank)), max(16, power_of_two(width))) for rank, width in wide]
    return max((4 * rank * (width + OPERANDS_ROWS) // 1024 for rank, width in tiles), default=0)


def normed_projection(linear: nn.Linear, x: Tensor, norm: RMSNorm, out: Tensor | None = None) -> Tensor:
    """Return linear(norm(x)), with one kernel if there is one sequence.

    Args:
        linear: a plain matrix without a bias.
        x: [B, ·].
        norm: the norm before it.
        out: where the result is written, contiguous; None for new memory.
    """
    if _fits(linear.weight, x):
        return times_vector(x, linear.weight, norm, out=out)
    y = linear(norm(x))
    return y if out is None else out.copy_(y)


def _added(linear: nn.Linear, y: Any, x: Tensor) -> Tensor:
    """Return x + linear(y) by torch, which may be written over x."""
    same = x.dtype == y.dtype == linear.weight.dtype
    return x.addmm_(y, linear.weight.t()) if same else x + linear(y)


def _fits(weight: Tensor, x: Tensor) -> bool:
    """Whether there is one sequence, and a program can have whole rows of the matrix."""
    return x.shape[0] == 1 and weight.shape[1] <= NUMBERS


@lru_cache
def _vector(
    N: int, M: int, eps: float, heads: tuple[int, int], window: tuple[int, int], device: torch.device, **parts: bool
) -> Prepared:
    """Return `vector_kernel` for matrices [N, M], with these heads' width and slices (0, 0 without a norm of heads),
    channels and taps of a convolution (0, 1 without one), and parts."""
    from .kernels import vector_kernel

    BM = power_of_two(M)
    sizes = {"N": N, "M": M, "BN": max(1, NUMBERS // BM // (1 + parts["SWIGLU"])), "BM": BM}
    sizes |= {"V": heads[0], "SLICES": heads[1], "D": window[0], "W": window[1], "BW": power_of_two(window[1])}
    return Prepared(vector_kernel, **sizes, EPS=eps, **parts, **FUSED, **early(device), num_warps=4)


@on_its_device
def times_vector(
    x: Tensor | Parts,
    weight: Tensor,
    norm: RMSNorm | None = None,
    *,
    residual: Tensor | None = None,
    swiglu: bool = False,
    convolved: tuple[Tensor, Tensor] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return W x for one sequence, with what `vector_kernel` computes before and after the product.

    Args:
        x: [1, M], or the outputs of heads, which are normed.
        weight: [N, M]; with `swiglu`, W_gate above W_up.
        norm: a norm of x before the product, or None.
        residual: [1, N] to add to the result, or None.
        swiglu: whether to return silu(W_gate x) ⊙ W_up x.
        convolved: taps and state of a convolution of the first outputs, or None; then the result is in float32.
        out: where the result is written; None for new memory.
    """
    given, squares, heads, eps = _taken_apart(x, norm)
    N, M = weight.shape[0] // (1 + swiglu), weight.shape[1]
    taps, conv = (None, None) if convolved is None else convolved
    window = (0, 1) if taps is None else tuple(taps.shape)
    dtype = torch.float32 if taps is not None else given.dtype if residual is None else residual.dtype
    y = torch.empty(1, N, dtype=dtype, device=given.device) if out is None else out
    parts = {"NORM": norm is not None, "SWIGLU": swiglu, "RESIDUAL": residual is not None}
    kernel = _vector(N, M, eps, heads, window, given.device, **parts)
    grid = (-(-N // kernel.constants["BN"]),)
    kernel(grid, given, None if norm is None else norm.weight, weight, residual, squares, taps, conv, y)
    return y


def _taken_apart(x: Tensor | Parts, norm: RMSNorm | None) -> tuple[Tensor, Tensor | None, tuple[int, int], float]:
    """Return x itself, sums of squares, a head's width and how many sums it has, and eps of the norm."""
    if isinstance(x, Parts):
        return x.y, x.squares, (x.width, x.squares.shape[-1]), x.eps
    return x, None, (0, 0), 0.0 if norm is None else norm.eps


class Layout(NamedTuple):
    """What the kernels of a mixer are compiled for."""

    row: Rule
    widths: tuple[tuple[str, int], ...]  # of the parts of `in_proj`
    sizes: tuple[int, int, int, int]  # H, K, V and taps
    ranks: tuple[int, int]  # of the projections of f and of the output gate
    activation: str | None  # of the gated norm
    device: torch.device

    @staticmethod
    def of(mixer: Mixer, device: torch.device) -> Layout:
        """Return the layout of a mixer on a device."""
        f, g = mixer.f_proj, mixer.g_proj
        ranks = (0 if f is None else f.in_features, 0 if g is None else g.in_features)
        sizes = (mixer.num_heads, mixer.head_dim, mixer.value_head_dim, mixer.conv.weight.shape[1])
        activation = getattr(mixer.o_norm, "activation", None)
        return Layout(mixer.row, tuple(mixer.parts.items()), sizes, ranks, activation, device)

    def constants(self, columns: int, least: int = 1) -> dict[str, Any]:
        """Return the constants of kernels that know the rule, whose tiles are at least `least` wide.

        Args:
            columns: of a state in a program.
            least: the narrowest tile.
        """
        H, K, V, _ = self.sizes
        at, before = {}, 0
        for name, width in self.widths:
            at[name], before = before, before + width
        return {
            **{f"AT_{name.upper()}": at[name] for name in "bwf"},
            **{"AT_G": at["output_gate"], "H": H, "K": K, "V": V, "ACTIVATION": ACTIVATIONS[self.activation]},
            **rule_constants(self.row),
            **{f"{name}_RANK": rank for name, rank in zip("FG", self.ranks, strict=True)},
            **{"BK": max(least, power_of_two(K)), "BV": max(least, min(columns, power_of_two(V)))},
            **{f"B{name}": max(least, power_of_two(rank)) for name, rank in zip("FG", self.ranks, strict=True)},
        }

    def slices(self, columns: int) -> int:
        """Return into how many parts the columns of a state are cut."""
        V = self.sizes[2]
        return -(-V // min(columns, power_of_two(V)))


def _parameters(mixer: Mixer) -> tuple[Tensor | None, ...]:
    """Return the parameters of a mixer that its kernels take, from the projection of f to the norm's weight."""
    f, g, decays = mixer.f_proj, mixer.g_proj, mixer.row.decay != "none"
    return (
        *(None if f is None else f.weight, mixer.A_log if decays else None, mixer.dt_bias if decays else None),
        *(mixer.theta if mixer.row.strength else None,),
        *(mixer.random_direction if mixer.row.direction == "head" else None,),
        *((None, None) if g is None else (g.weight, g.bias)),
        mixer.o_norm.weight,
    )


def _warps(numbers: int, most: int) -> int:
    """Return how many warps a program has for a part of the state with so many numbers. No number may be in two warps:
    the state is written over, and one of them could write it before the other has read it."""
    return max(1, min(most, numbers // 32))


@lru_cache
def _mixer(layout: Layout) -> Prepared:
    """Return `mixer_kernel`, for one sequence."""
    from .kernels import mixer_kernel

    constants = layout.constants(ALONE_COLUMNS) | {"SLICES": layout.slices(ALONE_COLUMNS)}
    warps = _warps(constants["BK"] * constants["BV"], ALONE_WARPS)
    return Prepared(mixer_kernel, **constants, **FUSED, **early(layout.device), num_warps=warps)


@on_its_device
def mix_alone(x: Tensor, mixer: Mixer, recurrent: Tensor) -> Parts:
    """Return what `o_proj` is multiplied with, for one sequence. The recurrent state is written over.

    Args:
        x: output of `in_proj` [1, ·] in float32, q, k and v convolved.
        mixer: the layer with the parameters and the rule.
        recurrent: the recurrent state [1, H, K, V].
    """
    kernel, (H, V) = _mixer(Layout.of(mixer, x.device)), (mixer.num_heads, mixer.value_head_dim)
    slices = kernel.constants["SLICES"]
    y = torch.empty(1, H * V + H * slices, dtype=torch.float32, device=x.device)
    y, squares = y[:, : H * V], y[:, H * V :].view(1, H, slices)
    scales = (mixer.read_scale, mixer.strength_scale * mixer.lambda_max)
    kernel((H * slices,), x, recurrent, *_parameters(mixer), y, squares, *scales)
    return Parts(y, squares, V, mixer.o_norm.eps)


@lru_cache
def _operands(layout: Layout) -> Prepared:
    from .batch import operands_kernel

    constants = layout.constants(layout.sizes[2] * 2, 16)
    parts = 2 + (layout.row.decay == "channel") + (layout.ranks[1] > 0)
    constants |= {"W": layout.sizes[3], "BT": OPERANDS_ROWS, "PARTS": parts, "PRECISION": "ieee"}
    return Prepared(operands_kernel, **constants, **FUSED, **early(layout.device), num_warps=OPERANDS_WARPS)


@lru_cache
def _step(K: int, V: int, decays: bool, device: torch.device) -> Prepared:
    from .batch import step_kernel

    BV = min(COLUMNS, power_of_two(V))
    sizes = {"K": K, "V": V, "BK": power_of_two(K), "BV": BV, "SLICES": -(-V // BV)}
    warps = _warps(sizes["BK"] * BV, STEP_WARPS)
    return Prepared(step_kernel, **sizes, DECAY=int(decays), **FUSED, **early(device), num_warps=warps)


@on_its_device
def mix(x: Tensor, mixer: Mixer, conv: Tensor, recurrent: Tensor) -> Tensor:
    """Return what `o_proj` is multiplied with, [B, H·V], from the output of `in_proj`. Both states are written over.

    Args:
        x: output of `in_proj`, [B, ·].
        mixer: the layer with the parameters and the rule.
        conv: the convolution's state [B, W − 1, ·].
        recurrent: the recurrent state [B, H, K, V].
    """
    batch, H, K, V = x.shape[0], mixer.num_heads, mixer.head_dim, mixer.value_head_dim
    prepare = _operands(Layout.of(mixer, x.device))
    operands = torch.empty(batch, H, 4 * K + 2 * V, dtype=torch.float32, device=x.device)
    grid = (prepare.constants["PARTS"] * H * -(-batch // prepare.constants["BT"]),)
    given = (x, conv, mixer.conv.weight, *_parameters(mixer)[:-1], operands)
    prepare(grid, *given, x.stride(0), batch, mixer.strength_scale * mixer.lambda_max)
    move = _step(K, V, mixer.row.decay != "none", x.device)
    y = torch.empty(batch, H, V, dtype=x.dtype, device=x.device)
    move((batch * H * move.constants["SLICES"],), operands, recurrent, y, mixer.read_scale)
    activation = getattr(mixer.o_norm, "activation", None)
    gate = None if activation is None else operands[..., 4 * K + V :]
    return rms_norm(y, mixer.o_norm.weight, mixer.o_norm.eps, gate, activation).flatten(1)


@lru_cache
def _likeliest(N: int, device: torch.device) -> Prepared:
    from .kernels import likeliest_kernel

    return Prepared(likeliest_kernel, N=N, BLOCK=min(BLOCK, power_of_two(N)), **FUSED, **early(device), num_warps=16)


@on_its_device
def write_likeliest(logits: Tensor, tokens: Tensor) -> None:
    """Write the index of the largest number of every row of logits [B, ·] into tokens [B, 1].

    Args:
        logits: contiguous.
        tokens: contiguous, int64.
    """
    _likeliest(logits.shape[1], logits.device)((logits.shape[0],), logits, tokens)
