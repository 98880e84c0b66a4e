"""`qed reproduce` at several settings: trainings that resume, a packed archive, and one table of comparable arms."""

import dataclasses
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from qed.analysis.settings import PACKED, read_settings, unpacked_runs
from qed.cli import app
from qed.report.arm_page import write_arms
from qed.reproduce import collecting
from qed.reproduce.plan import PLANS, Files, Plan, Unit, rehearsed, with_settings
from qed.reproduce.several import How, jobs_of, reproduce_all

QUIET = Console(quiet=True)
FAST = {"total_tokens": "2048", "validate_every": "2", "batch_tokens": "512", "micro_tokens": "512"}


def tracking(**changes: object) -> Plan:
    plan = with_settings(PLANS["tracking"](Files()), ("z2",))
    given = {"arms": ("gdn2", "qed+erase2"), "seeds": (0,), "changes": FAST, "lengths": (64,), "samples": 2}
    return dataclasses.replace(plan, **(given | changes))  # type: ignore[arg-type]


def recall(**changes: object) -> Plan:
    plan = rehearsed(with_settings(PLANS["recall"](Files()), ("16",)))
    return dataclasses.replace(plan, **({"arms": ("gdn2",), "seeds": (0,)} | changes))  # type: ignore[arg-type]


def go(plans: dict[str, Plan], out: Path, beside: Path | None = None) -> tuple[int, str]:
    console = Console(record=True, width=300, file=(out.parent / "said").open("a"))
    status = reproduce_all(jobs_of(plans, out, dry_run=False), How("cpu", 2, [], None, beside), console)
    return status, console.export_text()


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("settings") / "runs"
    status, said = go({"tracking": tracking(), "recall": recall()}, out)
    assert status == 0, said
    return out


@pytest.mark.slow
def test_every_setting_is_a_folder_of_runs(done: Path) -> None:
    found, problems = read_settings(done / "tracking" / "runs")
    assert problems == []
    assert {setting: [run.path.name for run in runs] for setting, runs in found.items()} == {
        "z2": ["gdn2-0", "qed+erase2-0"]
    }
    state = json.loads((done / "tracking" / "state.json").read_text())
    assert {name: list(x["done"]) for name, x in state["units"].items()} == {
        f"z2/{arm}-0": ["train", "eval"] for arm in ("gdn2", "qed+erase2")
    }
    for page in (done / "tracking" / "report", done / "recall" / "report", done / "arms"):
        assert "<table>" in (page / "report.html").read_text()
    before = {x: x.stat().st_mtime_ns for x in done.rglob("metrics.jsonl")}
    status, _ = go({"tracking": tracking(), "recall": recall()}, done)
    assert status == 0
    assert before == {x: x.stat().st_mtime_ns for x in done.rglob("metrics.jsonl")}  # nothing is done twice


@pytest.mark.slow
def test_packed_results_give_the_same_tables(done: Path, tmp_path: Path) -> None:
    for scale in ("tracking", "recall"):
        assert collecting.collect(done / scale, tmp_path / "kept" / scale) > 0
        first = (tmp_path / "kept" / scale / PACKED).read_bytes()
        collecting.collect(done / scale, tmp_path / "kept" / scale)  # again, beside what is there
        assert (tmp_path / "kept" / scale / PACKED).read_bytes() == first
        write_arms([tmp_path / "kept" / scale], tmp_path / "report" / scale)
        for table in (done / scale / "report" / "tables").iterdir():
            assert (tmp_path / "report" / scale / "tables" / table.name).read_text() == table.read_text()
    with unpacked_runs(tmp_path / "kept" / "tracking") as runs:
        assert runs is not None
        texts = [x.read_text() for x in runs.rglob("*.json")]
        assert texts
        assert not any(str(done) in text for text in texts)
    said = CliRunner().invoke(app, ["report", str(tmp_path / "kept" / "tracking"), "--out", str(tmp_path / "page")])
    assert said.exit_code == 0, said.output


@pytest.mark.slow
def test_only_what_is_comparable_stands_beside(done: Path, tmp_path: Path) -> None:
    """An arm of one's own beside kept results; a kept training with another setting is named and left out."""
    for scale in ("tracking", "recall"):
        collecting.collect(done / scale, tmp_path / "kept" / scale)
    mine = {"tracking": tracking(arms=("kda",)), "recall": recall(arms=("kda",))}
    status, said = go(mine, tmp_path / "mine", tmp_path / "kept")
    assert status == 0, said
    rows = (tmp_path / "mine" / "arms" / "tables" / "arms.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["arm", "GDN-2", "kda", "qed+erase2"]
    other = tracking(arms=("kda",), changes=FAST | {"learning_rate": "0.5"})
    status, said = go({"tracking": other}, tmp_path / "other", tmp_path / "kept")
    assert status == 0, said
    assert "z2/gdn2-0: its learning_rate is 0.002, where kda-0 has 0.5" in " ".join(said.split())
    table = (tmp_path / "other" / "report" / "tables" / "tracking.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in table] == ["arm", "kda"]


def test_settings_are_named_before_anything_runs() -> None:
    assert [Unit.parse(unit.name) for unit in tracking().units] == tracking().units
    with pytest.raises(ValueError, match=r"--settings: expected one of z2, .*, got 's6'"):
        with_settings(PLANS["tracking"](Files()), ("s6",))
    with pytest.raises(ValueError, match="--settings: expected a scale that has several, tracking or recall, got mini"):
        with_settings(PLANS["mini"](Files()), ("z2",))
    with pytest.raises(ValueError, match="--scale tracking: expected no files"):
        PLANS["tracking"](Files(corpus="x"))
    jobs = jobs_of({"tracking": tracking(), "recall": recall()}, None, dry_run=False)
    with pytest.raises(ValueError, match="--only: expected a single scale"):
        reproduce_all(jobs, How("cpu", 1, ["z2/gdn2-0"], None, None), QUIET)
    assert [job.out for job in jobs] == [Path("runs/tracking"), Path("runs/recall")]
