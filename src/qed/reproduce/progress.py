"""How far a reproduction is, and what it has found so far: for programs in state.json, for people on the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from ..analysis.names import TITLES, length_title, name_of
from ..analysis.results import Run
from ..analysis.selection import arms_of, main_task, needle_lengths
from ..analysis.settings import read_settings
from ..analysis.strength import SCALES
from ..files import write_json
from ..report.arm_tables import capacity_table, tracking_table
from ..train.metrics import read_row
from .plan import ALL_STAGES, Plan, Unit
from .unit import finished

TAIL = 262_144  # bytes at the end of metrics.jsonl in which the last validation is looked for


def write_state(plan: Plan, out: Path) -> None:
    """Write state.json, which says what is done."""
    state = {
        "scale": plan.scale,
        "data": bool(plan.settings) or (out / "validation" / "index.json").exists(),
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


def seconds_of(plan: Plan, out: Path) -> dict[str, list[float]]:
    """The seconds that each stage took in the units that have finished it, by stage."""
    seconds: dict[str, list[float]] = {}
    for unit in plan.units:
        for stage, taken in finished(out, unit).items():
            seconds.setdefault(stage, []).append(taken)
    return seconds


def show_state(plan: Plan, out: Path, console: Console) -> None:
    """Print a table of the units: the seconds of finished stages, and how much of the others and of all is done.

    A unit's share counts every stage by the time that it takes where it is finished.

    Args:
        plan: the reproduction.
        out: its folder.
        console: where the table is printed.
    """
    stages = [x for x in ALL_STAGES if any(x in plan.stages(unit) for unit in plan.units)]
    means = {stage: sum(x) / len(x) for stage, x in seconds_of(plan, out).items()}
    usual = sum(means.values()) / len(means) if means else 1.0
    table = Table("", *stages, "done")
    whole = total = 0.0
    for unit in plan.units:
        done, now = finished(out, unit), progress(plan, out, unit)
        shares = {x: 1.0 if x in done else now.share if x == now.stage else 0.0 for x in plan.stages(unit)}
        weights = {x: means.get(x, usual) for x in shares}
        got, all_of_it = sum(shares[x] * weights[x] for x in shares), sum(weights.values())
        cells = ["–" if x not in shares else f"{done[x]:.0f} s" if x in done else _percent(shares[x]) for x in stages]
        table.add_row(unit.name, *cells, f"{got / all_of_it:.0%}")
        whole, total = whole + got, total + all_of_it
    console.print(f"{out}: {whole / total:.0%} done", markup=False, highlight=False, soft_wrap=True)
    console.print(table)


def _percent(share: float) -> str:
    return f"{share:.0%}" if share else ""


class UnitProgress(NamedTuple):
    """Where a unit is."""

    stage: str  # nothing if it has finished all of them
    share: float = 0.0  # of the stage
    loss: float | None = None  # while it trains
    validation_loss: float | None = None


def progress(plan: Plan, out: Path, unit: Unit) -> UnitProgress:
    """The stage that a unit is in, which share of it is done, and its losses, from the unit's files.

    Args:
        plan: the reproduction.
        out: its folder.
        unit: the training.
    """
    done, run = finished(out, unit), out / "runs" / unit.name
    stage = next((x for x in plan.stages(unit) if x not in done), "")
    if stage == "train":
        last, validated = _last_rows(run / "metrics.jsonl")
        share = (last["step"] + 1) / plan.config(unit, out).steps if last else 0.0
        return UnitProgress(stage, share, last.get("loss"), validated.get("validation_loss"))
    if stage == "eval":
        expected = 1 if plan.settings else len(plan.needles) * len(plan.lengths) + len(plan.recall) + 1
        return UnitProgress(stage, _summaries(run / "eval") / (expected + 1))
    if stage == "off":
        return UnitProgress(stage, _summaries(run / "strength" / "0") / (len(plan.needles) * len(plan.lengths) + 1))
    if stage == "strength":  # s = 1 is done, and 0 may be
        scales = [f"{scale:g}" for scale in SCALES if scale not in (0.0, 1.0)]
        count = sum(_summaries(run / "strength" / scale) for scale in scales)
        return UnitProgress(stage, count / (len(scales) * len(plan.strength_lengths) + 1))
    return UnitProgress(stage, 0.0 if stage else 1.0)


def _summaries(folder: Path) -> int:
    return len(list(folder.glob("*.json")))


def _last_rows(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The last row of a file that another process appends to, and the last one with a validation loss; an empty one
    where there is none."""
    if not path.exists():
        return {}, {}
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL))
        whole = file.read().split(b"\n")[:-1]
    validated = next((line for line in reversed(whole) if b'"validation_loss"' in line), b"{}")
    return _row(whole[-1] if whole else b"{}"), _row(validated)


def _row(line: bytes) -> dict[str, Any]:
    try:
        return read_row(line)
    except ValueError:
        return {}


def arms_table(out: Path, scale: str) -> Table:
    """The main table of a scale with settings, from the folder's own trainings, for a terminal."""
    found, _ = read_settings(out / "runs")
    made = tracking_table(found) if scale == "tracking" else capacity_table(found)
    head, *rest = made.columns
    table = Table(head, title=made.title, box=SIMPLE, pad_edge=False, padding=(0, 0, 0, 1))
    for column in rest:
        table.add_column(column, justify="right")
    for row in made.cells():
        table.add_row(*row)
    return table


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
