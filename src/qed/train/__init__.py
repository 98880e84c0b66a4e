"""Training: a recipe, a loop that loses nothing, and what is written while it runs."""

from .config import TrainConfig

__all__ = ["TrainConfig"]
