"""How far a reproduction is, and what it has found so far: for programs in state.json, for people on the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from ..analysis.names import TITLES, length_title, name_of
from ..analysis.results import Run
from ..analysis.selection import arms_of, main_task, needle_lengths
from ..analysis.strength import SCALES
from ..files import write_json
from ..train.metrics import read_row
from .plan import ALL_STAGES, Plan, Unit
from .unit import finished


def write_state(plan: Plan, out: Path) -> None:
    """Write state.json, which says what is done."""
    state = {
        "scale": plan.scale,
        "data": (out / "validation" / "index.json").exists(),
        "units": {
            unit.name: {
                "stages": plan.stages(unit),
                "done": (done := finished(out, unit)),
                "finished": list(done) == plan.stages(unit),
            }
            for unit in plan.units
        },
        "report": (out / "report" / "report.html").exists(),
    }
    write_json(out / "state.json", state)


def show_state(plan: Plan, out: Path, console: Console) -> None:
    """Print a table of the units and the seconds that each of their finished stages took.

    Args:
        plan: the reproduction.
        out: its folder.
        console: where the table is printed.
    """
    stages = [x for x in ALL_STAGES if any(x in plan.stages(unit) for unit in plan.units)]
    table = Table("", *stages, title=f"{out}: seconds of finished stages")
    for unit in plan.units:
        done, wanted = finished(out, unit), plan.stages(unit)
        cells = [f"{done[x]:.0f}" if x in done else "" if x in wanted else "–" for x in stages]
        table.add_row(unit.name, *cells)
    console.print(table)


def progress(plan: Plan, out: Path, unit: Unit) -> tuple[str, float]:
    """The stage that a unit is in, and which share of it is done, from the unit's files.

    Args:
        plan: the reproduction.
        out: its folder.
        unit: the training.
    """
    done, run = finished(out, unit), out / "runs" / unit.name
    stage = next((x for x in plan.stages(unit) if x not in done), "")
    if stage == "train":
        path = run / "metrics.jsonl"
        row = _last_line(path) if path.exists() else None
        return stage, 0.0 if row is None else (row["step"] + 1) / plan.config(unit, out).steps
    if stage == "eval":
        expected = len(plan.needles) * len(plan.lengths) + len(plan.recall) + 1
        return stage, _summaries(run / "eval") / (expected + 1)
    if stage == "off":
        return stage, _summaries(run / "strength" / "0") / (len(plan.needles) * len(plan.lengths) + 1)
    if stage == "strength":  # s = 1 is done, and 0 may be
        scales = [f"{scale:g}" for scale in SCALES if scale not in (0.0, 1.0)]
        count = sum(_summaries(run / "strength" / scale) for scale in scales)
        return stage, count / (len(scales) * len(plan.strength_lengths) + 1)
    return stage, 0.0


def _summaries(folder: Path) -> int:
    return len(list(folder.glob("*.json")))


def _last_line(path: Path) -> dict[str, Any] | None:
    """The last row of a file that another process appends to; None while there is no whole line."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 16_384))
        whole = file.read().split(b"\n")[:-1]
    try:
        return read_row(whole[-1]) if whole else None
    except ValueError:
        return None


def accuracies(runs: list[Run]) -> Table:
    """The accuracies on the main needle task, for a terminal of 80 columns."""
    task = main_task(runs)
    lengths = needle_lengths(runs, task)
    digits = 1 if len(lengths) <= 8 else 0
    table = Table(
        "", "seed", title=f"{TITLES[task]}: % right by context length", box=SIMPLE, pad_edge=False, padding=(0, 0, 0, 1)
    )
    for n in lengths:
        table.add_column(length_title(n), justify="right")
    for run in sorted(runs, key=lambda run: (arms_of(runs).index(run.arm), run.seed)):
        cells = [run.results.get(f"{task}-{n}") for n in lengths]
        shown = ["" if x is None else f"{100 * x.result['accuracy']:.{digits}f}" for x in cells]
        table.add_row(name_of(run.arm), str(run.seed), *shown)
    return table
