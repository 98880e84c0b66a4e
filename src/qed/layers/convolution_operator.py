"""The short convolution's kernels as a torch operator; Triton is imported when it first runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

WIDEST = 4  # taps that the kernels have registers for
_LIBRARY = torch.library.Library("qed", "FRAGMENT")
_INPUTS = "Tensor x, Tensor weight, Tensor? state, Tensor place, Tensor owner"


def _forward(*inputs: Any) -> Tensor:
    from .convolution_kernels import forward

    return forward(*inputs)


def _backward(*inputs: Any) -> tuple[Tensor, Tensor]:
    from .convolution_kernels import backward

    return backward(*inputs)


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    dx, d_weight = torch.ops.qed.short_convolution_backward(dy, *ctx.saved_tensors)
    return dx, d_weight, None, None, None


_TAGS = (torch.Tag.pt2_compliant_tag,)
_LIBRARY.define(f"short_convolution({_INPUTS}) -> Tensor", tags=_TAGS)
_LIBRARY.define(f"short_convolution_backward(Tensor dy, {_INPUTS}) -> (Tensor, Tensor)", tags=_TAGS)
_LIBRARY.impl("short_convolution", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("short_convolution_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("qed::short_convolution", lambda x, *_: x.new_empty(x.shape), lib=_LIBRARY)
torch.library.register_fake(
    "qed::short_convolution_backward",
    lambda dy, x, weight, *_: (x.new_empty(x.shape), weight.new_empty(weight.shape)),
    lib=_LIBRARY,
)
torch.library.register_autograd(
    "qed::short_convolution",
    _differentiate,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    lib=_LIBRARY,
)
convolution_operator: Callable[..., Tensor] = torch.ops.qed.short_convolution.default
