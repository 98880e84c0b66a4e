"""Inference on a GPU: where no gradient is recorded, layers have ways of their own.

In plain torch every operation reads and writes whole tensors, and a prefill spends more time on those than on products
of matrices. So what lies between products is done by kernels that read and write once (`prologue.py`,
`row_kernels.py`), and what a rule's own function does by a program that torch compiles from it. In training torch has
to see what it saves (of these the prologue and SwiGLU's product have a gradient), and in a compiled model the rest is
part of larger programs.
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


def has_kernels(x: Tensor) -> bool:
    return TRITON_INSTALLED and x.is_cuda and x.dtype != torch.float64


def pays(x: Tensor) -> bool:
    return has_kernels(x) and not torch.is_grad_enabled() and not torch.compiler.is_compiling()


def fused(piece: Piece) -> Piece:
    """A method of a mixer and a tensor, compiled where that pays."""

    @cache
    def compiled(rule: str) -> Callable[..., Any]:
        """Each rule's own: of one function torch keeps eight programs, and a rule needs a few, by shapes."""
        own = FunctionType(piece.__code__.replace(), piece.__globals__, piece.__name__, None, piece.__closure__)
        return torch.compile(own)

    @wraps(piece)
    def call(layer: Any, x: Tensor, *more: Any) -> Any:
        return (compiled(layer.rule) if pays(x) else piece)(layer, x, *more)

    return call  # type: ignore[return-value]
