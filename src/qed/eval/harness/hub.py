"""Asks once whether the hub can be reached, before data sets are looked for there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

PATIENCE = 10  # seconds until the hub counts as out of reach


@contextlib.contextmanager
def asked_once() -> Iterator[None]:
    """While data sets are looked for: if the hub cannot be reached, they come from its cache on this machine alone.
    Otherwise each that is not there would be asked for six times, which takes half a minute."""
    import datasets
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    try:
        if not before[0] and not _reachable(constants.ENDPOINT):
            constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def _reachable(address: str) -> bool:
    """Whether anything answers at an address, be it with an error."""
    from huggingface_hub import get_session

    try:
        get_session().head(address, timeout=PATIENCE)
    except Exception:  # whatever the library for requests raises
        return False
    return True


def reason(error: Exception) -> str:
    """Why a data set could not be had, in one line."""
    said = f"{type(error).__name__}: {next(iter(str(error).splitlines()), 'no more is said'):.200}"
    return said.replace("OfflineModeIsEnabled", "the hub does not answer, or HF_HUB_OFFLINE is set")
