"""Names that a user may give. An unknown one is refused, and the nearest of those that there are is named."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: object, known: Iterable[str]) -> str:
    """Return the known name that `name` resembles most."""
    return difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.0)[0]


def check_choice(what: str, name: object, known: Iterable[str], more: str = "") -> None:
    """Raise ValueError for a name that is not known.

    Args:
        what: the field, option or argument, with which the message begins.
        name: what was given.
        known: all names that there are.
        more: said at the end of the message, where there is another way to the name.
    """
    known = list(known)
    if name not in known:
        expected = f"expected one of {', '.join(known)}, got {name!r}"
        raise ValueError(f"{what}: {expected}; the nearest is {nearest(name, known)}{more}")
