"""What all benchmarks share: how they take time, how candidates take turns, and where the numbers go."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ..files import write_json
from ..provenance import environment

WARM_UP = 3  # rounds that do not count


class GateError(RuntimeError):
    """What was to be timed does not compute the right result here."""


class Report(dict[str, Any]):
    """What has been measured so far. It is written after every stage, so that an interrupted run keeps what it had."""

    def __init__(self, out: Path | None, **values: Any):
        super().__init__(values)
        self.out = out

    def add(self, **values: Any) -> None:
        """Add values by name, and write the file if there is one to write."""
        self |= values
        if self.out is not None:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.out, self)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What every benchmark is told: where it prints and writes, where it runs, and whether fla is timed too."""

    console: Console
    device: str
    out: Path | None = None  # a JSON file
    fla: bool = False  # flash-linear-attention's GDN-2, in the same run

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.startswith("cuda")

    def report(self, **values: Any) -> Report:
        """Begin a report with this environment and these values."""
        return Report(self.out, environment=environment(self.device), **values)

    def take_turns(
        self, calls: Mapping[str, Callable[[], object]], rounds: int, warm_up: int = WARM_UP
    ) -> dict[str, dict[str, float]]:
        """Time every candidate `rounds` times; return the median and quartiles of its milliseconds.

        Candidates take turns call by call, so that all meet the same machine, and in a new order every round, since
        each call leaves clocks and caches in a state that the next one feels.

        Args:
            calls: The candidates by name.
            rounds: Calls of each that count.
            warm_up: Calls of each before these, which do not count.
        """
        times: dict[str, list[float]] = {name: [] for name in calls}
        order = random.Random(0)
        for i in track(range(rounds + warm_up), description=", ".join(calls)[:60], console=self.console):
            for name in order.sample(list(calls), len(calls)):
                took = milliseconds(self.device, calls[name])
                if i >= warm_up:
                    times[name].append(took)
        quartiles = {}
        for name, x in times.items():
            lower, median, upper = statistics.quantiles(x, n=4, method="inclusive") if len(x) > 1 else x * 3
            quartiles[name] = {"median": median, "lower_quartile": lower, "upper_quartile": upper}
        return quartiles

    def print_row(self, title: str, row: dict[str, str]) -> None:
        """Print a table of one row, whose columns are the row's names."""
        table = Table(*row, title=title)
        table.add_row(*row.values())
        self.console.print(table)

    def say_written(self) -> None:
        """Say where the report is, if it was written."""
        if self.out is not None:
            self.console.print(f"written to {self.out}", markup=False)


def milliseconds(device: str, call: Callable[[], object]) -> float:
    """Return the milliseconds of one call, before which the device is idle; on a GPU by its own clock."""
    if not device.startswith("cuda"):
        return seconds(device, call) * 1e3
    start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start_event.record()
    call()
    end_event.record()
    torch.cuda.synchronize()
    return float(start_event.elapsed_time(end_event))


def seconds(device: str, call: Callable[[], object]) -> float:
    """Return the seconds of one call on the wall clock, until the device has finished."""
    _synchronize(device)
    start = time.perf_counter()
    call()
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
