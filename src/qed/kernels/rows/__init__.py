"""Norms and SwiGLU's product: one pass over rows of numbers."""
