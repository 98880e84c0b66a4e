"""Short causal convolution of every channel by itself, then SiLU.

    y_t = silu(Σ_s weight[W − 1 − s] · x_{t−s}),  s = 0 … W − 1

Before a sequence's first token lies its *state*: the W − 1 inputs that came before, zeros at the beginning.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..routes import AUTO, Call, Impl
from .functions import last_inputs
from .initialization import fill_convolution, filled
from .routes import CONVOLUTION
from .sequences import DENSE, Sequences


class ShortConvolution(nn.Module):
    """The convolution's weights [channels, width], and the convolution by them."""

    impl: Impl = AUTO

    def __init__(self, channels: int, width: int):
        super().__init__()
        if width < 1:
            raise ValueError(f"width: expected a positive number of taps, got {width}")
        self.weight = nn.Parameter(filled(torch.empty(channels, width), fill_convolution))

    def forward(
        self,
        x: Tensor,
        state: Tensor | None = None,
        sequences: Sequences = DENSE,
        *,
        impl: Impl | None = None,
    ) -> Tensor:
        """Return the convolved x; the state after it is `last_inputs` of x.

        Args:
            x: [B, T, channels].
            state: [N, width − 1, channels]; None for zeros.
            sequences: where sequences begin and end.
            impl: the route for this call; None for the layer's own.
        """
        return _convolve(x, self.weight.to(x.dtype), state, sequences, self.impl if impl is None else impl)

    def extra_repr(self) -> str:
        """The number of channels and of taps, for printing."""
        return "{}, width={}".format(*self.weight.shape)


def short_convolution(
    x: Tensor, weight: Tensor, state: Tensor | None = None, sequences: Sequences = DENSE, impl: Impl = AUTO
) -> tuple[Tensor, Tensor]:
    """Return y like x, and the state after the last token, [N, W − 1, D].

    Args:
        x: [B, T, D].
        weight: [D, W].
        state: [N, W − 1, D]; None for zeros.
        sequences: where sequences begin and end.
        impl: "auto", or a route of the convolution.
    """
    return _convolve(x, weight, state, sequences, impl), last_inputs(x, weight.shape[1] - 1, state, sequences)


def _convolve(x: Tensor, weight: Tensor, state: Tensor | None, sequences: Sequences, impl: Impl) -> Tensor:
    needs_gradient = state is not None and torch.is_grad_enabled() and state.requires_grad
    call = Call.of(x, x.shape[0], x.shape[1], state=state is not None, state_gradient=needs_gradient)
    y: Tensor = CONVOLUTION.pick(impl, call, weight.shape[1]).run(x, weight, state, sequences)
    return y
