"""SwiGLU's product as a torch operator with a gradient, for training: each way reads once and writes once.

    qed::silu_product(both) -> silu(gate) ⊙ up
    qed::silu_product_backward(dy, both) -> gradient of both

Compiled from torch's functions, the two halves of the gradient are written side by side by a program that reads
everything twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("qed", "FRAGMENT")
_LIBRARY.define("silu_product(Tensor both) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
_LIBRARY.define("silu_product_backward(Tensor dy, Tensor both) -> Tensor", tags=torch.Tag.pt2_compliant_tag)


def _product(both: Tensor) -> Tensor:
    from .row_kernels import silu_product

    return silu_product(both)


def _gradient(dy: Tensor, both: Tensor) -> Tensor:
    from .row_kernels import silu_product_gradient

    return silu_product_gradient(dy, both)


def _keep(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, dy: Tensor) -> Tensor:
    return torch.ops.qed.silu_product_backward(dy, *ctx.saved_tensors)


_LIBRARY.impl("silu_product", _product, "CompositeExplicitAutograd")
_LIBRARY.impl("silu_product_backward", _gradient, "CompositeExplicitAutograd")
torch.library.register_fake(
    "qed::silu_product", lambda both: both.new_empty(*both.shape[:-1], both.shape[-1] // 2), lib=_LIBRARY
)
torch.library.register_fake("qed::silu_product_backward", lambda dy, both: both.new_empty(both.shape), lib=_LIBRARY)
torch.library.register_autograd("qed::silu_product", _differentiate, setup_context=_keep, lib=_LIBRARY)
product_operator: Callable[[Tensor], Tensor] = torch.ops.qed.silu_product.default
