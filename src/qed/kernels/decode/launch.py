"""Launches the kernels for one token through a block. They are few, because launching a kernel takes as long as most of
them run.

    RMSNorm, in_proj │ the mixer up to its gated norm, states in place │ o_proj, + │ RMSNorm, SwiGLU │ down_proj, +

For one sequence these are five kernels. For more sequences the matrices are multiplied with more than one vector. Then
torch computes these products, and norms and SwiGLU's product are kernels of their own. The layers define in torch what
all this computes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..launching import FUSED, early, on_its_device, power_of_two
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
    from .kernels import vector_kernel

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
    """Return the input of `o_proj`, [B, H·V], from the output of `in_proj`. Both states are written over.

    Args:
        x: output of `in_proj`, [B, ·].
        mixer: the layer with the parameters and the rule.
        conv: the convolution's state [B, W − 1, ·].
        recurrent: the recurrent state [B, H, K, V].
    """
    from .kernels import mixer_kernel

    row, H, K, V = mixer.row, mixer.num_heads, mixer.head_dim, mixer.value_head_dim
    f, g, norm = mixer.f_proj, mixer.g_proj, mixer.o_norm
    activation = getattr(norm, "activation", None)
    ranks = {name: 0 if y is None else y.in_features for name, y in (("F", f), ("G", g))}
    columns, before = {}, 0
    for name, width in mixer.parts.items():
        columns[name], before = before, before + width
    y, decays = x.new_empty(x.shape[0], H * V), row.decay != "none"
    warps, options = 16 if K * V > LARGEST // 2 else 8, early(x.device)
    if options["EARLY"] and x.shape[0] > 1 and warps == 8:
        options = options | {"maxnreg": 128}  # so that two programs fit on a multiprocessor
    mixer_kernel[(x.shape[0] * H,)](
        *(x, conv, recurrent, mixer.conv.weight, None if f is None else f.weight),
        *(mixer.A_log if decays else None, mixer.dt_bias if decays else None),
        *(mixer.theta if row.strength else None, mixer.random_direction if row.direction == "head" else None),
        *((None, None) if g is None else (g.weight, g.bias)),
        *(norm.weight, y, x.stride(0), mixer.read_scale, mixer.strength_scale * mixer.lambda_max),
        **{f"AT_{name.upper()}": columns[name] for name in "bwf"},
        AT_G=columns["output_gate"],
        **{"H": H, "K": K, "V": V, "W": mixer.conv.weight.shape[1]},
        **rule_constants(row),
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
