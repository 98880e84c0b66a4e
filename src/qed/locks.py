"""One process at a time in a folder, on one machine or on several that share it.

Whoever wants a lock creates a file of its own, `.NAME.KERNEL-PID-TOKEN.lock`, and then looks for others. If a living
process has one, ours is removed again and the lock is refused or waited for; if there is none, the lock is ours. Two
processes cannot both succeed, since each creates its file before it looks. Names are never used twice, so that a dead
process's file may be removed by anyone at any time.

Whether a file's process is alive is known in two ways. While it lives it holds the kernel's lock (`flock`) on its file,
which ends with the process however it dies: that decides between processes of one kernel, without trusting process
numbers, which are used again. From another machine, or where a file system has no such locks, the file's time counts:
its process renews it every BEAT seconds, and after STALE seconds without that it is taken for dead. Times are compared
with that of our own file on the same file system, so that clocks need not agree.
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
    """Another process is at work there."""


@dataclass
class Lock:
    """A lock that is held. `check` says whether it still is."""

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
        """Before something is written: a process that was stopped for long may have been taken for dead."""
        if not self.path.exists():
            raise LockedError(f"{self.path.parent}: this process's lock was taken over while it did not respond")

    def release(self) -> None:
        self.released.set()
        with suppress(OSError):
            self.path.unlink(missing_ok=True)
        os.close(self.handle)


@contextmanager
def held(
    folder: Path, name: str, *, wait: bool = False, say: Callable[[str], object] = lambda _: None
) -> Iterator[Lock]:
    """The lock `name` of a folder, which is made if it is not there. If another process has it, LockedError; or, with
    `wait`, `say` is told whom we wait for."""
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
                # Only a holder's file says who it is: an empty one belongs to somebody who is looking, as we are.
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
    """Who else has the lock or wants it, empty for one who only wants it; None if nobody does."""
    _flock(handle, fcntl.LOCK_EX)
    if not path.exists():  # removed as a dead process's, between its creation and its lock
        return ""
    now = os.stat(path).st_mtime
    name = path.name.split(".")[1]
    others = [_alive(other, now) for other in path.parent.glob(f".{name}.*.lock") if other != path]
    living = [other for other in others if other is not None]
    return max(living, default=None)


def _alive(path: Path, now: float) -> str | None:
    """Of a living process's file what it says of itself; a dead one's is removed."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        free = _flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        same = path.name.split(".")[2].startswith(_kernel() + "-")
        silent = now - os.fstat(handle).st_mtime > STALE
        if (free and same) or (free is not False and silent):
            path.unlink(missing_ok=True)  # while we have its lock: nobody gets it in between
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
    """Whether the kernel's lock was had; None where there are none."""
    try:
        fcntl.flock(handle, kind)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _kernel() -> str:
    """This kernel until its next start; with namespaces a machine's name may stand for several, or several for one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    except OSError:
        return platform.node().encode().hex()


def _self() -> dict[str, object]:
    return {"pid": os.getpid(), "host": platform.node(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
