"""`python -m qed.cli`, the way torchrun starts the command line."""

from . import app

if __name__ == "__main__":
    app()
