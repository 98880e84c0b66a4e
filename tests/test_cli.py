"""The command line as a person uses it."""

import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

import qed
from qed.cli import app

runner = CliRunner()


def test_version_and_help() -> None:
    assert runner.invoke(app, ["--version"]).output.strip() == qed.__version__
    assert "reproduce" in runner.invoke(app, ["--help"]).output


def test_a_missing_plotting_package_is_said_before_the_work(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from qed.cli import app\n"
        f"app(['reproduce', '--out', {str(tmp_path / 'out')!r}])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    assert "pip install 'qed-attention[analysis]'" in " ".join(result.stderr.split())
    assert not (tmp_path / "out").exists()
