"""The command line as a person uses it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import qed
from qed.cli import app

runner = CliRunner()


def test_version_and_help() -> None:
    assert runner.invoke(app, ["--version"]).output.strip() == qed.__version__
    assert "reproduce" in runner.invoke(app, ["--help"]).output


def test_reproduce_writes_its_figure_and_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qed.reproduce.LENGTHS", (8, 40))
    result = runner.invoke(app, ["reproduce", "--out", str(tmp_path / "a" / "b")])
    assert result.exit_code == 0, result.output
    assert "Nothing is trained" in result.output
    found = json.loads((tmp_path / "a" / "b" / "demonstration.json").read_text())
    assert [row["tokens"] for row in found["forms"]] == [8, 40]
    assert all(row["chunkwise_error"] < 1e-6 for row in found["forms"])
    for row in found["strength"]:
        assert row["one_token"] == pytest.approx(row["line"], rel=1e-9, abs=1e-15)  # eq. 12
    png = (tmp_path / "a" / "b" / "demonstration.png").read_bytes()
    assert png.startswith(b"\x89PNG")


def test_reproduce_refuses_a_file_as_its_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    result = runner.invoke(app, ["reproduce", "--out", str(tmp_path / "file")])
    assert result.exit_code == 2
    assert "--out: expected a directory, got the file" in result.output
    assert (tmp_path / "file").read_text() == "kept"


def test_a_missing_plotting_package_is_said_before_the_work(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from qed.cli import app\n"
        f"app(['reproduce', '--out', {str(tmp_path / 'out')!r}])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    assert "pip install 'qed-attention[analysis]'" in result.stdout
    assert not (tmp_path / "out").exists()
