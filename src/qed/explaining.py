"""`explain`: of the op or of a model, which route runs and why not the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from . import ops
from .routes import Choice

if TYPE_CHECKING:
    from .model.causal_lm import QEDForCausalLM, QEDModel
    from .model.explaining import Explanation


def explain(what: Tensor | QEDForCausalLM | QEDModel, *arguments: Any, **options: Any) -> Choice | Explanation:
    """Which route runs, and why not the others; prints well. Nothing is computed.

    Args:
        what: a model; or q, the first argument of `erase_write`.
        arguments: the other tensors of `erase_write`, with q.
        options: the named arguments of `erase_write`, with q.
    """
    if isinstance(what, Tensor):
        return ops.explain(what, *arguments, **options)
    from .model.explaining import explain_model

    if arguments or options:
        raise TypeError("explain: expected nothing besides the model")
    return explain_model(what)
