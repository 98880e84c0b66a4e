"""The mathematics: one recurrence, three forms. Imports torch only.

reference (the definition) → decay and chunkwise (the chunk form) → registration (torch operators) → api.
"""

from .api import erase_write, erase_write_step, explain
from .validation import value_checks

__all__ = ["erase_write", "erase_write_step", "explain", "value_checks"]
