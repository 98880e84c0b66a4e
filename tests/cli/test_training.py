"""`qed train` as a person meets it: it needs no data of one's own, and says how it went and what to do next."""

import dataclasses
import json
import shlex
import signal
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from qed.cli import app
from qed.data.prepare import prepare
from qed.reproduce.plan import PLANS, Files, Plan, mini
from qed.train.loop import STOPPED, StepResult, Trainer

runner = CliRunner()
FEW = {
    "sequence": "32", "batch_tokens": "64", "micro_tokens": "64", "total_tokens": "640", "decay_start_tokens": "512",
    "validate_every": "5", "validation_tokens": "64",
}  # fmt: skip


def words(out: Path, *more: str, **changes: str) -> list[str]:
    """The command of a short mini run."""
    settings = [word for name, x in (FEW | changes).items() for word in ("--set", f"{name}={x}")]
    return ["train", "mini", "--out", str(out), "--device", "cpu", *settings, *more]


def few(files: Files) -> Plan:
    return dataclasses.replace(mini(files), source="synthetic:2000")


@pytest.fixture
def few_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PLANS, "mini", few)


@pytest.mark.usefixtures("few_documents")
def test_a_mini_run_needs_no_data(tmp_path: Path) -> None:
    """It has the corpus of `qed reproduce --scale mini`, and the same command finds it again."""
    out = tmp_path / "run"
    first = runner.invoke(app, words(out))
    assert first.exit_code == 0, first.output
    assert "warning" not in first.output
    assert "no data given: this run trains on the built-in corpus (synthetic:2000)" in first.output
    config = json.loads((out / "config.json").read_text())["config"]
    assert (config["data"], config["validation"]) == (str(out / "data"), str(out / "validation"))
    plan = PLANS["mini"](Files())
    for folder, part in (("data", "rest"), ("validation", "held")):
        asked = json.loads((out / folder / "index.json").read_text())["asked"]
        assert (asked["source"], asked["part"]) == (plan.source, f"{part}:{plan.held_out}")
    again = runner.invoke(app, words(out))
    assert again.exit_code == 0, again.output
    assert "resuming at step 10" in again.output
    assert again.stdout.splitlines()[-3:] == first.stdout.splitlines()[-3:]  # nothing was left to do
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(10))
    measured = runner.invoke(app, ["eigenvalues", str(out), "--device", "cpu"])  # over what the run held out
    assert measured.exit_code == 0, measured.output
    written = json.loads((out / "eigenvalues.json").read_text())
    assert written["provenance"]["data"] == str(out / "validation")
    assert written["tokens"] == json.loads((out / "validation" / "index.json").read_text())["tokens"]
    assert rows[-1]["validation_loss"] > 0


@pytest.mark.usefixtures("few_documents")
def test_a_run_on_other_data_gets_no_corpus(tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "config.json").write_text(json.dumps({"config": {"data": "elsewhere"}}))
    result = runner.invoke(app, words(out))
    assert result.exit_code == 1
    assert "holds a run with another data, elsewhere; use another folder" in " ".join(result.output.split())
    assert [x.name for x in out.iterdir()] == ["config.json"]


@pytest.mark.parametrize(("recipe", "settings"), [("small", ()), ("mini", ("--set", "validation=somewhere"))])
def test_other_runs_need_data(tmp_path: Path, recipe: str, settings: tuple[str, ...]) -> None:
    result = runner.invoke(app, ["train", recipe, "--out", str(tmp_path / "run"), *settings])
    assert result.exit_code == 1
    assert f"RECIPE: {recipe} needs --set data=…" in result.output
    assert not (tmp_path / "run").exists()


def test_a_corpus_that_cannot_express_its_task_is_warned_of(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("xylem quokka. " * 400)
    prepare(str(tmp_path / "text.txt"), tokenizer="words:64", out=tmp_path / "data", console=Console(quiet=True))
    result = runner.invoke(app, words(tmp_path / "run", data=str(tmp_path / "data")))
    assert "warning: pairs cannot be answered with this tokenizer" in " ".join(result.stderr.split())
    assert result.exit_code == 0, result.output


def test_a_dry_run_prepares_nothing(tmp_path: Path) -> None:
    result = runner.invoke(app, words(tmp_path / "run", "--dry-run"))
    assert result.exit_code == 0, result.output
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("few_documents")
def test_a_finished_run_says_how_it_went_and_what_comes_next(tmp_path: Path) -> None:
    """The command that it names runs as it is written, though the folder's name has a blank."""
    out = tmp_path / "a run"
    result = runner.invoke(app, words(out))
    assert result.exit_code == 0, result.output
    finished, place, following = result.stdout.splitlines()[-3:]
    row = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    losses = f"final loss {row['loss']:.4f}, validation loss {row['validation_loss']:.4f}"
    assert finished.startswith(f"finished: {losses}, 640 tokens in 0:")
    assert place == f"the model is in {out / 'export'}"
    qed, *call = shlex.split(following.removeprefix("next: "))
    assert qed == "qed"
    evaluated = runner.invoke(app, [*call, "--samples", "2", "--device", "cpu"])
    assert evaluated.exit_code == 0, evaluated.output
    assert {x.name for x in (out / "eval").glob("pairs-*.json")} == {f"pairs-{n}.json" for n in (32, 64, 128)}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.usefixtures("few_documents")
def test_a_stopped_run_says_that_it_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    usual = Trainer._step

    def step(trainer: Trainer) -> StepResult:
        if trainer.step == 3:
            signal.raise_signal(number)
        return usual(trainer)

    monkeypatch.setattr(Trainer, "_step", step)
    result = runner.invoke(app, words(tmp_path))
    assert result.exit_code == STOPPED, result.output
    assert result.stdout.splitlines()[-1] == "saved at step 4; the same command resumes"
    monkeypatch.undo()
    monkeypatch.setitem(PLANS, "mini", few)
    again = runner.invoke(app, words(tmp_path))
    assert again.exit_code == 0, again.output
    assert "resuming at step 4" in again.output
