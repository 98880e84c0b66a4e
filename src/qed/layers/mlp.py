"""SwiGLU: W_down (silu(W_gate x) ⊙ W_up x)."""

from __future__ import annotations

from torch import Tensor, nn

from ..routes import AUTO, Call, Impl
from .projections import into_residual
from .routes import PRODUCT, project


class SwiGLU(nn.Module):
    """The feed-forward layer. W_gate and W_up are one matrix, W_gate above W_up."""

    impl: Impl = AUTO

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_up_proj = nn.Linear(hidden_size, 2 * intermediate_size, bias=False)
        self.down_proj = into_residual(intermediate_size, hidden_size)

    def forward(self, x: Tensor, residual: Tensor | None = None, *, impl: Impl | None = None) -> Tensor:
        """Return SwiGLU(x), or residual + SwiGLU(x), which may be written over `residual`.

        Args:
            x: [..., hidden].
            residual: the residual stream, like x, or None.
            impl: the routes for this call; None for the layer's own.
        """
        impl = self.impl if impl is None else impl
        both = project(self.gate_up_proj, x, impl=impl)
        product = PRODUCT.pick(impl, Call.of(both)).run(both)
        return project(self.down_proj, product, residual, impl)
