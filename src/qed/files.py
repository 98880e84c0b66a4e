"""How this package writes files: a file is complete or it is not there.

A file is written under another name in the same folder, flushed to disk and renamed. The other name ends in `.part` and
is unique, so that two processes which write the same file do not disturb each other. It is always created anew, so that
an existing link of that name is never followed. Permissions are those of a plain `open()` under the process's umask.
"""

from __future__ import annotations

import json
import lzma
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

PART = ".part"


def create(path: Path) -> BinaryIO:
    """Open a new file for writing. Whatever had this name is removed first: a link itself, not what it points to."""
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    return os.fdopen(os.open(path, flags, 0o666), "wb")


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that replaces `path` when the block ends, and that is removed if the block raises."""
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
    """Write a file with this content, completely or not at all."""
    with replacing(path) as file:
        file.write(data)


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8, completely or not at all."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON, completely or not at all."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def read_json(path: Path, what: str = "") -> Any:
    """Read a JSON file, or one packed as .xz.

    Content that is not JSON is a ValueError that names the file; a file that cannot be read is an OSError. If `what`
    says what the file should hold, such as "a result of `qed eval`", only an object is accepted, and everything else,
    also a file that cannot be read, is a ValueError that says so.
    """
    try:
        raw = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
        content = json.loads(raw.decode("utf-8"))
    except (OSError, ValueError, RecursionError, lzma.LZMAError) as error:
        if isinstance(error, OSError) and not what:
            raise
        raise ValueError(f"{path}: expected {what or 'JSON'}, got: {error}") from error
    if what and not isinstance(content, dict):
        raise ValueError(f"{path}: expected {what}, got JSON of type {type(content).__name__}")
    return content


def flush(path: Path) -> None:
    """Flush a file's contents, or the names in a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_plain(path: Path) -> None:
    """Give a file that a library wrote the permissions of a file made here; some libraries write private files."""
    probe = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PART}")
    try:
        with create(probe) as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
    finally:
        probe.unlink(missing_ok=True)
    path.chmod(mode)


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with everything in it; do nothing if there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Remove the partial files of processes that were killed. Only the process that holds the folder's lock may."""
    for path in folder.glob(f"*{PART}"):
        remove(path)


def new_folder(path: Path) -> Path:
    """Make an empty folder of this name, removing whatever was there before."""
    remove(path)
    path.mkdir(parents=True)
    return path
