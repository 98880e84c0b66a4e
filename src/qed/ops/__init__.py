"""The mathematics: one recurrence, three forms. Its only dependency is torch.

Read it in this order: reference (the definition) → decay and chunkwise (the chunk form) → operators (torch operators)
→ routes (which form runs) → api.
"""

from .api import erase_write, erase_write_step, explain
from .validation import value_checks

__all__ = ["erase_write", "erase_write_step", "explain", "value_checks"]
