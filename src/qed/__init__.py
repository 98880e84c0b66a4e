"""QED: a query-derived second erase direction for linear attention.

S_t = (I − k_t a_tᵀ) Diag(exp g_t) S_{t−1} + k_t (w_t⊙v_t)ᵀ        a_t = b_t⊙k_t + λ·P⊥ₖ(b_t⊙q_t)
"""

from typing import TYPE_CHECKING, Any

from .auto import register
from .explaining import explain
from .kernels.recurrence.settings import use_settings
from .ops import erase_write, erase_write_step
from .rules import RULES, qed_attention

if TYPE_CHECKING:
    from .model import QEDCache, QEDConfig, QEDForCausalLM, QEDModel, Sampling, stream

__version__ = "0.1.0"

__all__ = [
    "RULES",
    "QEDCache",
    "QEDConfig",
    "QEDForCausalLM",
    "QEDModel",
    "Sampling",
    "__version__",
    "erase_write",
    "erase_write_step",
    "explain",
    "qed_attention",
    "stream",
    "use_settings",
]

register()


def __getattr__(name: str) -> Any:
    """The model's classes and functions, imported with transformers when they are first asked for."""
    if name in ("QEDCache", "QEDConfig", "QEDForCausalLM", "QEDModel", "Sampling", "stream"):
        from . import model

        return getattr(model, name)
    raise AttributeError(f"module 'qed' has no attribute {name!r}")
