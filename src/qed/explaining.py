"""`explain`: of the op or of a model, which route runs and why not the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from . import ops
from .routes import Choice

if TYPE_CHECKING:
    from .model.causal_lm import QEDForCausalLM, QEDModel
    from .model.explaining import Explanation


def explain(
    q: Tensor | QEDForCausalLM | QEDModel,
    k: Tensor | None = None,
    a: Tensor | None = None,
    u: Tensor | None = None,
    g: Tensor | None = None,
    **options: Any,
) -> Choice | Explanation:
    """Which route `erase_write` or a model takes, and why not the others; prints well. Nothing is computed.

    Args:
        q: a model; or queries, and then the other arguments are those of `erase_write`.
        k, a, u, g: as in `erase_write`.
        options: scale, initial_state, cu_seqlens and impl, as in `erase_write`; of a model batch, tokens and the
            options of `generate` to explain.
    """
    if isinstance(q, Tensor):
        if k is None or a is None or u is None:
            raise TypeError("explain: expected a model, or q, k, a and u as `erase_write` takes them")
        return ops.explain(q, k, a, u, g, **options)
    from .model.explaining import explain_model

    if any(x is not None for x in (k, a, u, g)):
        raise TypeError("explain: expected no tensors besides the model")
    return explain_model(q, **options)
