"""What `qed reproduce` shows while its units run: how far each is, its loss, the time left, and what is queued.

Units are processes of their own; all of this is read from the files that they write.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

from ..train.display import clock, fitting
from .plan import Plan, Unit
from .progress import UnitProgress, progress, seconds_of
from .unit import finished

LINE_EVERY = 30  # seconds between two lines about the same stage of a unit, where there is no terminal
BAR = 12  # columns
FIRST_SECONDS = 3  # in which a pace tells nothing yet
NAMED = 4  # queued units that are named: there may be hundreds


def queue(names: list[str]) -> str:
    """Say how many units are queued, and the names of the next ones."""
    return f"{len(names)} queued: {', '.join(names[:NAMED])}{', …' if len(names) > NAMED else ''}"


class Forecast:
    """How long units still take, from the pace of the stages that run and the seconds of those that are finished."""

    def __init__(self, plan: Plan, out: Path):
        self.plan, self.out = plan, out
        self.seen: dict[Unit, UnitProgress] = {}  # as it is now
        self.begun: dict[Unit, tuple[UnitProgress, float]] = {}  # as it was when its stage first moved, and when
        self.read()

    def read(self) -> None:
        """Read what finished stages took. There may be hundreds of units, so this is done once for each update."""
        self.known = seconds_of(self.plan, self.out)

    def see(self, unit: Unit, now: UnitProgress) -> None:
        """Take note of where a unit is. The time before a stage's first step, for imports and the like, is no pace."""
        self.seen[unit] = now
        first = self.begun[unit][0] if unit in self.begun else None
        if first is None or first.stage != now.stage or first.share == 0 < now.share:
            self.begun[unit] = now, time.monotonic()

    def forget(self, unit: Unit) -> None:
        """A unit has ended: it has no pace any more."""
        self.seen.pop(unit, None)
        self.begun.pop(unit, None)

    def _pace(self, unit: Unit) -> float | None:
        """The seconds that the whole stage of a running unit would take at its pace so far; None for the first ones."""
        first, when = self.begun[unit]
        moved, seconds = self.seen[unit].share - first.share, time.monotonic() - when
        return seconds / moved if moved > 0 and seconds > FIRST_SECONDS else None

    def _usual(self, stage: str) -> float | None:
        """The seconds of a stage: the mean of those that are finished, or of those that run."""
        known = self.known.get(stage)
        paces = [self._pace(unit) for unit, x in self.seen.items() if x.stage == stage]
        known = known or [x for x in paces if x is not None]
        return sum(known) / len(known) if known else None

    def stage_left(self, unit: Unit) -> float | None:
        """The seconds that the stage of a running unit still takes; None if nothing tells."""
        now = self.seen[unit]
        whole = self._pace(unit) or self._usual(now.stage)
        return None if whole is None else whole * (1 - now.share)

    def left(self, units: Iterable[Unit], jobs: int) -> tuple[float, bool]:
        """The seconds that all of these units still take, and whether every stage of theirs could be counted.

        Args:
            units: those that run or wait.
            jobs: how many of them run at the same time.
        """
        by_unit: list[list[float | None]] = []
        for unit in units:
            done, now = finished(self.out, unit), self.seen.get(unit)
            stages = [x for x in self.plan.stages(unit) if x not in done]
            running = now.stage if now is not None else None
            by_unit.append([self.stage_left(unit) if x == running else self._usual(x) for x in stages])
        sums = [sum(x for x in parts if x is not None) for parts in by_unit]
        whole = all(x is not None for parts in by_unit for x in parts)
        return max([sum(sums) / max(1, jobs), *sums], default=0.0), whole


class _Bars(Progress):
    """Bars with one more line below them."""

    below = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield Text(self.below, no_wrap=True, overflow="ellipsis", style="dim")


class Board:
    """The bars of the units that run, on a terminal; elsewhere a line about each now and then."""

    def __init__(self, plan: Plan, out: Path, jobs: int, console: Console):
        """
        Args:
            plan: the reproduction.
            out: its folder.
            jobs: units that run at the same time.
            console: where everything is printed.
        """
        self.plan, self.out, self.jobs, self.console = plan, out, jobs, console
        self.forecast = Forecast(plan, out)
        self.said: dict[Unit, tuple[str, float]] = {}  # the stage that was last printed, and when
        self.shown: dict[Unit, TaskID] = {}
        texts = [TextColumn(f"{{task.{name}}}", markup=False) for name in ("description", "fields[said]")]
        columns = (texts[0], BarColumn(bar_width=BAR), TextColumn("{task.percentage:>3.0f} %"), texts[1])
        self.bars = _Bars(*columns, console=console, transient=True)

    def __enter__(self) -> Board:
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def update(self, running: Iterable[Unit], waiting: list[Unit]) -> None:
        """Show where the running units are, and which ones wait."""
        running = list(running)
        self.forecast.read()
        for unit in running:
            self.forecast.see(unit, progress(self.plan, self.out, unit))
        for unit in running:
            now = self.forecast.seen[unit]
            if unit not in self.shown:
                self.shown[unit] = self.bars.add_task("", total=1.0, said="")
            name = f"{unit.name}: {now.stage}"
            figures = self._figures(unit)
            room = self.console.width - len(name) - BAR - 8
            self.bars.update(self.shown[unit], description=name, completed=now.share, said=fitting(figures, room))
            self._line(unit, f"{name} {now.share:.0%}  {figures[0]}".rstrip())
        seconds, whole = self.forecast.left([*running, *waiting], self.jobs)
        parts = [f"{'about' if whole else 'at least'} {clock(seconds)} left in all"] if seconds else []
        parts += [queue([unit.name for unit in waiting])] if waiting else []
        self.bars.below = "; ".join(parts)

    def _figures(self, unit: Unit) -> list[str]:
        """A unit's losses and the time that its stage still takes, and after them the same in fewer columns each."""
        now, seconds = self.forecast.seen[unit], self.forecast.stage_left(unit)
        loss = "" if now.loss is None else f"loss {now.loss:.4f}"
        held = "" if now.validation_loss is None else f"validation {now.validation_loss:.4f}"
        left = "" if seconds is None else f"{clock(seconds)} left"
        short = held.replace("validation", "val")
        return ["  ".join(filter(None, x)) for x in ((loss, held, left), (loss, short, left), (loss, left), (left,))]

    def _line(self, unit: Unit, text: str) -> None:
        """Print a line about a unit where there is no terminal to draw bars on, and about what all of it will take."""
        stage = self.forecast.seen[unit].stage
        before, when = self.said.get(unit, ("", 0.0))
        if stage and not self.console.is_terminal and (stage != before or time.monotonic() - when > LINE_EVERY):
            more = f"; {self.bars.below}" if self.bars.below else ""
            self.console.print(text + more, markup=False, highlight=False, soft_wrap=True)
            self.said[unit] = (stage, time.monotonic())

    def ended(self, unit: Unit, how: str, style: str = "") -> None:
        """Print how a unit has ended, and take its bar away.

        Args:
            unit: the training.
            how: "done", "failed" or the like.
            style: of rich, for the line.
        """
        self.forecast.forget(unit)
        if unit in self.shown:
            self.bars.remove_task(self.shown.pop(unit))
            self.bars.refresh()  # otherwise the line would be printed above the bars as they were
        took = sum(finished(self.out, unit).values())
        text = f"{unit.name}: {how}" + (f" in {clock(took)}" if how == "done" else "")
        self.console.print(text, markup=False, highlight=False, style=style)
