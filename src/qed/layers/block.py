"""One block of the model: norm → mixer → +, then norm → SwiGLU → +."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ..routes import AUTO, Impl
from .attention import Attention
from .mixer import Mixer
from .mlp import SwiGLU
from .norm import RMSNorm
from .routes import EXPENSIVE_OPERATORS
from .sequences import DENSE, Sequences

# What a block that recomputes keeps for its backward: products of matrices, the scales of norms (one number a row), and
# what the routes' own operators save time by keeping.
_KEPT_OPERATORS: set[Any] = {
    *(torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.rsqrt.default),
    *EXPENSIVE_OPERATORS,
}


def _policy(_: Any, operator: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
    kept = operator in _KEPT_OPERATORS or _is_cast_weight(operator, *arguments, **named)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _is_cast_weight(operator: Any, *arguments: Any, dtype: torch.dtype | None = None, **_: Any) -> bool:
    """A weight in low precision is small beside a batch, and recomputing it takes a kernel of its own."""
    return (
        operator is torch.ops.aten._to_copy.default and arguments[0].dim() == 2 and dtype not in (None, torch.float32)
    )


def _selective() -> Any:
    return create_selective_checkpoint_contexts(_policy)


class QEDBlock(nn.Module):
    """A mixer and a SwiGLU on the residual stream, each behind a norm."""

    recomputes = False  # whether training keeps only what `_KEPT_OPERATORS` names, and recomputes the rest
    impl: Impl = AUTO

    def __init__(self, mixer: Mixer | Attention, *, hidden_size: int, intermediate_size: int, norm_eps: float = 1e-5):
        """
        Args:
            mixer: the token mixer.
            hidden_size: width of the residual stream.
            intermediate_size: width inside SwiGLU.
            norm_eps: of both norms.
        """
        super().__init__()
        self.mixer_norm = RMSNorm(hidden_size, norm_eps)
        self.mixer = mixer
        self.mlp_norm = RMSNorm(hidden_size, norm_eps)
        self.mlp = SwiGLU(hidden_size, intermediate_size)

    def forward(
        self, x: Tensor, state: Any = None, sequences: Sequences = DENSE, keeps_state: bool = True, **options: Any
    ) -> tuple[Tensor, Any]:
        """Return the residual stream after the block, and the mixer's state.

        Args:
            x: the residual stream [B, T, hidden]; it may be written over where no gradient is recorded.
            state: the mixer's state to start from; None for the beginning of a sequence.
            sequences: where sequences begin and end.
            keeps_state: otherwise None is returned for the state: what a compiled program returns has a gradient.
            options: as in `Mixer.forward`.
        """
        if self.recomputes and self.training and torch.is_grad_enabled():
            return checkpoint(
                *(self._forward, x, state, sequences, keeps_state),
                **options,
                use_reentrant=False,
                preserve_rng_state=False,
                context_fn=_selective,
            )
        return self._forward(x, state, sequences, keeps_state, **options)

    def _forward(
        self, x: Tensor, state: Any, sequences: Sequences, keeps_state: bool, **options: Any
    ) -> tuple[Tensor, Any]:
        x, state = self.mixer(self.mixer_norm(x), state, sequences, residual=x, **options)
        return self.mlp(self.mlp_norm(x), residual=x), state if keeps_state else None
