"""Ways to spoil a file."""

import json
from collections.abc import Callable
from pathlib import Path

from .drawing import Draw


def flip(draw: Draw, file: Path) -> None:
    """One bit, somewhere."""
    data = bytearray(file.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    file.write_bytes(data)


def truncate(draw: Draw, file: Path) -> None:
    file.write_bytes(file.read_bytes()[: draw.randrange(file.stat().st_size)])


def extend(draw: Draw, file: Path) -> None:
    with file.open("ab") as data:
        data.write(draw.randbytes(draw.randint(1, 40)))


def empty(draw: Draw, file: Path) -> None:
    file.write_bytes(b"")


def garbage(draw: Draw, file: Path) -> None:
    file.write_bytes(draw.randbytes(draw.randint(1, 200)))


def zeros(draw: Draw, file: Path) -> None:
    """What a crash leaves on some file systems: the right size, and nothing in it."""
    file.write_bytes(bytes(file.stat().st_size))


def remove(draw: Draw, file: Path) -> None:
    file.unlink()


def folder_instead(draw: Draw, file: Path) -> None:
    file.unlink()
    file.mkdir()


def no_json_object(draw: Draw, file: Path) -> None:
    """Well-formed, and of another type than anyone expects."""
    file.write_text(json.dumps(draw.choice(([], None, 3, "text", [[]], True, [1, 2], 1e400))))


def other_json(draw: Draw, file: Path) -> None:
    """The same, or an object with other fields."""
    if draw.chance(0.5):
        no_json_object(draw, file)
    else:
        objects = ({}, {"": {}}, {"step": "eight"}, {"weights.safetensors": 1}, {"state.json": None})
        file.write_text(json.dumps(draw.choice(objects)))


ANY: tuple[Callable[[Draw, Path], None], ...] = (
    *(flip, truncate, extend, empty, garbage, zeros, remove, folder_instead),
)
GROSS = tuple(x for x in ANY if x not in (flip, extend))
