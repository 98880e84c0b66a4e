"""When which route is taken: the table of every piece of a layer that has a fast way.

    recurrence   the op, from its operands to its outputs                      (`ops/routes.py`)
    operands     from what `in_proj` gives to what the recurrence takes
    convolution  the short convolution, where the operands are not made in one kernel
    norm         RMSNorm, with or without a gate
    product      silu(gate) ⊙ up in SwiGLU
    projection   a matrix product, and the residual stream that it may be added to
    block        a whole block for one token, when decoding

Routes stand in the order in which "auto" prefers them. The last one of each piece, "reference", is plain torch and
defines what the others have to compute; `tests/test_routes.py` holds every route to it for every rule.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..kernels.convolution.launch import MOST_TAPS, SHORT_CONVOLUTION
from ..kernels.decode import launch as decode
from ..kernels.prologue import launch as prologue
from ..kernels.prologue import operator, projected
from ..kernels.rows import launch as rows
from ..ops.operators import SAVING_OPERATORS
from ..ops.routes import RECURRENCE
from ..routes import (
    AUTO,
    Call,
    Impl,
    Piece,
    Route,
    check_name,
    inference_kernel_obstacle,
    kernel_obstacle,
    no_obstacle,
    shared_memory,
)
from . import functions, making, obstacles
from .sequences import DENSE, Sequences

if TYPE_CHECKING:
    from .mixer import Mixer

# Norms


def _written_out_obstacle(call: Call) -> str | None:
    if call.named:
        return None
    if not (call.compiling and call.gradient):
        return "it is made for training inside torch.compile"
    return kernel_obstacle(call)


NORM = Piece(
    "norm",
    Route("triton", rows.rms_norm, inference_kernel_obstacle, "one kernel that reads once and writes once"),
    Route(
        "written-out",
        functions.rms_norm_written_out,
        _written_out_obstacle,
        "torch in parts, so that a compiled backward can keep the scales",
    ),
    Route("reference", functions.rms_norm, no_obstacle, "torch's own rms_norm"),
)

# SwiGLU's product


def _product_obstacle(call: Call) -> str | None:
    if call.compiling and not call.gradient:
        return "torch.compile fuses this piece with its neighbours itself"
    return kernel_obstacle(call)


def _product_kernel(both: Tensor) -> Tensor:
    product: Tensor = rows.SILU_PRODUCT(both) if torch.is_grad_enabled() else rows.silu_product(both)
    return product


PRODUCT = Piece(
    "product",
    Route("triton", _product_kernel, _product_obstacle, "one kernel that reads once and writes once, with a gradient"),
    Route("reference", functions.silu_product, no_obstacle, "torch's silu and a product"),
)

# The short convolution


def _convolution_obstacle(call: Call, taps: int) -> str | None:
    if call.tokens <= 1:
        return "it is made for more than one token"
    if not 1 < taps <= MOST_TAPS:
        return f"it takes 2 to {MOST_TAPS} taps, and there are {taps}"
    if call.state_gradient:
        return "its state has no gradient, and one is recorded"
    return kernel_obstacle(call)


def _convolution_kernel(x: Tensor, weight: Tensor, state: Tensor | None, sequences: Sequences) -> Tensor:
    places = sequences.positions(x)
    if sequences.cu_seqlens is None:
        owner = torch.arange(x.shape[0], device=x.device)[:, None].expand(x.shape[:2])
    else:
        owner = sequences.owners(x)[None]
    y: Tensor = SHORT_CONVOLUTION(
        x.flatten(0, 1),
        weight,
        None if state is None else state.detach(),
        places.flatten().to(torch.int32),
        owner.flatten().to(torch.int32),
    )
    return y.view(*x.shape)


CONVOLUTION = Piece(
    "convolution",
    Route(
        "triton", _convolution_kernel, _convolution_obstacle, "one kernel that reads every input once, with a gradient"
    ),
    Route("reference", functions.short_convolution, no_obstacle, "a sum over taps in torch"),
)

# From what `in_proj` gives to what the recurrence takes


def _operands_obstacle(call: Call, mixer: Mixer) -> str | None:
    why_not = kernel_obstacle(call) or obstacles.mixer_obstacle(mixer) or obstacles.convolution_obstacle(mixer.conv)
    if why_not is not None:
        return why_not
    widest = max(mixer.head_dim, mixer.value_head_dim)
    if widest > prologue.WIDEST:
        return f"it takes heads up to {prologue.WIDEST} wide, and these are {widest}"
    if call.gradient or call.compiling:  # as a torch operator with a gradient
        taps = mixer.conv.weight.shape[1]
        if call.state or call.packed or call.tokens <= 1:
            return "with a gradient it takes more than one token of sequences that are not packed and start from zeros"
        if not 1 < taps <= MOST_TAPS:
            return f"with a gradient it takes 2 to {MOST_TAPS} taps, and there are {taps}"
    return None


def _compiled_obstacle(call: Call, mixer: Mixer) -> str | None:
    if call.gradient:
        return "it has no gradient, and gradients are recorded"
    if call.compiling:
        return "torch.compile is at work already"
    return kernel_obstacle(call._replace(named=False))


OPERANDS = Piece(
    "operands",
    Route(
        "triton",
        making.operands_by_kernel,
        _operands_obstacle,
        "convolution, gates and erase vector in one kernel, with a gradient",
    ),
    Route(
        "compiled",
        making.operands_compiled,
        _compiled_obstacle,
        "the convolution, then the rule's own function compiled by torch",
    ),
    Route("reference", making.operands_in_torch, no_obstacle, "the convolution, then the rule in torch"),
)

# Matrix products


def _vector_obstacle(call: Call, linear: nn.Module, residual: Tensor | None) -> str | None:
    if call.batch * call.tokens != 1 or call.gradient:
        return "it is made for one token without a gradient"
    if not call.named and not (call.compiling and call.device.type == "cuda"):
        return "it is made for torch.compile on a GPU"
    return obstacles.plain_linear_obstacle(linear)


def _in_place_obstacle(call: Call, linear: Any, residual: Tensor | None) -> str | None:
    if residual is None and not call.named:
        return "there is no residual stream to write over"
    if call.gradient:
        return "it has no gradient, and gradients are recorded"
    if call.compiling:
        return "torch.compile decides by itself what to write over"
    if call.device.type != "cuda" and not call.named:
        return f"it pays on a GPU alone, and the inputs are on {call.device}"
    why_not = obstacles.plain_linear_obstacle(linear)
    if why_not is not None:
        return why_not
    if residual is None:
        return None
    if linear.bias is not None:
        return "it takes a matrix without a bias"
    if not residual.is_contiguous() or not residual.dtype == call.dtype == linear.weight.dtype:
        return "it takes a contiguous residual stream and a matrix of the inputs' dtype"
    return None


PROJECTION = Piece(
    "projection",
    Route(
        "vector",
        functions.projection_of_a_vector,
        _vector_obstacle,
        "a sum over the matrix's rows, which torch.compile fuses with its neighbours",
    ),
    Route(
        "in-place",
        functions.projection_in_place,
        _in_place_obstacle,
        "a matrix product that is added to the residual stream in place",
    ),
    Route("reference", functions.projection, no_obstacle, "the module itself"),
)


def project(linear: nn.Module, x: Tensor, residual: Tensor | None = None, impl: Impl = AUTO) -> Tensor:
    """W x, or residual + W x, which may be written over `residual`.

    Args:
        linear: an `nn.Linear`, or what has taken its place.
        x: [..., in].
        residual: the residual stream [..., out], or None.
        impl: the route, or a route by piece.
    """
    if residual is None and impl == AUTO and not torch.compiler.is_compiling():
        y: Tensor = linear(x)  # what the table would say, which takes a third of a small product's time to ask
        return y
    y = PROJECTION.pick(impl, Call.of(x, x.shape[:-1].numel()), linear, residual).run(linear, x, residual)
    return y


# A whole block for one token


def _block_obstacle(call: Call, block: Any) -> str | None:
    why_not = obstacles.block_parts_obstacle(block) or obstacles.mixer_obstacle(block.mixer)
    if why_not is not None:
        return why_not
    mixer = block.mixer
    if call.batch > decode.MOST:
        return f"it takes up to {decode.MOST} sequences, and there are {call.batch}"
    ranks = [x.in_features for x in (mixer.f_proj, mixer.g_proj) if x is not None]
    if max(mixer.head_dim, mixer.value_head_dim, *ranks) > prologue.WIDEST:
        return f"it takes heads and bottlenecks up to {prologue.WIDEST} wide"
    why_not = kernel_obstacle(call)
    if why_not is None and call.device.type == "cuda" and not decode.is_alone(mixer, call.batch):
        needed, shared = decode.shared_memory_of(mixer), shared_memory(call.device)
        if needed > shared:
            return f"several sequences in float32 take {needed} KiB of shared memory, and this GPU has {shared}"
    return why_not


def block_in_torch(block: Any, x: Tensor, conv: Tensor, recurrent: Tensor) -> Tensor:
    """One block for one token through its own `forward`; both states are written over.

    Args:
        block: a block whose mixer is recurrent.
        x: [B, hidden].
        conv, recurrent: the mixer's states.
    """
    from .mixer import MixerState

    y, state = block.forward(x[:, None], MixerState(conv, recurrent), DENSE, inplace=True)
    conv.copy_(state.conv)
    return y[:, 0]


@cache
def _compiled_block(rule: str) -> Any:
    """All layers of a rule share one program."""
    return torch.compile(making.copied(block_in_torch), fullgraph=True)


def _block_compiled(block: Any, *states: Any) -> Tensor:
    y: Tensor = _compiled_block(block.mixer.rule)(block, *states)
    return y


def _compiled_block_obstacle(call: Call, block: Any) -> str | None:
    if call.device.type != "cuda":
        return f"it pays on a GPU alone, and the inputs are on {call.device}"
    if not isinstance(block.impl, str):
        asked = [piece for piece, name in block.impl if name != AUTO and piece not in ("recurrence", "block")]
        if asked:
            return f"routes of {', '.join(asked)} were asked for, which may not run inside torch.compile"
    return obstacles.trace_obstacle(block)


BLOCK = Piece(
    "block",
    Route(
        "triton",
        decode.block_step,
        _block_obstacle,
        "five kernels for one sequence, six for several; library products where there are many",
    ),
    Route("compiled", _block_compiled, _compiled_block_obstacle, "the block compiled by torch"),
    Route("reference", block_in_torch, no_obstacle, "the block's own forward"),
)

normed_projection = decode.normed_projection  # the final norm and the logits of one token
write_likeliest = decode.write_likeliest  # the token that they say
# Operators whose results a block keeps, by how much else it recomputes, in the order of the time saved for the memory.
_KEPT: tuple[Any, ...] = (*SAVING_OPERATORS, rows.SILU_PRODUCT, operator.OPERANDS, projected.OPERANDS)
OPERATORS_KEPT = {"light": _KEPT, "cheap": _KEPT[:-2], "lean": _KEPT[:-3]}
PIECES = {piece.name: piece for piece in (RECURRENCE, OPERANDS, CONVOLUTION, NORM, PRODUCT, PROJECTION, BLOCK)}


def set_impl(module: nn.Module, impl: str = AUTO, **pieces: str) -> None:
    """Choose the routes of every layer of this package in a module.

    Args:
        module: a layer, a model, or any module that contains some.
        impl: "auto" for the fastest route that can run, "reference" for plain torch everywhere, or a route of the
            recurrence: every piece that has a route of that name takes it or raises, and the others run in plain torch.
        pieces: a route for single pieces, such as norm="reference"; it runs or raises.
    """
    check_name(impl, RECURRENCE.names)
    for name, route in pieces.items():
        if name not in PIECES:
            raise ValueError(f"set_impl: expected pieces of {', '.join(PIECES)}, got {name!r}")
        check_name(route, PIECES[name].names, name)
    chosen: Impl = impl
    if pieces:
        chosen = tuple(({name: piece.wanted(impl) for name, piece in PIECES.items()} | pieces).items())
    for part in module.modules():
        if isinstance(part, _layers()):
            part.impl = chosen  # type: ignore[assignment]


def _layers() -> tuple[type[nn.Module], ...]:
    """The layers that take routes; they import this file."""
    from .attention import Attention
    from .block import QEDBlock
    from .convolution import ShortConvolution
    from .mixer import Mixer
    from .mlp import SwiGLU
    from .norm import RMSNorm

    return Attention, QEDBlock, ShortConvolution, Mixer, SwiGLU, RMSNorm
