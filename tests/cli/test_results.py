"""Results of a run are kept in its folder, where reports find them; those that lie elsewhere are named."""

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qed.analysis.results import survey
from qed.cli import app

from .test_training import few_documents, words

__all__ = ["few_documents"]
runner = CliRunner()
PAIRS = ("--task", "pairs", "--lengths", "32", "--samples", "2", "--device", "cpu")


def call(*given: str | Path) -> str:
    result = runner.invoke(app, [str(word) for word in given])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few_documents: None) -> Path:
    monkeypatch.chdir(tmp_path)
    call(*words(Path("runs/x")))
    return Path("runs/x")


def test_without_out_they_are_where_the_report_looks(run: Path) -> None:
    call("eval", run, *PAIRS)
    call("eval", run / "export", *PAIRS, "--strength", "0.5")
    call("strength", run, *PAIRS, "--scales", "0,1")
    call("eigenvalues", run, "--data", run / "validation", "--tokens", "100")
    (read,), problems = survey(Path("runs"))
    assert problems == []
    assert list(read.results) == ["pairs-32"]
    assert {scale: list(x) for scale, x in read.strengths.items()} == {s: ["pairs-32"] for s in (0.0, 0.5, 1.0)}
    assert read.eigenvalues is not None
    assert survey(run)[0][0].results.keys() == read.results.keys()  # a run's own folder is one too


def test_a_checkpoint_without_a_run_keeps_its_own(run: Path) -> None:
    shutil.copytree(run / "export", "model")
    call("eval", "model", *PAIRS)
    assert Path("model/eval/pairs-32.json").exists()
    _, problems = survey(Path(), run.parent)
    assert "model/config.json: expected the configuration of a run" in problems[0]


def test_results_that_belong_to_no_run_are_named(run: Path) -> None:
    call("eval", run, *PAIRS)
    for place in ("runs/eval", "runs/x/evaluation", "runs/other/seed-0/eval"):
        shutil.copytree(run / "eval", place)
    shutil.copytree(run, "runs/mini/runs/qed-0")
    _, problems = survey(Path("runs"))
    named = {problem.partition(":")[0] for problem in problems}
    assert named == {"runs/eval", "runs/x/evaluation", "runs/other/seed-0/eval", "runs/mini/runs"}
    assert "runs/mini/runs: runs that are left out; `qed report runs runs/mini/runs` reports them too" in problems
    shutil.copytree(run / "eval", "runs/report/copies")
    Path("runs/report/report.html").write_text("")
    assert survey(Path("runs"))[1] == problems  # of a report's own files nothing is said


def test_a_result_with_another_strength_is_not_taken_for_the_trained_model(run: Path) -> None:
    call("eval", run, *PAIRS, "--strength", "0", "--out", run / "eval")
    (read,), problems = survey(Path("runs"))
    assert read.results == {}
    assert "pairs-32.json: expected a result with s = 1, got one with s = 0.0" in problems[0]


def test_prompts_without_a_checkpoint_need_a_folder(run: Path) -> None:
    tokenizer = ("--tokenizer", run / "export" / "tokenizer.json", "--prompts-only")
    refused = runner.invoke(app, [str(x) for x in ("eval", *PAIRS, *tokenizer)])
    assert "--out: expected a folder for the prompts, since there is no CHECKPOINT" in " ".join(refused.output.split())
    call("eval", *PAIRS, *tokenizer, "--prompts", "prompts")
    assert list(Path("prompts").glob("pairs-32-*.jsonl"))
    assert not Path("eval").exists()


def test_a_task_that_the_tokenizer_cannot_express_is_warned_about(run: Path) -> None:
    Path("words").mkdir()
    for name, text in (("adjectivelist.txt", "red\nold\n"), ("nounlist.txt", "fox\nowl\n")):
        Path("words", name).write_text(text)
    needle = (*PAIRS, "--task", "niah_single_1", "--lengths", "256", "--words", "words")
    result = runner.invoke(app, ["eval", str(run), *needle])
    assert result.exit_code == 0, result.output
    assert "niah_single_1 cannot be answered with this tokenizer" in result.stderr
    assert "pairs cannot" not in result.stderr
    assert len(result.stderr.splitlines()) == 1
