"""Values of a configuration's fields: how text becomes one, and whether it is what the annotation says."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any


def field_types(kind: type) -> dict[str, str]:
    """The fields of a dataclass by name, each with its annotation as text."""
    types = {x.name: x.type for x in dataclasses.fields(kind)}
    return {name: x.__name__ if isinstance(x, type) else str(x) for name, x in types.items()}


def documented(kind: Any, part: str = "Attributes:") -> dict[str, str]:
    """What the last part of a docstring says about each attribute of a class, or of a function about each argument
    (`part` is "Args:"), in lines `name: text`."""
    lines = (kind.__doc__ or "").partition(part)[2].splitlines()
    pairs = [line.strip().partition(": ") for line in lines if ": " in line]
    return {name: text for name, _, text in pairs}


def check_type(name: str, kind: str, value: Any) -> None:
    """Raise ValueError unless the value is of the annotated type, and finite.

    Args:
        name: the field's name, for the message.
        kind: its annotation as text, such as "int".
        value: what was given for it.
    """
    expected, right = {
        "int": ("a whole number", is_number(value) and isinstance(value, int)),
        "float": ("a number", is_number(value)),
        "bool": ("true or false", isinstance(value, bool)),
        "str": ("a text", isinstance(value, str)),
        "str | None": ("a text, or nothing", value is None or isinstance(value, str)),
        "tuple[float, float]": (
            "two numbers, such as [0.9, 0.95]",
            isinstance(value, tuple) and len(value) == 2 and all(map(is_number, value)),
        ),
        "dict[str, Any]": ("fields by name", isinstance(value, dict)),
    }[kind]
    if not right:
        raise ValueError(f"{name}: expected {expected}, got {value!r}")


def is_number(value: Any) -> bool:
    """Whether the value is a finite number; true and false are not numbers."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # no float can stand for a whole number as large as this one
        return False


def parse_field(text: str, kind: str) -> Any:
    """Read a field's value. A text stays the text it is, though it may look like a number: data=2024 is a folder."""
    if kind == "str":
        return text
    value = parse(text)
    if kind == "int" and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind == "str | None":
        return None if value is None else text
    return tuple(value) if isinstance(value, list) else value


def parse(text: str) -> Any:
    """Read JSON, or take the text itself where it is none; 1e9 is a whole number."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) >= 1e3 else value
