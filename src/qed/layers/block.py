"""One block of the model: norm → mixer → +, then norm → SwiGLU → +."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ..routes import AUTO, Impl
from .attention import Attention
from .mixer import Mixer
from .mlp import SwiGLU
from .norm import RMSNorm
from .routes import OPERATORS_KEPT
from .sequences import DENSE, Sequences

NARROW = 256  # the most numbers that each result of a narrow product is a sum of
_MATRIX_PRODUCTS: tuple[Any, ...] = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def _is_kept(how: str, operator: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Whether a block that recomputes keeps a result for its backward: products of matrices, the scales of norms (one
    number a row), and what the routes' own operators save time by keeping. "lean" makes narrow products again, those of
    a gate's bottleneck: they are as large as others, and take little more time than to write them."""
    if operator in _MATRIX_PRODUCTS:
        return how != "lean" or arguments[-2].shape[1] > NARROW  # of the left matrix
    kept = operator is torch.ops.aten.rsqrt.default or operator in OPERATORS_KEPT[how]
    return kept or _is_cast_weight(operator, *arguments, **named)


def _policy_of(how: str) -> Callable[..., CheckpointPolicy]:
    def policy(_: Any, operator: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
        kept = _is_kept(how, operator, arguments, named)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


_POLICIES = {how: _policy_of(how) for how in OPERATORS_KEPT}


def _is_cast_weight(operator: Any, *arguments: Any, dtype: torch.dtype | None = None, **_: Any) -> bool:
    """A weight in low precision is small beside a batch, and recomputing it takes a kernel of its own."""
    return (
        operator is torch.ops.aten._to_copy.default and arguments[0].dim() == 2 and dtype not in (None, torch.float32)
    )


# Functions of their own, which torch.compile knows by their names.
def _light() -> Any:
    return create_selective_checkpoint_contexts(_POLICIES["light"])


def _cheap() -> Any:
    return create_selective_checkpoint_contexts(_POLICIES["cheap"])


def _lean() -> Any:
    return create_selective_checkpoint_contexts(_POLICIES["lean"])


_CONTEXTS = {"light": _light, "cheap": _cheap, "lean": _lean}


class QEDBlock(nn.Module):
    """A mixer and a SwiGLU on the residual stream, each behind a norm."""

    recomputes: str | None = None  # a name of `OPERATORS_KEPT`: training keeps what `_is_kept` says, and not the rest
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
        if self.recomputes is not None and self.training and torch.is_grad_enabled():
            return checkpoint(
                *(self._forward, x, state, sequences, keeps_state),
                **options,
                use_reentrant=False,
                preserve_rng_state=False,
                context_fn=_CONTEXTS[self.recomputes],
            )
        return self._forward(x, state, sequences, keeps_state, **options)

    def _forward(
        self, x: Tensor, state: Any, sequences: Sequences, keeps_state: bool, **options: Any
    ) -> tuple[Tensor, Any]:
        x, state = self.mixer(self.mixer_norm(x), state, sequences, residual=x, **options)
        return self.mlp(self.mlp_norm(x), residual=x), state if keeps_state else None
