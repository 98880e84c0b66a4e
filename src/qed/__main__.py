"""`python -m qed`, the same as the command `qed`."""

from .cli import app

if __name__ == "__main__":
    app()
