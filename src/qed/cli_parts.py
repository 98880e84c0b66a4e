"""What all commands share: how errors are said, how text reaches the terminal, how options are read and checked."""

from __future__ import annotations

import difflib
import errno
import io
import math
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperGroup

INTERRUPTED = 130  # the shell's exit status of a program that Ctrl-C ended
LARGEST_SEED = 2**32 - 1  # that Python, NumPy and PyTorch all take
LARGEST_SIZE = 2**24  # tokens or samples: what is larger is a slip of the hand
LARGEST_WIDTH = 2**13  # heads, or channels of one
# Packages that only some commands need, and what brings them.
INSTALLED_BY = {
    **dict.fromkeys(("matplotlib", "scipy"), "'qed-attention[analysis]'"),
    **dict.fromkeys(("datasets", "pyarrow"), "'qed-attention[data]'"),
    **dict.fromkeys(("accelerate", "lm_eval", "nltk", "wonderwords"), "'qed-attention[eval]'"),
    "fla": "flash-linear-attention",
    "tensorboard": "'qed-attention[tensorboard]'",
}


def console_for(*, stderr: bool = False) -> Console:
    """A console that prints text as it is: a folder named `o[/b]` is no markup, and line :100: no emoji."""
    return Console(stderr=stderr, markup=False, emoji=False)


@contextmanager
def reported(*kinds: type[Exception]) -> Iterator[None]:
    """An error of these kinds is said in one red line, and the command ends with status 1."""
    try:
        yield
    except kinds as error:
        if isinstance(error, OSError) and error.errno == errno.EPIPE:
            raise  # nobody reads what is printed any more: the command line's own library ends quietly
        said = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, ImportError):
            what = INSTALLED_BY.get((error.name or "").partition(".")[0])
            said += f"; this command needs pip install {what}" if what else ""
        console_for(stderr=True).print(said, style="red", soft_wrap=True, highlight=False)
        raise typer.Exit(1) from error


class Commands(TyperGroup):
    """All commands, and the one place where errors that a user can mend lose their traceback.

    Those are wrong values (ValueError), files (OSError), packages that are not installed (ImportError) and too little
    memory. Anything else is a fault of the program, whose traceback is needed to mend it.
    """

    def main(self, *arguments: Any, **named: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # names of files need not be text that can be printed
                stream.reconfigure(errors="backslashreplace")
        return super().main(*arguments, **named)

    def invoke(self, context: Any) -> Any:
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
    """PyTorch has a class for this on a GPU, and none on a CPU."""
    return type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)


def choice(option: str, value: str, allowed: Iterable[str]) -> None:
    if value not in allowed:
        known = [name or "nothing" for name in allowed]
        nearest = difflib.get_close_matches(value, known, n=1, cutoff=0.0)[0]
        raise ValueError(f"{option}: expected one of {', '.join(known)}, got {value!r}; the nearest is {nearest}")


def device_for(name: str) -> str:
    """`name`, or for "auto" the first GPU if there is one; refused if there is no such device here."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return "cuda" if count else "cpu"
    there = ["cpu", *(["cuda"] if count else []), *(f"cuda:{i}" for i in range(count))]
    if name not in there:
        raise ValueError(f"--device: expected auto or what is here ({', '.join(there)}), got {name!r}")
    return name


def finite(parameter: typer.CallbackParam, value: float | None) -> float | None:
    """For options that are numbers: neither NaN nor infinite, which ranges let through."""
    if value is not None and not math.isfinite(value):
        raise ValueError(f"{parameter.opts[0]}: expected a finite number, got {value}")
    return value


def assignments(items: list[str] | None) -> dict[str, str]:
    """field=value of --set, each field once."""
    found: dict[str, str] = {}
    for item in items or []:
        field, separator, value = item.partition("=")
        if not separator or not field:
            raise ValueError(f"--set: expected field=value, got {item!r}")
        if field in found:
            raise ValueError(f"--set: expected one value of {field}, got {found[field]!r} and {value!r}")
        found[field] = value
    return found


def files(data: list[str] | None, allowed: Iterable[str]) -> dict[str, Path]:
    """TASK=FILE of the tasks in `allowed`, each once; and every file or folder is there."""
    allowed, found = list(allowed), dict[str, Path]()
    for item in data or []:
        task, separator, path = item.partition("=")
        if not separator or not path:
            raise ValueError(f"--data: expected TASK=FILE, got {item!r}")
        if task not in allowed:
            of_these = f"a file of {', '.join(allowed)}, the tasks asked for that read one"
            wanted = of_these if allowed else "nothing, since no task asked for reads a file"
            raise ValueError(f"--data: expected {wanted}, got {item!r}")
        if task in found:
            raise ValueError(f"--data: expected one file for {task}, got {found[task]} and {path}")
        if not Path(path).exists():
            raise ValueError(f"--data: expected a file for {task}, got {path}, which does not exist")
        found[task] = Path(path)
    return found


def names(option: str, items: list[str] | None, allowed: Iterable[str] | None) -> list[str]:
    """Given one by one or parted by commas; any at all if `allowed` is None."""
    found = [name.strip() for item in items or [] for name in item.split(",")]
    for name in found if allowed is not None and all(found) else []:
        choice(option, name, allowed or ())
    if not found or not all(found):
        wanted = "names parted by commas" if allowed is None else f"one or more of {', '.join(allowed)}"
        raise ValueError(f"{option}: expected {wanted}, got {','.join(found) or 'none'!r}")
    return found


def numbers(option: str, text: str, least: int, most: int) -> tuple[int, ...]:
    """Whole numbers in a range, parted by commas."""
    try:
        found = tuple(int(x) for x in text.split(","))
    except ValueError:
        raise ValueError(f"{option}: expected whole numbers parted by commas, got {text!r}") from None
    for number in found:
        if not least <= number <= most:
            raise ValueError(f"{option}: expected numbers from {least} to {most}, got {number}")
    return found


def factors(option: str, text: str) -> tuple[float, ...]:
    """Finite numbers, each once, parted by commas."""
    try:
        found = tuple(float(x) for x in text.split(","))
    except ValueError:
        raise ValueError(f"{option}: expected numbers parted by commas, got {text!r}") from None
    if not all(map(math.isfinite, found)) or len(set(found)) < len(found):
        raise ValueError(f"{option}: expected finite numbers, each once, got {text!r}")
    return found


def existing(option: str, path: Path | None, *, folder: bool) -> Path | None:
    """Refuse a file or folder that is not there, whether or not a task will read it."""
    if path is not None and not (path.is_dir() if folder else path.is_file()):
        raise ValueError(f"{option}: expected a {'folder' if folder else 'file'}, got {path}")
    return path


def writable(option: str, path: Path, *, folder: bool) -> Path:
    """Refuse, before any work, a path at which no such folder or file can be written."""
    if folder and path.exists() and not path.is_dir():
        raise ValueError(f"{option}: expected a folder, got the file {path}")
    if not folder and path.is_dir():
        raise ValueError(f"{option}: expected a file, got the folder {path}")
    where = (path if folder else path.parent).absolute()
    nearest = next(x for x in (where, *where.parents) if x.exists())
    if not nearest.is_dir():
        raise ValueError(f"{option}: expected a path below folders, got {path}: {nearest} is a file")
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise ValueError(f"{option}: expected a path that can be written, got {path}: {error}") from error
    return path
