"""Metrics, answers and frozen prompts whose files were damaged: the rest is used, and what is damaged is named."""

import contextlib
import csv
import io
import json
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from qed.cli import app
from qed.report import drawing
from tests.analysis.conftest import evaluated, trained

from . import damage, training
from .drawing import Draw

ARMS = {"gdn2": "GDN-2", "qed": "QED"}


def _spoil_a_line(draw: Draw, file: Path, among: range) -> int:
    """One line of a .jsonl becomes something else than a JSON object; which."""
    lines = file.read_bytes().split(b"\n")
    at = draw.choice([i for i in among if len(lines[i]) > 10])
    line = lines[at]
    lines[at] = draw.choice(
        (
            line[: draw.randint(1, len(line) - 1)],
            line[draw.randint(1, len(line) - 1) :],
            draw.choice((b"[]", b"3", b"null", b'"text"', b"{", b"\xff\xfe\xfd", b"\x00" * len(line), b"[" * 3000)),
            line[:5] + b"\xff" + line[6:],
        )
    )
    file.write_bytes(b"\n".join(lines))
    return at


def damaged_metrics(seed: int) -> None:
    """A run whose metrics.jsonl has damaged lines resumes, keeps the others and names the file."""
    draw = Draw("damaged_metrics", seed)
    truth = training.numbers(training.whole())
    with training.workplace() as place:
        out = place / "run"
        shutil.copytree(training.stopped(), out)
        before = (out / "metrics.jsonl").read_bytes().split(b"\n")[:-1]
        for _ in range(draw.randint(1, 3)):
            _spoil_a_line(draw, out / "metrics.jsonl", range(len(before)))
        after = (out / "metrics.jsonl").read_bytes().split(b"\n")
        kept = {i for i, line in enumerate(before) if after[i] == line}
        said = training.finish(out)
        assert "metrics.jsonl" in said, f"the damaged file is not named in: {said[:300]}"
        found = {row["step"]: row for row in training.numbers(out)}
        steps = sorted(kept | set(range(len(before), training.STEPS)))
        assert sorted(found) == steps, f"steps {sorted(found)}, expected {steps}"
        for step in steps:
            assert found[step] == truth[step], f"step {step} has other numbers"
        training.same_end(out, training.whole())


@cache
def _reported() -> Path:
    """Result files of four small runs, all of them different, and the tables of their report."""
    base = training.scratch() / "runs"
    for seed in (0, 1):
        trained(base, "gdn2", seed, (1.0, 0.8 + seed / 10, 0.5, 0.1))
        run = trained(base, "qed", seed, (0.99, 0.95, 0.8 - seed / 10, 0.4), fda=30 + seed)
        for scale in (0.0, 1.0):
            right = list(range(60 + int(10 * scale)))
            evaluated(run / "strength" / f"{scale:g}", "niah_single_1-2048", right, strength=scale)
    with _undrawn(True):
        _report(base, training.scratch() / "report")
    return base


@contextlib.contextmanager
def _undrawn(wanted: bool) -> Iterator[None]:
    """Figures take most of a report's time; without them it has nothing but tables."""
    drawn = drawing.drawn
    if wanted:
        drawing.drawn = lambda _, kinds, **__: dict.fromkeys(kinds, b"")
    try:
        yield
    finally:
        drawing.drawn = drawn


def _report(base: Path, out: Path) -> Result:
    return _invoked(["report", str(base), "--out", str(out)])


def _invoked(words: list[str]) -> Result:
    found = CliRunner(env={"COLUMNS": "4000"}).invoke(app, words)
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    return found


def _cells(out: Path) -> dict[tuple[str, ...], str]:
    """Of the tables that have a row for every arm and seed."""
    found = {}
    for name in ("table3_niah_single_1", "loss_by_position"):
        path = out / "tables" / f"{name}.csv"
        for row in csv.DictReader(io.StringIO(path.read_text())) if path.exists() else ():
            for column, value in row.items():
                if not column.startswith("paper"):
                    found[name, row["arm"], row["seed"], column] = value
    losses = out / "tables" / "table2_validation_loss.csv"
    for row in csv.DictReader(io.StringIO(losses.read_text())):
        found |= {(losses.stem, arm, row["seed"], "loss"): row[arm] for arm in ARMS.values() if arm in row}
    return found


def _damage_a_result(draw: Draw, base: Path) -> tuple[Path, bool]:
    """A file that a report needs is damaged; which, and whether it still has all that a table takes from it."""
    file = draw.choice([x for x in sorted(base.rglob("*.json*")) if x.is_file()])
    if file.suffix == ".jsonl":
        count = len(file.read_bytes().split(b"\n")) - 1
        if draw.chance(0.8) or file.name == "metrics.jsonl":
            at = _spoil_a_line(draw, file, range(count))
            return file, file.name == "metrics.jsonl" and at < count - 1  # the loss is in the last line
        file.unlink()
    elif draw.chance(0.5):
        damage.no_json_object(draw, file)
    else:
        draw.choice((damage.truncate, damage.empty, damage.garbage, damage.zeros))(draw, file)
    return file, False


def damaged_results(seed: int) -> None:
    """A report comes out whatever is damaged; it names the file, and every cell is as it was or missing."""
    draw = Draw("damaged_results", seed)
    template = _reported()
    clean = _cells(training.scratch() / "report")
    with training.workplace() as place:
        base, out = place / "runs", place / "report"
        shutil.copytree(template, base)
        file, usable = _damage_a_result(draw, base)
        where = str(file.relative_to(base))
        with _undrawn(draw.chance(0.9)):
            found = _report(base, out)
        assert found.exit_code == 0, f"no report, because of {where}: {found.output[-400:]}"
        said = found.output + (out / "report.md").read_text()
        assert file.name in said, f"{where} is damaged and not named"
        arm, _, number = file.relative_to(base).parts[0].rpartition("-")
        touched = (ARMS[arm], number)
        cells = _cells(out)
        for key, value in cells.items():
            allowed = {clean.get(key), "missing"} if key[1:3] == touched and not usable else {clean.get(key)}
            assert value in allowed, f"{key}: {value}, expected {allowed}, with {where} damaged"
        lost = {key[1:3] for key in clean.keys() - cells.keys()}
        assert lost <= {touched}, f"rows of {lost - {touched}} are gone, with {where} damaged"


EVALUATION = ("--task", "pairs", "--lengths", "64,80", "--samples", "5", "--device", "cpu")


@cache
def _answered() -> Path:
    out = training.scratch() / "answers"
    assert _evaluated(out).exit_code == 0
    return out


def _evaluated(out: Path) -> Result:
    return _invoked(["eval", str(training.whole() / "export"), *EVALUATION, "--out", str(out)])


def _numbers(out: Path, name: str) -> tuple[Any, Any]:
    rows = [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]
    return json.loads((out / f"{name}.json").read_text())["result"], sorted(rows, key=lambda row: row["index"])


def damaged_answers(seed: int) -> None:
    """An evaluation that resumes over damaged answers or prompts ends with the same result, or says what is wrong."""
    draw = Draw("damaged_answers", seed)
    template = _answered()
    with training.workplace() as place:
        out = place / "answers"
        shutil.copytree(template, out)
        file = draw.choice(
            [x for x in sorted(out.rglob("*")) if x.is_file() and x.suffix in (".json", ".jsonl", ".npz")]
        )
        if file.suffix == ".jsonl" and draw.chance(0.6):
            _spoil_a_line(draw, file, range(len(file.read_bytes().split(b"\n")) - 1))
        elif file.suffix == ".json" and file.parent == out and draw.chance(0.5):
            damage.no_json_object(draw, file)
        else:
            kinds = (damage.truncate, damage.empty, damage.garbage, damage.zeros, damage.remove)
            draw.choice(kinds)(draw, file)
        found = _evaluated(out)
        if found.exit_code:
            assert file.stem in found.output, (
                f"{file.relative_to(out)} is damaged and not named in: {found.output[-300:]}"
            )
            return
        for name in ("pairs-64", "pairs-80"):
            assert _numbers(out, name) == _numbers(template, name), (
                f"{name} has other results, with {file.name} damaged"
            )
