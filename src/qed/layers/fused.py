"""What lies between products of matrices, as one program.

In plain torch every operation reads and writes whole tensors, and a prefill spends more time on those than on products.
Compiled, a piece reads its inputs and writes its outputs once. That is done on a GPU where no gradient is recorded: in
training torch has to see what it saves, and in a compiled model pieces are parts of larger programs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..ops.forms import TRITON_INSTALLED

Piece = TypeVar("Piece", bound=Callable[..., Any])


def pays(x: Tensor) -> bool:
    return TRITON_INSTALLED and x.is_cuda and not torch.is_grad_enabled() and not torch.compiler.is_compiling()


def fused(piece: Piece) -> Piece:
    """A method of a layer and a tensor."""

    @cache
    def compiled(rule: str | None) -> Callable[..., Any]:
        """Each rule's own: of one function torch keeps eight programs, and a rule needs a few, by shapes and states."""
        own = FunctionType(piece.__code__.replace(), piece.__globals__, piece.__name__, None, piece.__closure__)
        return torch.compile(own)

    @wraps(piece)
    def call(layer: Any, x: Tensor, *more: Any) -> Any:
        return (compiled(getattr(layer, "rule", None)) if pays(x) else piece)(layer, x, *more)

    return call  # type: ignore[return-value]
