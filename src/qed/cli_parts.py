"""What commands share: how errors are said, and how texts of options are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console


@contextmanager
def reported(console: Console, *kinds: type[Exception]) -> Iterator[None]:
    """What a user can mend is said in one line of red, with exit status 1."""
    try:
        yield
    except kinds as error:
        console.print(str(error), style="red", markup=False)
        raise typer.Exit(1) from error


def choice(console: Console, option: str, value: str, allowed: Iterable[str]) -> None:
    if value not in allowed:
        names = ", ".join(name or "nothing" for name in allowed)
        console.print(f"{option}: expected one of {names}, got {value}", style="red", markup=False)
        raise typer.Exit(2)


def device_for(name: str) -> str:
    import torch

    return name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def files(data: list[str] | None) -> dict[str, Path]:
    pairs = [item.partition("=") for item in data or []]
    if any(not found for _, found, _ in pairs):
        raise ValueError(f"--data: expected TASK=FILE, got {next(n for n, f, _ in pairs if not f)}")
    return {name: Path(path) for name, _, path in pairs}


def numbers(name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(x) for x in text.split(","))
    except ValueError:
        raise ValueError(f"{name}: expected whole numbers parted by commas, got {text!r}") from None
