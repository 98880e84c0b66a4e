"""QED: a query-derived second erase direction for linear attention.

S_t = (I − k_t a_tᵀ) Diag(exp g_t) S_{t−1} + k_t (w_t⊙v_t)ᵀ        a_t = b_t⊙k_t + λ·P⊥ₖ(b_t⊙q_t)
"""

from .ops import erase_write, erase_write_step, explain
from .rules import RULES, qed_attention

__version__ = "0.1.0"

__all__ = ["RULES", "__version__", "erase_write", "erase_write_step", "explain", "qed_attention"]
