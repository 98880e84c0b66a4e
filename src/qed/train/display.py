"""How a run is shown while it trains: as a bar on a terminal, and elsewhere, or if asked for, in a line per step."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from .config import TrainConfig

REFRESH = 0.5  # seconds between two drawings of the bar
PACE = 300  # seconds over which the pace is averaged that tells the time left
SHORTEST_BAR, LONGEST_BAR = 6, 40  # columns
BESIDE = 5  # columns that are left free: two between the parts, and three at the end, where Ctrl-C writes ^C


def clock(seconds: float) -> str:
    """Seconds as hours, minutes and seconds: 1:02:03, or 2:03 where there are no hours."""
    minutes, rest = divmod(max(0, math.ceil(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def fitting(texts: list[str], width: int) -> str:
    """The first of these texts that fits into so many columns; the last one if none does."""
    return next((text for text in texts if cell_len(text) <= width), texts[-1])


class Display:
    """What a run prints. It never fails: where nobody reads any more, `closed` is set and nothing else is printed."""

    def __init__(self, console: Console, config: TrainConfig, *, lines: bool = False):
        """
        Args:
            console: where to print.
            config: the run.
            lines: print a line every `log_every` steps on a terminal too, instead of a bar.
        """
        self.console, self.config, self.closed = console, config, False
        self.row: dict[str, Any] | None = None  # the last step's
        self.validation_loss: float | None = None  # the last one
        self.tokens_per_s = 0.0  # averaged over some ten steps
        self.drawn = -math.inf  # when the bar was last drawn
        self.bar: Progress | None = None
        if not lines and console.is_terminal and not console.is_dumb_terminal and not console.quiet:
            texts = [TextColumn(f"{{task.{name}}}", markup=False) for name in ("description", "fields[said]")]
            self.length = BarColumn(bar_width=LONGEST_BAR)
            columns = (texts[0], self.length, texts[1])
            self.bar = Progress(*columns, console=console, auto_refresh=False, speed_estimate_period=PACE)

    @contextmanager
    def running(self, step: int, validation_loss: float | None) -> Iterator[None]:
        """Show the bar of a run that begins at this step, and had this validation loss last, until the block ends."""
        self.validation_loss = validation_loss
        if step == self.config.steps:
            self.bar = None  # nothing is left to do
        if self.bar is not None:
            self.bar.add_task("", total=self.config.steps, completed=step, said="")
            self._draw(self.bar)
            self._guarded(self.bar.start)
        try:
            yield
        finally:
            if self.bar is not None:
                self._draw(self.bar)
                self._guarded(self.bar.stop)

    def say(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        self._guarded(lambda: self.console.print(text, markup=False, highlight=False, soft_wrap=True))

    def step(self, row: dict[str, Any]) -> None:
        """Show what is known after a step, a row of metrics.jsonl."""
        self.row = row
        self.tokens_per_s = 0.9 * (self.tokens_per_s or row["tokens_per_s"]) + 0.1 * row["tokens_per_s"]
        if row.get("validation_loss") is not None:
            self.validation_loss = row["validation_loss"]
        if self.bar is None and (row["step"] + 1) % self.config.log_every == 0:
            self._line(row)
        elif self.bar is not None and time.monotonic() - self.drawn >= REFRESH:
            self._draw(self.bar)

    def _draw(self, bar: Progress) -> None:
        (task,) = bar.tasks
        done = int(task.completed) if self.row is None else self.row["step"] + 1
        count = self._count(done)
        bar.update(task.id, completed=done, description=count)
        room = self.console.width - len(count) - BESIDE
        said = fitting(self._figures(self.row, task.time_remaining), room - SHORTEST_BAR)
        self.length.bar_width = max(1, min(LONGEST_BAR, room - len(said)))
        bar.update(task.id, said=said)
        self._guarded(bar.refresh)
        self.drawn = time.monotonic()

    def _count(self, step: int) -> str:
        return f"{step:,}/{self.config.steps:,}"

    def _figures(self, row: dict[str, Any] | None, left: float | None) -> list[str]:
        """The bar's figures, and after them the same in fewer columns each."""
        if row is None:
            return ["the first step takes longer", ""]
        loss = _loss(row)
        speed = f"{self.tokens_per_s:,.0f} tokens/s"
        rest = "" if left is None else f"{clock(left)} left"
        held = "" if self.validation_loss is None else f"validation {self.validation_loss:.4f}"
        short = held.replace("validation", "val")
        choices = ((loss, held, speed, rest), (loss, short, speed, rest), (loss, short, rest), (loss, rest), (loss,))
        return ["  ".join(filter(None, parts)) for parts in choices]

    def _line(self, row: dict[str, Any]) -> None:
        """Print a step's line; on a terminal only as much of it as is not wrapped."""
        tokens_left = (self.config.steps - row["step"] - 1) * self.config.batch_tokens
        held_out = row.get("validation_loss")
        parts = [
            f"step {self._count(row['step'] + 1)}",
            _loss(row),
            "" if held_out is None else f"validation {held_out:.4f}",
            f"{row['tokens_per_s']:,.0f} tokens/s",
            f"{clock(tokens_left / self.tokens_per_s)} left",
            f"rate {row['learning_rate']:.2e}",
            f"{row['tokens']:,} tokens",
            "" if row["utilisation"] is None else f"{row['utilisation']:.0%} of peak",
        ]
        parts = list(filter(None, parts))
        shortest = 1 if self.console.is_terminal else len(parts)
        self.say(fitting(["  ".join(parts[:n]) for n in range(len(parts), shortest - 1, -1)], self.console.width))

    def _guarded(self, write: Callable[[], object]) -> None:
        """Write. If the terminal or the pipe is closed, the run is asked to stop, as SIGHUP does."""
        try:
            write()
        except (OSError, ValueError, SystemExit):  # a closed pipe makes rich leave the program
            self.closed = True
            with suppress(OSError, ValueError):  # otherwise Python would report the closed pipe again when it exits
                os.dup2(os.open(os.devnull, os.O_WRONLY), self.console.file.fileno())
            if self.bar is not None:
                with suppress(OSError, ValueError, SystemExit):
                    self.bar.stop()
            self.console, self.bar = Console(quiet=True), None


def _loss(row: dict[str, Any]) -> str:
    return "loss not finite, skipped" if row["loss"] is None else f"loss {row['loss']:.4f}"
