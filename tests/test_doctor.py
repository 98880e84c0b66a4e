"""What the doctor says of a sound installation, and of a form that lies."""

import dataclasses
import re
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from qed.cli import app
from qed.doctor import examine
from qed.layers.routes import PRODUCT
from qed.ops import operators
from qed.routes import Piece
from tests.marks import slow

SMALL = ["doctor", "--device", "cpu", "--dtype", "float32", "--heads", "1", "--width", "8", "--tokens", "70"]


def test_a_sound_installation() -> None:
    result = CliRunner().invoke(app, SMALL)
    assert result.exit_code == 0, result.output
    assert result.output.count("within budget") >= 4  # two forms, weak decay and strong
    found = re.search(
        "itself in float64: training (.*), gradients (.*), inference (.*), prompts (.*), decoding (.*), allowed",
        result.output,
    )
    assert found is not None, result.output
    assert all(1e-8 < float(x) < 1e-5 for x in found.groups())
    assert "impl='auto' runs chunkwise" in result.output


def test_it_says_where_nothing_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qed.doctor.environment", lambda device: {})
    monkeypatch.setattr("qed.doctor.architecture", lambda device: 89)
    monkeypatch.setattr("qed.doctor.DECAYS", {})  # enough is said before this GPU would be needed
    with pytest.raises(StopIteration), Console().capture() as said:
        examine(said._console, device="cuda", dtype=torch.bfloat16, heads=1, width=8, tokens=70)
    assert "not measured on this GPU (sm_89)" in said.get()


def test_a_wrong_form_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = operators.SequenceOperator.__call__

    def wrong(self: Any, x: Any, save: bool) -> tuple[torch.Tensor, torch.Tensor]:
        o, state = plain(self, x, save)
        return o * 1.001, state

    monkeypatch.setattr(operators.SequenceOperator, "__call__", wrong)
    result = CliRunner().invoke(app, SMALL)
    assert result.exit_code == 1
    assert "not sound" in result.output


@pytest.mark.parametrize("where", ["training", *slow("inference", "decoding")])
def test_a_wrong_model_is_found(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, -1)
        here = "training" if torch.is_grad_enabled() else "decoding" if both.shape[1] == 1 else "inference"
        off = here == where and both.dtype != torch.float64
        return torch.nn.functional.silu(gate) * up * (1.01 if off else 1)

    product = Piece("product", dataclasses.replace(PRODUCT.routes[-1], run=wrong))
    monkeypatch.setattr("qed.layers.mlp.PRODUCT", product)
    result = CliRunner().invoke(app, SMALL)
    assert result.exit_code == 1
    assert "not sound" in result.output


def test_an_unknown_dtype_is_refused() -> None:
    result = CliRunner().invoke(app, ["doctor", "--dtype", "int8"])
    assert result.exit_code == 1
    assert "--dtype: expected one of bfloat16, float16, float32, got 'int8'" in result.output
