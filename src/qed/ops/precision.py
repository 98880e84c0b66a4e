"""Which precision the recurrence is computed and its state kept in."""

from __future__ import annotations

import torch


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays float64; everything else is computed, and its state kept, in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
