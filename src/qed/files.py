"""Files that are whole or not there: the one way in which this package writes them.

A file is written under another name in the same folder, flushed to disk and renamed. The other name ends in `.part` and
is unique, so that two processes which write the same file do not meet, and it is created anew: a link that lies in wait
under that name is never followed. Permissions are those of a plain `open()` under the process's umask.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

PART = ".part"


def create(path: Path) -> BinaryIO:
    """A new file, opened for writing. Whatever had this name is removed first: a link itself, not what it leads to."""
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    return os.fdopen(os.open(path, flags, 0o666), "wb")


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when the block ends, and disappears if the block raises."""
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PART}")
    try:
        with create(part) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise
    flush(path.parent)


def write_bytes(path: Path, data: bytes) -> None:
    with replacing(path) as file:
        file.write(data)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2) + "\n")


def read_json(path: Path) -> Any:
    """What a JSON file holds; ValueError with its name if that is not JSON, OSError if it cannot be read."""
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected JSON, got something else: {error}") from error


def flush(path: Path) -> None:
    """A file's contents, or a folder's names, onto the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_plain(path: Path) -> None:
    """Give a file that a library wrote the permissions that a file made here has: some write through private ones."""
    probe = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PART}")
    try:
        with create(probe) as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
    finally:
        probe.unlink(missing_ok=True)
    path.chmod(mode)


def remove(path: Path) -> None:
    """A file, a link or a folder with all that is in it; nothing if there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """What processes that were killed while they wrote have left behind. Only for whoever holds the folder's lock."""
    for path in folder.glob(f"*{PART}"):
        remove(path)


def new_folder(path: Path) -> Path:
    """An empty folder of this name, whatever was there before."""
    remove(path)
    path.mkdir(parents=True)
    return path
