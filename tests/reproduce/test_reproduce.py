"""`qed reproduce`: every stage of every unit, once; cut and taken up again; what fails is said, and the rest stays."""

import dataclasses
import json
import lzma
import multiprocessing
import os
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from qed.analysis.report import write
from qed.cli import app
from qed.reproduce import collecting, run
from qed.reproduce.plan import PLANS, Files, Plan, Unit, rehearsed
from qed.train.loop import STOPPED

STEPS = {"total_tokens": "2048", "decay_start_tokens": "1024", "validate_every": "1", "batch_tokens": "512"}
STEPS |= {"micro_tokens": "512", "validation_tokens": "512"}


def tiny(**changes: object) -> Plan:
    made = dataclasses.replace(
        PLANS["mini"](Files()),
        changes=STEPS,
        arms=("gdn2", "qed"),
        source="synthetic:300",
        held_out=4,
        lengths=(64, 128),
        samples=3,
        strength_lengths=(64,),
        strength_samples=3,
        eigenvalue_samples=500,
        positions=128,
        position_rows=2,
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def go(plan: Plan, out: Path, **more: object) -> tuple[int, str]:
    console = Console(record=True, width=200, file=(out.parent / "said").open("a"))
    given = {"device": "cpu", "jobs": 2, "only": [], "minutes": None} | more
    status = run.reproduce(plan, out, console=console, **given)  # type: ignore[arg-type]
    return status, console.export_text()


def _only(out: Path, name: str) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not survive a fork
    status, _ = go(tiny(), out, only=[name], jobs=1)
    os._exit(status)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made by two processes started together, a training each, as on several machines over one folder."""
    out = tmp_path_factory.mktemp("reproduce") / "mini"
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=_only, args=(out, name)) for name in ("gdn2-0", "qed-0")]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0], (out.parent / "said").read_text()
    status, said = go(tiny(), out)
    assert status == 0, said
    assert "Retrieval has not been learned at the training length by GDN-2 seed 0" in said
    return out


def test_all_of_it_is_there(done: Path) -> None:
    state = json.loads((done / "state.json").read_text())
    assert state["data"]
    assert state["report"]
    assert {name: list(x["done"]) for name, x in state["units"].items()} == {
        "gdn2-0": ["train", "eval", "eigenvalues"],
        "qed-0": ["train", "eval", "strength", "eigenvalues"],
    }
    page = (done / "report" / "report.html").read_text()
    assert "Retrieval has not been learned at the training length by GDN-2 seed 0" in page
    rows = [json.loads(x) for x in (done / "runs" / "qed-0" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all(0 <= row["retrieval"] <= 1 and row["validation_loss"] > 0 for row in rows)


def test_again_does_nothing_twice(done: Path) -> None:
    before = {x: x.stat().st_mtime_ns for x in (done / "runs").rglob("*.json*")}
    status, _ = go(tiny(), done)
    assert status == 0
    assert before == {x: x.stat().st_mtime_ns for x in (done / "runs").rglob("*.json*")}


def test_a_unit_goes_on_with_the_stage_that_is_missing(done: Path) -> None:
    run = done / "runs" / "gdn2-0"
    before = json.loads((run / "stages.json").read_text())
    (run / "eigenvalues.json").unlink()
    (run / "stages.json").write_text(json.dumps({name: before[name] for name in ("train", "eval")}))
    status, said = go(tiny(), done)
    assert status == 0, said
    after = json.loads((run / "stages.json").read_text())
    assert {name: after[name] == before[name] for name in after} == {"train": True, "eval": True, "eigenvalues": False}
    assert (run / "eigenvalues.json").exists()


def test_another_plan_needs_another_folder(done: Path) -> None:
    with pytest.raises(ValueError, match="holds a reproduction with other samples; use another folder"):
        go(tiny(samples=4), done)
    assert all(Unit.parse(unit.name) == unit for unit in PLANS["small"](Files()).units)
    with pytest.raises(ValueError, match="--only: expected some of gdn2-0, qed-0, got qed-7"):
        go(tiny(), done, only=["qed-7"])


def test_collected_results_give_the_same_report(done: Path, tmp_path: Path) -> None:
    assert collecting.collect(done, tmp_path / "kept") > 10
    assert not list((tmp_path / "kept").rglob("*.safetensors")) + list((tmp_path / "kept").rglob("*.jsonl"))
    assert not [
        x for x in (tmp_path / "kept").rglob("*.json") if f'"{done}' in x.read_text()
    ]  # no paths of this machine
    write(tmp_path / "kept" / "runs", tmp_path / "report")
    for table in (done / "report" / "tables").iterdir():
        assert (tmp_path / "report" / "tables" / table.name).read_text() == table.read_text()


def test_golds_of_others_are_not_collected(tmp_path: Path) -> None:
    folder = tmp_path / "out" / "runs" / "qed-0" / "eval"
    folder.mkdir(parents=True)
    (tmp_path / "out" / "plan.json").write_text("{}")
    for name in ("fda-A1", "niah_single_1-512"):
        (folder / f"{name}.jsonl").write_text('{"index": 0, "prediction": "x", "gold": "y", "correct": 0}\n')
    collecting.collect(tmp_path / "out", tmp_path / "kept")
    kept = {x.name: lzma.decompress(x.read_bytes()).decode() for x in (tmp_path / "kept").rglob("*.xz")}
    assert '"gold"' not in kept["fda-A1.jsonl.xz"]
    assert '"gold"' in kept["niah_single_1-512.jsonl.xz"]


def test_cut_and_taken_up_again(tmp_path: Path) -> None:
    plan = tiny(arms=("gdn2",), changes=STEPS | {"total_tokens": "65536", "decay_start_tokens": "65536"})
    status, said = go(plan, tmp_path / "out", minutes=0.15)
    assert status == STOPPED, said
    assert "the same command goes on" in said
    assert json.loads((tmp_path / "out" / "state.json").read_text())["units"]["gdn2-0"]["finished"] is False
    status, said = go(plan, tmp_path / "out")
    assert status == 0, said
    rows = [json.loads(x) for x in (tmp_path / "out" / "runs" / "gdn2-0" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(128))


def test_a_unit_that_fails_is_said(tmp_path: Path) -> None:
    plan = tiny(
        arms=("gdn2",),
        changes=STEPS
        | {"sequence": "32768", "batch_tokens": "32768", "micro_tokens": "32768"}
        | {"total_tokens": "32768"},
    )
    status, said = go(plan, tmp_path / "out")
    assert status == run.FAILED
    assert "gdn2-0 failed; the end of" in said
    assert "expected more than 32768 tokens, got " in said


@pytest.mark.parametrize("scale", PLANS)
def test_plans_are_whole(scale: str, tmp_path: Path) -> None:
    files = Files() if scale == "mini" else Files(essays="essays.json", recall={"fda": "fda.jsonl"})
    plan = PLANS[scale](files)
    assert Plan.from_json(plan.to_json()) == plan
    for made in (plan, rehearsed(plan)):
        for unit in made.units:
            config = made.config(unit, tmp_path)
            assert config.model["rule"] == unit.arm
            assert config.seed == unit.seed
    swept = dataclasses.replace(plan, arms=("qed@0.5",))
    assert swept.config(swept.units[0], tmp_path).model_config().lambda_max == 0.5
    assert min(plan.lengths) <= plan.config(plan.units[0], tmp_path).sequence
    assert set(rehearsed(plan).arms) == set(plan.arms)


def test_bad_input(tmp_path: Path) -> None:
    def said(*arguments: object) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["reproduce", *map(str, arguments)])
        return result.exit_code, " ".join(result.output.split())

    (tmp_path / "file").write_text("kept")
    assert said("--out", tmp_path / "file")[1].startswith("--out: expected a folder, got the file")
    assert (tmp_path / "file").read_text() == "kept"
    assert "--scale: expected" in said("--scale", "huge")[1]
    assert "--arms: expected names of rules, or all, got 'qet'" in said("--arms", "qed,qet", "--out", tmp_path / "x")[1]
    assert "--arms: expected RULE@λ_max" in said("--arms", "gdn2@1", "--out", tmp_path / "x")[1]
    assert "--scale mini: expected no files" in said("--corpus", "x.jsonl", "--out", tmp_path / "x")[1]
    assert not (tmp_path / "x").exists()
