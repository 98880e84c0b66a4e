"""Launches the kernels for one token through a block. They are few, because launching a kernel takes as long as most of
them run.

    RMSNorm, in_proj │ the mixer up to its gated norm, states in place │ o_proj, + │ RMSNorm, SwiGLU │ down_proj, +

For one sequence these are five kernels. For more sequences the matrices are multiplied with more than one vector. Then
torch computes these products, and norms and SwiGLU's product are kernels of their own. The layers define in torch what
all this computes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...rules import Rule
from ..launching import FUSED, Prepared, early, on_its_device, power_of_two
from ..prologue.launch import rule_constants
from ..rows.launch import ACTIVATIONS

if TYPE_CHECKING:
    from ...layers import Mixer, RMSNorm

NUMBERS = 8192  # how many numbers of a matrix a program of `vector_kernel` has
LARGEST = 2**15  # numbers of a head's state: more do not fit into a program's registers
MOST = 128  # sequences: for more it is faster to spread a state's columns over programs, as `erase_write_step` does


def block_step(block: Any, x: Tensor, conv: Tensor, recurrent: Tensor) -> Tensor:
    """Return the residual stream [B, hidden] after the block. Both states are written over.

    Args:
        block: a block whose parts are all the package's own.
        x: the residual stream before the block, which may be written over.
        conv: the convolution's state [B, W − 1, ·].
        recurrent: the recurrent state [B, H, K, V].
    """
    mixer, mlp = block.mixer, block.mlp
    y = mix(normed_projection(mixer.in_proj, x, block.mixer_norm), mixer, conv, recurrent)
    x = _added_projection(mixer.o_proj, y, x)
    if not _in_one_kernel(mlp.gate_up_proj, x):
        return mlp(block.mlp_norm(x), residual=x)
    y = times_vector(x, mlp.gate_up_proj.weight, block.mlp_norm, None, swiglu=True)
    return _added_projection(mlp.down_proj, y, x)


def normed_projection(linear: nn.Linear, x: Tensor, norm: RMSNorm) -> Tensor:
    """Return linear(norm(x)), with one kernel if there is one sequence.

    Args:
        linear: a plain matrix without a bias.
        x: [B, ·].
        norm: the norm before it.
    """
    if _in_one_kernel(linear, x):
        return times_vector(x, linear.weight, norm, None, swiglu=False)
    return linear(norm(x))


def _added_projection(linear: nn.Linear, y: Tensor, x: Tensor) -> Tensor:
    """Return x + linear(y), which may be written over x."""
    if _in_one_kernel(linear, y):
        return times_vector(y, linear.weight, None, x, swiglu=False)
    same = x.dtype == y.dtype == linear.weight.dtype
    return x.addmm_(y, linear.weight.t()) if same else x + linear(y)


def _in_one_kernel(linear: nn.Linear, x: Tensor) -> bool:
    return x.shape[0] == 1 and linear.weight.shape[1] <= NUMBERS


@lru_cache
def _vector(N: int, M: int, eps: float | None, swiglu: bool, residual: bool, device: torch.device) -> Prepared:
    """Return `vector_kernel` for matrices [N, M]; there is a norm before the product unless `eps` is None."""
    from .kernels import vector_kernel

    BM = power_of_two(M)
    sizes = {"N": N, "M": M, "BN": max(1, NUMBERS // BM // (1 + swiglu)), "BM": BM}
    parts = {"NORM": eps is not None, "EPS": eps or 0.0, "SWIGLU": swiglu, "RESIDUAL": residual}
    return Prepared(vector_kernel, **sizes, **parts, **FUSED, **early(device), num_warps=4)


@on_its_device
def times_vector(x: Tensor, weight: Tensor, norm: RMSNorm | None, residual: Tensor | None, *, swiglu: bool) -> Tensor:
    """Return W x for one sequence, with a norm, a residual or SwiGLU as `vector_kernel` computes them.

    Args:
        x: [1, M].
        weight: [N, M]; with `swiglu`, W_gate above W_up.
        norm: a norm of x before the product, or None.
        residual: [1, N] to add to the result, or None.
        swiglu: whether to return silu(W_gate x) ⊙ W_up x.
    """
    N, M = weight.shape[0] // (1 + swiglu), weight.shape[1]
    y = x.new_empty(1, N)
    kernel = _vector(N, M, None if norm is None else norm.eps, swiglu, residual is not None, x.device)
    grid = (-(-N // kernel.constants["BN"]),)
    kernel(grid, x, None if norm is None else norm.weight, weight, residual, y)
    return y


@lru_cache
def _mixer(
    row: Rule,
    widths: tuple[tuple[str, int], ...],
    sizes: tuple[int, int, int, int],
    ranks: tuple[int, int],
    activation: str | None,
    eps: float,
    alone: bool,
    device: torch.device,
) -> Prepared:
    """Return `mixer_kernel` for layers with this rule, these widths of the parts of `in_proj`, sizes H, K, V and W,
    ranks of the projections of f and of the output gate, and gated norm, and for one sequence `alone` or more."""
    from .kernels import mixer_kernel

    _, K, V, W = sizes
    columns, before = {}, 0
    for name, width in widths:
        columns[name], before = before, before + width
    warps, options = 16 if K * V > LARGEST // 2 else 8, early(device)
    if options["EARLY"] and not alone and warps == 8:
        options = options | {"maxnreg": 128}  # so that two programs fit on a multiprocessor
    return Prepared(
        mixer_kernel,
        **{f"AT_{name.upper()}": columns[name] for name in "bwf"},
        AT_G=columns["output_gate"],
        **dict(zip("HKVW", sizes, strict=True)),
        **rule_constants(row),
        **{f"{name}_RANK": rank for name, rank in zip("FG", ranks, strict=True)},
        **{"ACTIVATION": ACTIVATIONS[activation], "EPS": eps},
        **{"BK": power_of_two(K), "BV": power_of_two(V), "BW": power_of_two(W)},
        **{f"B{name}": power_of_two(rank) for name, rank in zip("FG", ranks, strict=True)},
        AHEAD=alone,
        **FUSED,
        **options,
        num_warps=warps,
    )


@on_its_device
def mix(x: Tensor, mixer: Mixer, conv: Tensor, recurrent: Tensor) -> Tensor:
    """Return the input of `o_proj`, [B, H·V], from the output of `in_proj`. Both states are written over.

    Args:
        x: output of `in_proj`, [B, ·].
        mixer: the layer with the parameters and the rule.
        conv: the convolution's state [B, W − 1, ·].
        recurrent: the recurrent state [B, H, K, V].
    """
    row, H, K, V = mixer.row, mixer.num_heads, mixer.head_dim, mixer.value_head_dim
    f, g, norm, decays = mixer.f_proj, mixer.g_proj, mixer.o_norm, mixer.row.decay != "none"
    ranks = (0 if f is None else f.in_features, 0 if g is None else g.in_features)
    sizes, widths = (H, K, V, mixer.conv.weight.shape[1]), tuple(mixer.parts.items())
    activation, alone = getattr(norm, "activation", None), x.shape[0] == 1
    kernel = _mixer(row, widths, sizes, ranks, activation, norm.eps, alone, x.device)
    y = x.new_empty(x.shape[0], H * V)
    kernel(
        (x.shape[0] * H,),
        *(x, conv, recurrent, mixer.conv.weight, None if f is None else f.weight),
        *(mixer.A_log if decays else None, mixer.dt_bias if decays else None),
        *(mixer.theta if row.strength else None, mixer.random_direction if row.direction == "head" else None),
        *((None, None) if g is None else (g.weight, g.bias)),
        *(norm.weight, y, x.stride(0), mixer.read_scale, mixer.strength_scale * mixer.lambda_max),
    )
    return y
