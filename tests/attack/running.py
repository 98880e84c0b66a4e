"""The large run: all cases over two processes, with the time left, and a table of what was tried and what failed.

A case that kills its process, or takes longer than any case may, is a failure like another: the process is replaced.
"""

import multiprocessing
import os
import platform
import random
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from importlib.metadata import version
from multiprocessing.connection import Connection, wait
from typing import Any

PROCESSES = 2
LONGEST_S = 240  # a case takes milliseconds, at most seconds
BEGIN, END = "<!-- table -->", "<!-- end of table -->"


@dataclass(frozen=True)
class Failure:
    fuzzer: str
    seed: int
    error: str


@dataclass
class Worker:
    """A process that runs one case at a time."""

    process: Any = None
    connection: Any = None
    case: tuple[str, int] | None = None
    since: float = 0.0

    def start(self, case: tuple[str, int]) -> None:
        if self.process is None:
            context = multiprocessing.get_context("spawn")
            self.connection, other = context.Pipe()
            self.process = context.Process(target=_work, args=(other,))
            self.process.start()
            other.close()
        self.case, self.since = case, time.monotonic()
        self.connection.send(case)

    def end(self) -> int | None:
        """Stop the process; its exit status, if it stopped by itself."""
        if self.process is None:
            return None
        self.connection.close()  # which ends a process that waits for a case
        self.process.join(5)
        status = self.process.exitcode
        if status is None:
            self.process.kill()
            self.process.join()
        self.process = None
        return status

    def result(self, *, late: bool) -> str | None:
        """What is wrong with the case that was running, None if nothing is."""
        assert self.case is not None
        try:
            if late:
                raise TimeoutError
            error = self.connection.recv()
        except TimeoutError:
            self.end()
            error = f"not done after {LONGEST_S} seconds"
        except (EOFError, OSError):
            error = f"the process died with status {self.end()}"
        self.case = None
        return error


def _work(connection: Connection) -> None:
    import torch

    from .table import BY_NAME

    torch.set_num_threads(1)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    while True:
        try:
            name, seed = connection.recv()
        except EOFError:
            return
        try:
            BY_NAME[name].case(seed)
            connection.send(None)
        except BaseException as error:
            connection.send(f"{type(error).__name__}: {error}"[:1000])


@dataclass
class Progress:
    """One line, written over, with the time that is left."""

    total: int
    start: float = field(default_factory=time.monotonic)
    said: float = 0.0

    def say(self, done: int, failed: int) -> None:
        now = time.monotonic()
        if now - self.said < (1 if sys.stderr.isatty() else 30) and done < self.total:
            return
        self.said = now
        left = (now - self.start) * (self.total - done) / max(1, done)
        text = f"{done:,} of {self.total:,} cases, {failed} failed, {left / 60:.0f} min left"
        print(
            f"\r\033[K{text}" if sys.stderr.isatty() else text, end="" if done < self.total else "\n", file=sys.stderr
        )
        if not sys.stderr.isatty() and done < self.total:
            print(file=sys.stderr)


def run(cases: list[tuple[str, int]]) -> list[Failure]:
    """All of them, in an order that spreads the slow ones evenly, so that the time left can be told."""
    todo, failures, done = list(cases), [], 0
    random.Random(0).shuffle(todo)
    workers, progress = [Worker() for _ in range(min(PROCESSES, len(todo)))], Progress(len(todo))
    try:
        for worker in workers:
            worker.start(todo.pop())
        while busy := [worker for worker in workers if worker.case is not None]:
            ready = wait([worker.connection for worker in busy], timeout=1)
            for worker in busy:
                late = time.monotonic() - worker.since > LONGEST_S
                if worker.connection not in ready and not late:
                    continue
                (name, seed), error = worker.case, worker.result(late=late)
                done += 1
                if error is not None:
                    failures.append(Failure(name, seed, error))
                progress.say(done, len(failures))
                if todo:
                    worker.start(todo.pop())
    finally:
        for worker in workers:
            worker.end()
    return sorted(failures, key=lambda x: (x.fuzzer, x.seed))


def table(cases: list[tuple[str, int]], failures: list[Failure], seconds: float) -> str:
    """Markdown: a row a fuzzer, and what it was run with."""
    from .table import FUZZERS

    tried, failed = Counter(name for name, _ in cases), Counter(x.fuzzer for x in failures)
    rows = ["| fuzzer | what holds, whatever is tried | tried | failed |", "|---|---|---|---|"]
    for x in FUZZERS:
        if tried[x.name]:
            unit = "" if x.unit == "cases" else f" {x.unit}"
            rows.append(f"| `{x.name}` | {x.what} | {tried[x.name] * x.each:,}{unit} | {failed[x.name]} |")
    kills = sum(tried[x.name] * x.each for x in FUZZERS if x.unit == "kills")
    others = sum(tried[x.name] for x in FUZZERS if x.unit == "cases")
    rows.append(f"| all | | {others:,} cases and {kills:,} kills | {len(failures)} |")
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "triton", "transformers"))
    about = f"{PROCESSES} processes, {seconds / 60:.0f} minutes; Python {platform.python_version()}, {packages}."
    return "\n".join([*rows, "", about])


def failed_list(failures: list[Failure]) -> str:
    return "\n".join(
        f"{x.fuzzer}, seed {x.seed}: {x.error.splitlines()[0][:300]}\n    make attack ONLY={x.fuzzer} SEED={x.seed}"
        for x in failures
    )


def written(page: str, content: str) -> str:
    """The page with other content between its markers."""
    before, found, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not found or not end:
        raise ValueError(f"expected the lines {BEGIN} and {END}, got a page without them")
    return f"{before}{BEGIN}\n{content}\n{END}{after}"


def once(name: str, seed: int) -> bool:
    """One case in this process, with its traceback."""
    from .table import BY_NAME

    try:
        BY_NAME[name].case(seed)
    except BaseException:
        traceback.print_exc()
        return False
    return True
