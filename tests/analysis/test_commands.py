"""`qed strength` and `qed eigenvalues` on a checkpoint, and the report of what they wrote."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from qed import QEDConfig, QEDForCausalLM
from qed.cli import app
from qed.data import tokenization
from qed.data.prepare import prepare
from qed.data.synthetic import documents


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder like one of `qed train`, with a model whose λ is large enough to matter."""
    folder = tmp_path / "runs" / "qed-0"
    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "eos_token_id": 0, "bos_token_id": None, "initializer_range": 0.3}
    QEDForCausalLM(QEDConfig.tiny(**sizes, theta_init=2.0, lambda_max=1.0)).save_pretrained(folder / "export")
    encoder = tokenization.train(itertools.islice(documents(400), 400), 512)
    encoder.save(str(folder / "export" / "tokenizer.json"))
    config = {"model": {"rule": "qed"}, "seed": 0, "sequence": 512, "total_tokens": 1000, "batch_tokens": 1000}
    (folder / "config.json").write_text(json.dumps({"config": config}))
    (tmp_path / "adjectivelist.txt").write_text("red\nold\n")
    (tmp_path / "nounlist.txt").write_text("fox\nowl\n")
    return folder


def call(*words: object) -> str:
    done = CliRunner().invoke(app, [str(x) for x in words])
    assert done.exit_code == 0, done.output
    return done.output


def test_strength_eigenvalues_report(run: Path, tmp_path: Path) -> None:
    options = ("--lengths", 512, "--samples", 4, "--batch", 4, "--words", tmp_path, "--out", run / "strength")
    call("strength", run / "export", "--scales", "-1,0,1", *options)
    found = json.loads((run / "strength" / "strength.json").read_text())
    trained = found["mean_strength"]["1.0"]
    assert trained == pytest.approx(float(torch.sigmoid(torch.tensor(2.0))), abs=1e-4)
    assert found["mean_strength"]["-1.0"] == pytest.approx(-trained)
    said = {
        s: [
            json.loads(x)["prediction"]
            for x in (run / "strength" / s / "niah_single_1-512.jsonl").read_text().splitlines()
        ]
        for s in ("-1", "0", "1")
    }
    assert said["0"] != said["1"] != said["-1"]  # λ reaches the answers
    assert len(list((run / "strength" / "prompts").glob("*.jsonl"))) == 1  # the same examples for all
    prepare(
        "synthetic:60",
        tokenizer=str(run / "export" / "tokenizer.json"),
        out=tmp_path / "data",
        console=Console(quiet=True),
    )
    call(
        "eigenvalues", run / "export", "--data", tmp_path / "data", "--tokens", 5000, "--out", run / "eigenvalues.json"
    )
    e = json.loads((run / "eigenvalues.json").read_text())
    assert e["all"]["eigenvalue"]["samples"] >= 5000
    assert sum(sum(x) for x in e["eigenvalue_histogram"]["counts"].values()) == e["all"]["eigenvalue"]["samples"]
    assert e["all"]["correction"]["mean"] > 0.3
    call("report", run.parent, "--out", tmp_path / "report")
    page = (tmp_path / "report" / "report.html").read_text()
    assert "Accuracy (%) with λ scaled by s at inference" in page
    assert f"<td>{trained:.3f}</td>" in page
    assert "Not finished: QED seed 0." in page


def test_bad_input(run: Path, tmp_path: Path) -> None:
    options = ("--lengths", "512", "--words", str(tmp_path), "--out", str(tmp_path / "out"))
    done = CliRunner().invoke(app, ["strength", str(run / "export"), "--scales", "0,2", *options])
    assert done.exit_code == 1
    assert "--scales: expected 1 among them" in done.output
    prepare("synthetic:60", tokenizer="bpe:300", out=tmp_path / "other", console=Console(quiet=True))
    done = CliRunner().invoke(app, ["eigenvalues", str(run / "export"), "--data", str(tmp_path / "other")])
    assert done.exit_code == 1
    assert "expected tokens of the checkpoint's tokenizer" in " ".join(done.output.split())
