"""Training: the configuration of a run, the loop that resumes wherever it stopped, and what is written meanwhile."""

from .config import TrainConfig

__all__ = ["TrainConfig"]
