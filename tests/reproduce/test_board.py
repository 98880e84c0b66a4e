"""What `qed reproduce` shows while it runs, from the files that its units write, and what `--status` says."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from qed.files import write_json
from qed.reproduce import board as boards
from qed.reproduce.board import Board, Forecast, queue
from qed.reproduce.plan import Unit
from qed.reproduce.progress import UnitProgress, progress, show_state

from .test_reproduce import tiny

GDN2, QED = Unit("gdn2", 0), Unit("qed", 0)


class Clock:
    """Time as a test sets it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 1000.0
        monkeypatch.setattr(boards.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def write_metrics(out: Path, unit: Unit, steps: int, *, validated: int | None = None) -> None:
    """The metrics of a unit of `tiny`, four steps in all, after some of them."""
    folder = out / "runs" / unit.name
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"step": i, "loss": 3.0 - i} | ({"validation_loss": 2.5} if i == validated else {}) for i in range(steps)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 9')


def finish(out: Path, unit: Unit, **seconds: float) -> None:
    (out / "runs" / unit.name).mkdir(parents=True, exist_ok=True)
    write_json(out / "runs" / unit.name / "stages.json", seconds)


def test_losses_are_those_of_the_last_whole_lines(tmp_path: Path) -> None:
    assert progress(tiny(), tmp_path, QED) == UnitProgress("train", 0.0)
    write_metrics(tmp_path, QED, 3, validated=1)
    assert progress(tiny(), tmp_path, QED) == UnitProgress("train", 0.75, 1.0, 2.5)


def test_the_time_left_is_exact_at_a_steady_pace(tmp_path: Path, clock: Clock) -> None:
    """Whatever came before the first step: 100 seconds for all of a stage, and nothing but that stage to do."""
    forecast = Forecast(tiny(arms=("gdn2",)), tmp_path)
    finish(tmp_path, GDN2, eval=50.0, eigenvalues=7.0)
    forecast.see(GDN2, UnitProgress("train", 0.0))
    assert forecast.left([GDN2], 1) == (0.0, False)
    for share in (0.1, 0.2, 0.4, 0.9):
        clock.now = 5000 + 100 * share
        forecast.see(GDN2, UnitProgress("train", share))
        if share > 0.1:
            assert forecast.stage_left(GDN2) == pytest.approx(100 * (1 - share))
            assert forecast.left([GDN2], 1)[0] == pytest.approx(100 * (1 - share))


def test_what_waits_takes_as_long_as_what_is_finished(tmp_path: Path, clock: Clock) -> None:
    plan = tiny(arms=("gdn2", "qed"), off=(), swept=())
    finish(tmp_path, GDN2, train=60.0, eval=30.0, eigenvalues=10.0)
    forecast = Forecast(plan, tmp_path)
    assert forecast.left([QED], 1) == (100.0, True)
    assert Forecast(tiny(), tmp_path).left([QED], 2) == (100.0, False)  # nothing tells how long its other stages take
    several = tiny(arms=("gdn2", "qed"), seeds=(0, 1), off=(), swept=())
    waiting = [unit for unit in several.units if unit != GDN2]
    assert Forecast(several, tmp_path).left(waiting, 2) == (150.0, True)
    assert Forecast(several, tmp_path).left(waiting, 9) == (100.0, True)  # no unit is divided


def show(out: Path, console: Console) -> Board:
    board = Board(tiny(), out, 1, console)
    write_metrics(out, GDN2, 1)
    board.update([GDN2], [QED])
    return board


def test_without_a_terminal_a_line_now_and_then(tmp_path: Path, clock: Clock) -> None:
    console = Console(file=io.StringIO(), width=40, record=True)
    board = show(tmp_path, console)
    write_metrics(tmp_path, GDN2, 2, validated=0)
    for clock.now in (1010.0, 1040.0):
        board.update([GDN2], [QED])
    finish(tmp_path, GDN2, train=60.0, eval=30.0, eigenvalues=10.0)
    board.ended(GDN2, "done")
    first, second, last = console.export_text().splitlines()
    assert first == "gdn2-0: train 25%  loss 3.0000"
    assert second.startswith("gdn2-0: train 50%  loss 2.0000  validation 2.5000  1:20 left; at least ")
    assert second.endswith(" left in all; 1 queued: qed-0")
    assert last == "gdn2-0: done in 1:40"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_on_a_terminal_bars_that_are_never_wrapped(tmp_path: Path, clock: Clock, width: int) -> None:
    console = Console(file=io.StringIO(), width=width, record=True, force_terminal=True)
    board = show(tmp_path, console)
    write_metrics(tmp_path, GDN2, 2, validated=0)
    clock.now = 1040.0
    board.update([GDN2], [QED])
    console.print(*board.bars.get_renderables())
    bar, below = (line.rstrip() for line in console.export_text().splitlines())
    held = {60: "", 80: "validation 2.5000  ", 120: "validation 2.5000  "}[width]
    assert bar.startswith("gdn2-0: train ━━")
    assert bar.endswith(f" 50 % loss 2.0000  {held}1:20 left")
    assert below.startswith("at least ")
    assert "; 1 queued: qed-0" in below


def test_the_status_is_in_per_cent(tmp_path: Path) -> None:
    plan = tiny(off=(), swept=())
    finish(tmp_path, GDN2, train=60.0, eval=30.0, eigenvalues=10.0)
    write_metrics(tmp_path, QED, 2)
    console = Console(file=io.StringIO(), width=120, record=True)
    show_state(plan, tmp_path, console)
    title, *lines = (line.strip() for line in console.export_text().splitlines())
    assert title == f"{tmp_path}: 65% done"  # 100 of 200 seconds, and half of 60
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    assert rows == [["gdn2-0", "60 s", "30 s", "10 s", "100%"], ["qed-0", "50%", "", "", "30%"]]


def test_of_a_long_queue_the_next_units_are_named() -> None:
    assert queue(["a", "b", "c", "d"]) == "4 queued: a, b, c, d"
    assert queue([f"s5/qed-{i}" for i in range(500)]) == "500 queued: s5/qed-0, s5/qed-1, s5/qed-2, s5/qed-3, …"
