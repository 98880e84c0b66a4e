"""One token through a block, for decoding: few kernels, because starting one takes as long as most of them run.

    RMSNorm, in_proj │ the mixer up to its gated norm, states in place │ o_proj, + │ RMSNorm, SwiGLU │ down_proj, +

For one sequence these are five kernels. For more, matrices meet more than one vector, and their products are the
library's, with norms and SwiGLU's product beside them. The layers' torch functions say what all this is.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..ops.launching import FUSED, early, on_its_device, power_of_two
from . import prologue
from .convolution import ShortConvolution
from .fused import has_kernels
from .linear import Linear, ResidualProjection
from .mixer import Mixer
from .mlp import SwiGLU
from .norm import GatedRMSNorm, RMSNorm

NUMBERS = 8192  # of a matrix, in one program of `vector_kernel`
LARGEST = 2**15  # state of a head: more do not fit a program's registers
MOST = 128  # sequences: for more, the state's columns are better spread over programs, as `erase_write_step` does


def runs(block: Any, batch: int) -> bool:
    """Whether a block is run so: for few sequences, a mixer whose rule its row says, and all parts as made."""
    mixer, mlp = block.mixer, block.mlp
    if batch > MOST or not (_is_ours(mixer, Mixer) and _is_ours(mlp, SwiGLU)):
        return False
    norms = all(_is_ours(x, RMSNorm) for x in (block.mixer_norm, block.mlp_norm))
    norms = norms and any(_is_ours(mixer.o_norm, kind) for kind in (RMSNorm, GatedRMSNorm))
    if not (norms and _is_ours(mixer.conv, ShortConvolution) and has_kernels(block.mlp_norm.weight)):
        return False
    low_rank = [x for x in (mixer.f_proj, mixer.g_proj) if x is not None]
    ours = all(_is(x, Linear) for x in (mixer.in_proj, block.mlp.gate_up_proj, *low_rank))
    ours = ours and all(_is(x, ResidualProjection) for x in (mixer.o_proj, block.mlp.down_proj))
    ranks = [x.in_features for x in low_rank]
    sizes_fit = mixer.head_dim * mixer.value_head_dim <= LARGEST and max(ranks, default=0) <= prologue.WIDEST
    return ours and sizes_fit and prologue.fits(mixer)


def block_step(block: Any, x: Tensor, conv: Tensor, recurrent: Tensor) -> Tensor:
    """x [B, hidden] → the same after the block. Both states are written over."""
    mixer: Mixer = block.mixer
    mlp: SwiGLU = block.mlp
    y = mix(project(mixer.in_proj, x, norm=block.mixer_norm), mixer, conv, recurrent)
    x = project(mixer.o_proj, y, residual=x)
    if not _in_one_kernel(mlp.gate_up_proj, x):
        return mlp(block.mlp_norm(x), residual=x)
    y = times_vector(x, mlp.gate_up_proj.weight, block.mlp_norm, None, swiglu=True)
    return project(mlp.down_proj, y, residual=x)


def project(linear: nn.Linear, x: Tensor, *, norm: RMSNorm | None = None, residual: Tensor | None = None) -> Tensor:
    """linear(x) of x [B, ·] with the norm before it or the residual stream behind it."""
    if _in_one_kernel(linear, x) and (norm is None or _is_ours(norm, RMSNorm)):
        return times_vector(x, linear.weight, norm, residual, swiglu=False)
    x = x if norm is None else norm(x)
    return linear(x) if residual is None else linear(x, residual)


def _in_one_kernel(linear: nn.Linear, x: Tensor) -> bool:
    made = any(_is(linear, kind) for kind in (nn.Linear, Linear, ResidualProjection))
    unbiased = getattr(linear, "bias", None) is None
    return made and unbiased and x.shape[0] == 1 and linear.weight.shape[1] <= NUMBERS


@on_its_device
def times_vector(x: Tensor, weight: Tensor, norm: RMSNorm | None, residual: Tensor | None, *, swiglu: bool) -> Tensor:
    """W x of x [1, ·], as `vector_kernel` says."""
    from .one_token_kernels import vector_kernel

    N, M = weight.shape[0] // (1 + swiglu), weight.shape[1]
    y, BM = x.new_empty(1, N), power_of_two(M)
    BN = max(1, NUMBERS // BM // (1 + swiglu))
    vector_kernel[(-(-N // BN),)](
        *(x, None if norm is None else norm.weight, weight, residual, y),
        **{"N": N, "M": M, "EPS": 0.0 if norm is None else norm.eps, "BN": BN, "BM": BM},
        **{"NORM": norm is not None, "SWIGLU": swiglu, "RESIDUAL": residual is not None},
        **FUSED,
        **early(x.device),
        num_warps=4,
    )
    return y


@on_its_device
def mix(x: Tensor, mixer: Mixer, conv: Tensor, recurrent: Tensor) -> Tensor:
    """What `in_proj` gave [B, ·] → what `o_proj` takes [B, H·V]; conv [B, W − 1, ·] and recurrent [B, H, K, V] after
    one more token, in place."""
    from .one_token_kernels import mixer_kernel
    from .row_kernels import ACTIVATIONS

    row, H, K, V = mixer.row, mixer.num_heads, mixer.head_dim, mixer.value_head_dim
    f, g, norm = mixer.f_proj, mixer.g_proj, mixer.o_norm
    activation = norm.activation if isinstance(norm, GatedRMSNorm) else None
    ranks = {name: 0 if y is None else y.in_features for name, y in (("F", f), ("G", g))}
    columns, before = {}, 0
    for name, width in mixer.rows.items():
        columns[name], before = before, before + width
    y, decays = x.new_empty(x.shape[0], H * V), row.decay != "none"
    warps, options = 16 if K * V > LARGEST // 2 else 8, early(x.device)
    if options["EARLY"] and x.shape[0] > 1 and warps == 8:
        options = options | {"maxnreg": 128}  # two programs on a multiprocessor
    mixer_kernel[(x.shape[0] * H,)](
        *(x, conv, recurrent, mixer.conv.weight, None if f is None else f.weight),
        *(mixer.A_log if decays else None, mixer.dt_bias if decays else None),
        *(mixer.theta if row.strength else None, mixer.random_direction if row.direction == "head" else None),
        *((None, None) if g is None else (g.weight, g.bias)),
        *(norm.weight, y, x.stride(0), mixer.read_scale, mixer.strength_scale * mixer.lambda_max),
        **{f"AT_{name.upper()}": columns[name] for name in "bwfg"},
        **{"H": H, "K": K, "V": V, "W": mixer.conv.weight.shape[1]},
        **prologue.rule_constants(row),
        **{f"{name}_RANK": rank for name, rank in ranks.items()},
        **{"ACTIVATION": ACTIVATIONS[activation], "EPS": norm.eps},
        **{"BK": power_of_two(K), "BV": power_of_two(V), "BW": power_of_two(mixer.conv.weight.shape[1])},
        **{f"B{name}": power_of_two(rank) for name, rank in ranks.items()},
        AHEAD=x.shape[0] == 1,
        **FUSED,
        **options,
        num_warps=warps,
    )
    return y


def _is(linear: nn.Module, kind: type[nn.Linear]) -> bool:
    """As it was made: neither adapted nor quantised."""
    return _is_ours(linear, kind) and type(linear.weight.data) is Tensor


def _is_ours(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Of that very class, and run as the class says."""
    return type(module) is kind and "forward" not in module.__dict__
