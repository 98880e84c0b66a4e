"""One process at a time in a folder, on one machine or on several that share it.

A process that wants a lock creates a file of its own, `.NAME.KERNEL-PID-TOKEN.lock`, and then looks for others. If a
living process has one, ours is removed again and the lock is refused or waited for; if there is none, the lock is ours.
Two processes cannot both succeed, since each creates its file before it looks. Names are never used twice, so that
anyone may remove a dead process's file at any time.

There are two ways to know whether a file's process is alive. While it lives it holds the kernel's lock (`flock`) on its
file, which ends with the process however it dies. That decides between processes of one kernel, without trusting
process numbers, which are reused. On another machine, or where a file system has no such locks, the file's modification
time counts: its process renews it every BEAT seconds, and after STALE seconds without renewal it is considered dead.
Times are compared with that of our own file on the same file system, so that clocks need not agree.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

BEAT, STALE = 15.0, 120.0  # seconds
PAUSE = 0.5  # seconds between looks at a lock that is waited for


class LockedError(OSError):
    """Another process is working in the folder."""


@dataclass
class Lock:
    """A lock that this process holds; `check` raises if it no longer does."""

    path: Path
    handle: int

    def __post_init__(self) -> None:
        self.released = threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        while not self.released.wait(BEAT):
            with suppress(OSError):
                os.utime(self.path)

    def check(self) -> None:
        """Raise LockedError if the lock was lost. A process that was suspended for long may count as dead, so it
        calls this before it writes."""
        if not self.path.exists():
            raise LockedError(f"{self.path.parent}: this process's lock was taken over while it did not respond")

    def release(self) -> None:
        """Give the lock up and remove its file."""
        self.released.set()
        with suppress(OSError):
            self.path.unlink(missing_ok=True)
        os.close(self.handle)


@contextmanager
def held(
    folder: Path, name: str, *, wait: bool = False, say: Callable[[str], object] = lambda _: None
) -> Iterator[Lock]:
    """Hold a lock of a folder while the block runs; LockedError if another process holds it and `wait` is false.

    Args:
        folder: The folder, which is made if it is not there, and removed again if it is empty in the end.
        name: The lock's name; locks of different names do not exclude each other.
        wait: Wait until the lock is free instead of raising.
        say: Called with a line of text that says which process we wait for.
    """
    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _acquire(folder, name, wait, say)
    except LockedError:
        raise
    except OSError as error:
        if made:
            _remove_if_empty(folder)
        raise OSError(f"{folder}: expected a folder in which files can be made and locked, got: {error}") from error
    try:
        yield lock
    finally:
        lock.release()
        if made:
            _remove_if_empty(folder)


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _acquire(folder: Path, name: str, wait: bool, say: Callable[[str], object]) -> Lock:
    told, longest = "", 0.01
    while True:
        path = folder / f".{name}.{_kernel()}-{os.getpid()}-{secrets.token_hex(4)}.lock"
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            holder = _holder(path, handle)
            if holder is None:
                # Only a holder's file says who it is: an empty one belongs to a process that still looks, as we do.
                os.write(handle, json.dumps(_self()).encode())
                return Lock(path, handle)
        except BaseException:
            _withdraw(path, handle)
            raise
        _withdraw(path, handle)
        if holder and not wait:
            raise LockedError(f"{folder}: {holder} is at work there; wait for it, or stop it")
        if holder and holder != told:
            say(f"{folder}: waiting for {holder}")
            told = holder
        time.sleep(PAUSE if holder else random.uniform(0, longest))
        longest = min(2 * longest, PAUSE)


def _withdraw(path: Path, handle: int) -> None:
    path.unlink(missing_ok=True)
    os.close(handle)


def _holder(path: Path, handle: int) -> str | None:
    """Return who else holds the lock; empty if another process only wants it, None if nobody does."""
    _flock(handle, fcntl.LOCK_EX)
    if not path.exists():  # removed as a dead process's, between its creation and its lock
        return ""
    now = os.stat(path).st_mtime
    name = path.name.split(".")[1]
    others = [_alive(other, now) for other in path.parent.glob(f".{name}.*.lock") if other != path]
    living = [other for other in others if other is not None]
    return max(living, default=None)


def _alive(path: Path, now: float) -> str | None:
    """Return what a living process's file says about it; remove a dead one's and return None."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        free = _flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        same = path.name.split(".")[2].startswith(_kernel() + "-")
        silent = now - os.fstat(handle).st_mtime > STALE
        if (free and same) or (free is not False and silent):
            path.unlink(missing_ok=True)  # while we hold its kernel lock, so that nobody takes it in between
            return None
        return _described(os.read(handle, 4096))
    finally:
        os.close(handle)


def _described(data: bytes) -> str:
    try:
        about = json.loads(data)
        return f"process {about['pid']} on {about['host']}, since {about['since']},"
    except (ValueError, KeyError, TypeError):
        return ""


def _flock(handle: int, kind: int) -> bool | None:
    """Try to take the kernel's lock: True if it was taken, False if not, None where there are no such locks."""
    try:
        fcntl.flock(handle, kind)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _kernel() -> str:
    """Identify this kernel until its next start. A host's name does not: with namespaces several may share one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    except OSError:
        return platform.node().encode().hex()


def _self() -> dict[str, object]:
    return {"pid": os.getpid(), "host": platform.node(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
