"""One process at a time: others wait or are refused, the dead are taken over at once, whoever starts together."""

import errno
import json
import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from qed import locks
from qed.locks import LockedError, held

FORK = multiprocessing.get_context("fork")  # a fresh interpreter takes seconds to import everything


def _hold(folder: Path, has: Connection) -> None:
    with held(folder, "x"):
        has.send("held")
        time.sleep(60)


def holder(folder: Path) -> BaseProcess:
    here, there = FORK.Pipe()
    process = FORK.Process(target=_hold, args=(folder, there), daemon=True)
    process.start()
    assert here.recv() == "held"
    return process


def record(folder: Path, kernel: str = "otherkernel", age: float = 0) -> Path:
    """A lock as another machine would have left it."""
    path = folder / f".x.{kernel}-77-abc.lock"
    path.write_text(json.dumps({"pid": 77, "host": "elsewhere", "since": "noon"}))
    os.utime(path, (time.time() - age,) * 2)
    return path


def test_another_process_is_refused_until_this_one_is_dead(tmp_path: Path) -> None:
    process = holder(tmp_path / "a")
    with pytest.raises(LockedError, match=rf"process {process.pid} on .* is at work there"), held(tmp_path / "a", "x"):
        pass
    with held(tmp_path / "a", "another name"):
        pass
    process.kill()
    process.join()
    assert list((tmp_path / "a").iterdir())  # it left its file
    with held(tmp_path / "a", "x"):
        assert len(list((tmp_path / "a").iterdir())) == 1
    assert not list((tmp_path / "a").iterdir())


def test_waiting_says_for_whom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "PAUSE", 0.01)
    process, said = holder(tmp_path), []

    def say(text: str) -> None:
        said.append(text)
        process.kill()

    with held(tmp_path, "x", wait=True, say=say):
        assert said[0].startswith(f"{tmp_path}: waiting for process {process.pid} on ")
    assert len(said) == 1


def test_another_machine_counts_by_its_heartbeat(tmp_path: Path) -> None:
    path = record(tmp_path, age=locks.STALE / 2)
    with pytest.raises(LockedError, match="process 77 on elsewhere, since noon, is at work there"), held(tmp_path, "x"):
        pass
    assert path.exists()
    record(tmp_path, age=2 * locks.STALE)
    with held(tmp_path, "x"):
        assert not path.exists()


def test_a_living_process_renews_its_lock_and_knows_when_it_lost_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "BEAT", 0.01)
    with held(tmp_path, "x") as lock:
        os.utime(lock.path, (0, 0))
        end = time.monotonic() + 10
        while lock.path.stat().st_mtime == 0:
            assert time.monotonic() < end
            time.sleep(0.01)
        lock.check()
        lock.path.unlink()
        with pytest.raises(LockedError, match="was taken over"):
            lock.check()


def test_where_the_kernel_has_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The heartbeat alone decides, on the same machine too."""

    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(locks.fcntl, "flock", unsupported)
    with held(tmp_path, "x"), pytest.raises(LockedError), held(tmp_path, "x"):
        pass
    path = record(tmp_path, kernel=locks._kernel(), age=2 * locks.STALE)
    with held(tmp_path, "x"):
        assert not path.exists()


def test_a_folder_that_cannot_be_locked(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(OSError, match=r"file: expected a folder in which files can be made and locked"),
        held(tmp_path / "file", "x"),
    ):
        pass
    with held(tmp_path / "new", "x"):
        pass
    assert not (tmp_path / "new").exists()  # nothing was put there


def _count(folder: Path, start: float, deaths: int) -> None:
    """Adds one to a number, slowly enough for others to get in between; some die on the way, with the lock."""
    time.sleep(max(0, start - time.time()))
    locks.PAUSE = 0.02
    with held(folder, "x", wait=True):
        number = int((folder / "number").read_text())
        time.sleep(0.005)
        if os.getpid() % 4 < deaths:
            os.kill(os.getpid(), signal.SIGKILL)
        (folder / "number").write_text(str(number + 1))


@pytest.mark.slow
def test_processes_started_together_take_turns(tmp_path: Path) -> None:
    """Twenty times eight at once, over a dead process's lock, with some that die holding it."""
    for attempt in range(20):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        (folder / "number").write_text("0")
        dead = record(folder, kernel=locks._kernel())
        start = time.time() + 0.05
        processes = [FORK.Process(target=_count, args=(folder, start, attempt % 2)) for _ in range(8)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        finished = sum(process.exitcode == 0 for process in processes)
        assert finished == int((folder / "number").read_text())
        assert finished == 8 or attempt % 2
        assert not dead.exists()
