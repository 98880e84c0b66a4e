"""The routes of the recurrence: its three forms, over whole sequences and for one token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..routes import Call, Piece, Route, kernel_obstacle, no_obstacle, shared_memory
from . import chunkwise, reference
from .arguments import Arguments
from .operators import CHUNKWISE, STEP_TRITON, STEP_TRITON_IN_PLACE, TRITON, is_dual
from .precision import without_autocast

TRITON_WIDEST = 256
WIDE_SHARED = 120  # KiB of shared memory that a program of the backward takes in float32 where V is above 128
KERNELS = "GPU kernels; any K and V up to 256, up to float32"
CHUNKS = "matrix products over chunks of tokens; any device, dtype and shape"
LOOP = "the token loop that defines the op; any device, dtype and shape, slow"


def _triton_obstacle(call: Call, K: int, V: int) -> str | None:
    why_not = kernel_obstacle(call)
    if why_not is None and max(K, V) > TRITON_WIDEST:
        why_not = f"it takes K and V up to {TRITON_WIDEST}, and they are {K} and {V}"
    return why_not or _chunk_obstacle(call, K, V)


def _sequence_obstacle(call: Call, K: int, V: int) -> str | None:
    why_not = _triton_obstacle(call, K, V)
    if why_not is None and call.device.type == "cuda" and call.dtype == torch.float32 and V > TRITON_WIDEST // 2:
        shared = shared_memory(call.device)
        if shared < WIDE_SHARED:
            return f"in float32 with V = {V} it takes {WIDE_SHARED} KiB of shared memory, and this GPU has {shared}"
    return why_not


def _chunk_obstacle(call: Call, K: int, V: int) -> str | None:
    if call.transformed:
        return "torch.func and forward-mode differentiation can go through the loop alone"
    return None


def _loop(x: Arguments, save: bool) -> tuple[Tensor, Tensor]:
    return reference.erase_write(x)


def _step_triton(inplace: bool, differentiable: bool, *inputs: Any) -> tuple[Tensor, Tensor]:
    state = inputs[5]
    if not inplace:
        o, new_state = STEP_TRITON(*inputs)
        return o, new_state
    if not state.is_contiguous():
        raise ValueError(f"state: inplace=True expects contiguous memory, got strides {state.stride()}")
    return STEP_TRITON_IN_PLACE(*inputs), state


def _step_chunk(inplace: bool, differentiable: bool, *inputs: Any) -> tuple[Tensor, Tensor]:
    """Where a gradient is needed, run the loop's step, whose gradient autocast does not change. Where none is needed,
    the chunk form's step is faster."""
    return _step_torch(reference.step if differentiable else without_autocast(chunkwise.step), inplace, *inputs)


def _step_loop(inplace: bool, differentiable: bool, *inputs: Any) -> tuple[Tensor, Tensor]:
    return _step_torch(reference.step, inplace, *inputs)


def _step_torch(step: Any, inplace: bool, *inputs: Any) -> tuple[Tensor, Tensor]:
    *operands, g, state, scale = inputs
    q, k, a, u = (x.to(state.dtype) for x in operands)
    o, new_state = step(q, k, a, u, None if g is None else g.to(state.dtype), state, scale)
    return o.to(operands[0].dtype), state.copy_(new_state) if inplace else new_state


RECURRENCE = Piece(
    "recurrence",
    Route("triton", TRITON, _sequence_obstacle, KERNELS),
    Route("chunkwise", CHUNKWISE, _chunk_obstacle, CHUNKS),
    Route("reference", _loop, no_obstacle, LOOP),
)
STEP = Piece(
    "recurrence",
    Route("triton", _step_triton, _triton_obstacle, KERNELS),
    Route("chunkwise", _step_chunk, _chunk_obstacle, CHUNKS),
    Route("reference", _step_loop, no_obstacle, LOOP),
)


def is_transformed(*inputs: Tensor | None) -> bool:
    """Return whether a tensor is a dual number of forward-mode differentiation, or is being differentiated by
    torch.func."""
    if is_dual(*inputs):
        return True
    if torch._C._functorch.maybe_current_level() is None:
        return False
    return any(_differentiated_by_func(x) for x in inputs if x is not None)


def _differentiated_by_func(x: Tensor) -> bool:
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        if torch._C._functorch.is_gradtrackingtensor(x):
            return True
        x = torch._C._functorch.get_unwrapped(x)
    return False
