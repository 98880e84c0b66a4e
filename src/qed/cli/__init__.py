"""The command line, `qed`."""

from .main import app

__all__ = ["app"]
