"""The command line, `qed`. Every command is a thin layer over a function of the library, which it imports lazily."""

from .main import app

__all__ = ["app"]
