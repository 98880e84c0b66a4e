"""`qed reproduce`: every stage of every unit, once; cut and taken up again; what fails is said, and the rest stays."""

import dataclasses
import itertools
import json
import lzma
import multiprocessing
import os
import shlex
import shutil
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from qed.analysis.results import runs, survey
from qed.cli import app
from qed.provenance import code_sha256, plan_sha256, without_folders
from qed.recipes.arms import Arm
from qed.recipes.theta import papers_travel, travel
from qed.report.page import write
from qed.reproduce import collecting, run
from qed.reproduce.plan import PLANS, Files, Plan, Unit, rehearsed, with_settings
from qed.train.loop import STOPPED
from tests.analysis import synthetic

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
        off=("qed",),
        registered="a plan's",
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
        "qed-0": ["train", "eval", "off", "strength", "eigenvalues"],
    }
    assert not (done / "runs" / "qed-0" / "strength" / "1").exists()  # eval has done it
    (run,) = (x for x in runs(done / "runs") if x.path.name == "qed-0")
    assert {scale: sorted(x) for scale, x in run.strengths.items()} == {
        0.0: ["pairs-128", "pairs-64"],
        1.0: ["pairs-128", "pairs-64"],
        **{scale: ["pairs-64"] for scale in (-1.0, 0.5, 1.5, 2.0)},
    }
    assert "a text of" in (done / "report" / "look.html").read_text()
    page = (done / "report" / "report.html").read_text()
    assert 'href="look.html"' in page
    assert "Retrieval has not been learned at the training length by GDN-2 seed 0" in page
    rows = [json.loads(x) for x in (done / "runs" / "qed-0" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all(0 <= row["retrieval"] <= 1 and row["validation_loss"] > 0 for row in rows)
    for before, after in itertools.pairwise(rows):  # λ of every head after a step, and their mean before the next
        means = {layer: sum(heads) / len(heads) for layer, heads in before["strength_by_head"].items()}
        assert after["strength"] == pytest.approx(means, rel=1e-6)
        assert {len(heads) for heads in before["strength_by_head"].values()} == {2}


def test_every_result_says_which_code_and_plan_made_it(done: Path) -> None:
    run = done / "runs" / "qed-0"
    config = json.loads((run / "config.json").read_text())
    others = [run / "eigenvalues.json", *(run / "eval").glob("*.json"), *(run / "strength").glob("*/*.json")]
    found = [config, *(json.loads(x.read_text())["provenance"] for x in others)]
    assert len(found) == 2 + 3 + 2 + 4
    assert {x["code"] for x in found} == {code_sha256()}
    assert {x["plan"] for x in found} == {"a plan's"}


def test_a_plan_may_be_added_to_and_not_changed(tmp_path: Path) -> None:
    (tmp_path / "PLAN.md").write_text("# A plan\n\nSix seeds.\n\n## Additions\n")
    before = plan_sha256(tmp_path / "PLAN.md")
    (tmp_path / "PLAN.md").write_text("# A plan\n\nSix seeds.\n\n## Additions\n\nA day later: seven.\n")
    assert plan_sha256(tmp_path / "PLAN.md") == before
    (tmp_path / "PLAN.md").write_text("# A plan\n\nSeven seeds.\n\n## Additions\n")
    assert plan_sha256(tmp_path / "PLAN.md") != before
    (tmp_path / "PLAN.md").write_text("## Additions\n\nSeven seeds.\n")
    with pytest.raises(ValueError, match="no text before"):
        plan_sha256(tmp_path / "PLAN.md")


def test_the_codes_hash_is_of_names_and_contents(tmp_path: Path) -> None:
    """Moving a line from one file to the next, or renaming a file, is another code; compiled files are none."""
    for name, files in {"a": {"x": "12", "y": "3"}, "b": {"x": "1", "y": "23"}, "c": {"x": "12", "z": "3"}}.items():
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / file).write_text(text)
    before = [code_sha256(tmp_path / name) for name in "abc"]
    assert len(set(before)) == 3
    (tmp_path / "a" / "__pycache__").mkdir()
    (tmp_path / "a" / "__pycache__" / "x.pyc").write_text("")
    code_sha256.cache_clear()
    assert [code_sha256(tmp_path / name) for name in "abc"] == before


def test_again_does_nothing_twice(done: Path) -> None:
    before = {x: x.stat().st_mtime_ns for x in (done / "runs").rglob("*.json*")}
    status, _ = go(tiny(), done)
    assert status == 0
    assert before == {x: x.stat().st_mtime_ns for x in (done / "runs").rglob("*.json*")}


@pytest.mark.slow
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
    with pytest.raises(ValueError, match="--only: expected one of gdn2-0, qed-0, got 'qed-7'; the nearest is qed-0"):
        go(tiny(), done, only=["qed-7"])


def test_collected_results_give_the_same_report(done: Path, tmp_path: Path) -> None:
    assert collecting.collect(done, tmp_path / "kept") > 10
    assert not list((tmp_path / "kept").rglob("*.safetensors")) + list((tmp_path / "kept").rglob("*.jsonl"))
    texts = [x for x in (tmp_path / "kept").rglob("*") if x.suffix in (".json", ".html", ".md", ".csv")]
    assert [x.name for x in texts if str(done) in x.read_text()] == []  # no paths of this machine
    write(tmp_path / "kept" / "runs", tmp_path / "report")
    for table in (done / "report" / "tables").iterdir():
        assert (tmp_path / "report" / "tables" / table.name).read_text() == table.read_text()
    folders = (done / "runs", tmp_path / "kept" / "runs")
    before, after = (next(x for x in runs(base) if x.path.name == "qed-0") for base in folders)
    assert {n: x.result for n, x in after.results.items()} == {n: x.result for n, x in before.results.items()}
    for name in ("pairs-64", "pairs-128"):
        whole = {row["index"]: row for row in before.results[name].rows}
        for row in after.results[name].rows:
            assert row == {x: whole[row["index"]][x] for x in row}
            assert whole[row["index"]].keys() - row.keys() == {"prompt_sha256"}
    assert after.eigenvalues is not None
    assert after.eigenvalues["all"] == before.eigenvalues["all"]  # type: ignore[index]


def test_collected_at_different_times_they_stand_side_by_side(done: Path, tmp_path: Path) -> None:
    """And a folder that was collected can be collected again."""
    for name in ("gdn2-0", "qed-0"):
        shutil.copytree(done, tmp_path / name, ignore=lambda folder, _, name=name: _others(folder, name))
        collecting.collect(tmp_path / name, tmp_path / "kept")
    collecting.collect(done, tmp_path / "whole")
    collecting.collect(tmp_path / "whole", tmp_path / "again")
    whole, again = (
        {x.relative_to(base): x.read_bytes() for x in base.rglob("*.xz")}
        for base in (tmp_path / "whole", tmp_path / "again")
    )
    assert whole == again
    assert len([x for x in whole if x.name == "answers.jsonl.xz"]) == 2 + 5  # eval of both, and strengths but 1
    bases = [tmp_path / name / "runs" for name in ("kept", "whole")]
    kept, wanted = (
        [(x.path.name, n, y.rows) for x in runs(base) for n, y in x.results.items() if n[:5] == "pairs"]
        for base in bases
    )
    assert kept == wanted
    shutil.copy(done / "runs" / "qed-0" / "eval" / "pairs-64.json", tmp_path / "kept" / "runs" / "qed-0" / "eval")
    assert "pairs-64 is there twice, packed and by itself, and neither is used" in survey(bases[0])[1][0]
    changed = tmp_path / "gdn2-0" / "runs" / "gdn2-0" / "eval" / "pairs-64.jsonl"
    changed.write_text(changed.read_text().replace('"tokens": ', '"tokens": 1'))
    (tmp_path / "again" / "plan.json").unlink()
    with pytest.raises(ValueError, match=r"expected the same of prompts .* from every run"):
        collecting.collect(tmp_path / "gdn2-0", tmp_path / "again")
    assert not (tmp_path / "again" / "plan.json").exists()  # nothing was written
    (tmp_path / "whole" / "examples.jsonl.xz").unlink()
    assert "expected examples.jsonl.xz in a folder above it" in survey(tmp_path / "whole" / "runs")[1][0]


def test_what_was_not_finished_can_be_collected_again(tmp_path: Path) -> None:
    out, kept = tmp_path / "out", tmp_path / "kept"
    folder = synthetic.unit(out / "runs", "qed", 0, samples=4, tasks=("niah_single_1",), lengths=(4096, 8192)) / "eval"
    (out / "plan.json").write_text("{}")
    summary, answers = folder / "niah_single_1-4096.json", folder / "niah_single_1-4096.jsonl"
    whole, lines = summary.read_text(), answers.read_text()
    summary.write_text(json.dumps({name: x for name, x in json.loads(whole).items() if name != "result"}))
    answers.write_text("".join(lines.splitlines(keepends=True)[:2]))
    collecting.collect(out, kept)
    assert [x.partition("eval/")[2] for x in survey(kept / "runs")[1]] == ["niah_single_1-4096.json: not finished"]
    summary.write_text(whole)
    answers.write_text(lines)
    collecting.collect(out, kept)
    (run,), problems = survey(kept / "runs")
    assert problems == []
    assert sorted(run.results) == ["niah_single_1-4096", "niah_single_1-8192"]
    with pytest.raises(ValueError, match="--collect: expected another folder than that of the reproduction"):
        collecting.collect(out, out)


def _others(folder: str, name: str) -> list[str]:
    return [x.name for x in Path(folder).iterdir() if Path(folder).name == "runs" and x.name != name]


def test_metrics_are_thinned_but_for_validations(tmp_path: Path) -> None:
    folder = tmp_path / "out" / "runs" / "qed-0"
    folder.mkdir(parents=True)
    (tmp_path / "out" / "plan.json").write_text("{}")
    rows = [{"step": i, "loss": 3.0} | ({"validation_loss": 3.0} if i == 24 else {}) for i in range(36)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    collecting.collect(tmp_path / "out", tmp_path / "kept")
    kept = lzma.decompress((tmp_path / "kept" / "runs" / "qed-0" / "metrics.jsonl.xz").read_bytes()).splitlines()
    assert [json.loads(line)["step"] for line in kept] == [0, 10, 20, 24, 30, 35]


def test_folders_of_the_machine_are_not_collected(tmp_path: Path) -> None:
    """Wherever they stand: in the command, in files that were given, in paths below the folder itself."""
    out = tmp_path / "out"
    (out / "runs" / "qed-0").mkdir(parents=True)
    essays, elsewhere = str(tmp_path / "essays.json"), str(tmp_path / "a folder" / "corpus")
    (out / "plan.json").write_text(
        json.dumps({"essays": essays, "recall": {"fda": f"{elsewhere}.jsonl"}, "seeds": [0]})
    )
    words = [
        "python",
        "-m",
        "qed.reproduce.unit",
        str(out),
        "qed-0",
        "cpu",
        f"{elsewhere}.py",
        "--set",
        f"data={elsewhere}",
    ]
    config = {"data": str(out / "data"), "validation": elsewhere, "name": "mini-qed-0", "betas": [0.9, 0.95]}
    about = {"config": config, "command": shlex.join(words), "platform": "Linux/x", "date": "today"}
    (out / "runs" / "qed-0" / "config.json").write_text(json.dumps(about))
    collecting.collect(out, tmp_path / "kept")
    kept = {x.name: json.loads(x.read_text()) for x in (tmp_path / "kept").rglob("*.json")}
    assert kept["plan.json"] == {"essays": "essays.json", "recall": {"fda": "corpus.jsonl"}, "seeds": [0]}
    command = "python -m qed.reproduce.unit OUT qed-0 cpu corpus.py --set data=corpus"
    assert kept["config.json"] == about | {
        "config": config | {"data": "data", "validation": "corpus"},
        "command": command,
    }


@pytest.mark.parametrize("command", ["qed train mini --out runs/x", "qed 'it is", "python -m qed --set a=b=/ 'x y'"])
def test_a_command_without_folders_stays_as_it_is(command: str) -> None:
    assert without_folders(command) == command


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


@pytest.mark.slow
def test_cut_and_taken_up_again(tmp_path: Path) -> None:
    tokens = str(512 * 512)  # more than any machine trains in nine seconds
    plan = tiny(arms=("gdn2",), changes=STEPS | {"total_tokens": tokens, "decay_start_tokens": tokens})
    status, said = go(plan, tmp_path / "out", minutes=0.15)
    assert status == STOPPED, said
    assert "the same command resumes" in said
    assert json.loads((tmp_path / "out" / "state.json").read_text())["units"]["gdn2-0"]["finished"] is False
    status, said = go(plan, tmp_path / "out")
    assert status == 0, said
    rows = [json.loads(x) for x in (tmp_path / "out" / "runs" / "gdn2-0" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(512))


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
    none = scale in ("mini", "tracking", "recall")
    plan = PLANS[scale](Files() if none else Files(essays="essays.json", recall={"fda": "fda.jsonl"}))
    plan = with_settings(plan, plan.settings[:1]) if plan.settings else plan
    assert Plan.from_json(plan.to_json()) == plan
    for made in (plan, rehearsed(plan)):
        for unit in made.units:
            config = made.config(unit, tmp_path)
            assert config.model["rule"] == Arm.parse(unit.arm).rule
            assert config.seed == unit.seed
    swept = dataclasses.replace(plan, arms=("qed@0.5", "qed+theta12", "gdn2+erase2", "qed@1+erase2+theta3"))
    bound, factor, erase, all_three = (swept.config(unit, tmp_path) for unit in swept.units[:4])
    assert (erase.model_config().rule, erase.model_config().erase_max) == ("gdn2", 2.0)
    assert (all_three.model_config().lambda_max, all_three.model_config().erase_max) == (1.0, 2.0)
    assert all_three.theta_learning_rate == 3
    assert bound.model_config().lambda_max == 0.5
    assert factor.theta_learning_rate == 12
    short = scale in ("medium", "paper-short")
    assert (
        abs(travel(plan.config(Unit("qed", 0, "".join(plan.settings)), tmp_path)) / papers_travel() - 1) < 0.005
        or not short
    )
    if short:
        assert dataclasses.replace(plan, arms=("qed", "qed+theta10")).units
    else:
        with pytest.raises(ValueError, match=r"expected 'qed', which is the same, got 'qed\+theta10'"):
            dataclasses.replace(plan, arms=("qed+theta10",))
    assert plan.settings or min(plan.lengths) <= plan.config(plan.units[0], tmp_path).sequence
    assert set(rehearsed(plan).arms) == set(plan.arms)


def test_bad_input(tmp_path: Path) -> None:
    def said(*arguments: object) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["reproduce", *map(str, arguments)])
        return result.exit_code, " ".join(result.output.split())

    (tmp_path / "file").write_text("kept")
    assert said("--out", tmp_path / "file")[1].startswith("--out: expected a folder, got the file")
    assert (tmp_path / "file").read_text() == "kept"
    assert "--scale: expected" in said("--scale", "huge")[1]
    assert ", got 'qet'; the nearest is qed" in said("--arms", "qed,qet", "--out", tmp_path / "x")[1]
    for arm in ("gdn2@1", "qed@", "qed@x", "qed+theta", "gdn2+theta10", "qed+theta10@1", "linear+erase2", "gdn2+erase"):
        assert "RULE@λ_max or RULE+thetaFACTOR" in said("--arms", arm, "--out", tmp_path / "x")[1]
    for same, arm in (("qed@0.5", "qed@0.50"), ("qed", "qed@0.25")):
        assert f"expected {same!r}, which is the same, got {arm!r}" in said("--arms", arm, "--out", tmp_path / "x")[1]
    too_wide = said("--arms", "gdn2+erase3", "--out", tmp_path / "x")[1]
    assert "erase_max: expected a number above 0 and at most 2, got 3" in too_wide
    assert "--practice: expected a scale with S-NIAH" in said("--practice", 0.1, "--out", tmp_path / "x")[1]
    at = ("--scale", "small", "--out", tmp_path / "x")
    assert "--practice: expected a share between 0 and 1, got 1.5" in said(*at, "--practice", 1.5)[1]
    assert "--needles: expected one of niah_single_1" in said(*at, "--needles", "niah_single_9")[1]
    assert "--needles: expected one or more, each once" in said(*at, "--needles", "pairs,pairs")[1]
    assert "niah_multikey_1 hides its needles in essays" in said(*at, "--needles", "niah_multikey_1")[1]
    assert "--plan: expected a text file" in said(*at, "--plan", tmp_path / "none.md")[1]
    assert "--scale mini: expected no files" in said("--corpus", "x.jsonl", "--out", tmp_path / "x")[1]
    assert not (tmp_path / "x").exists()
