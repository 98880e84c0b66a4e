"""What the doctor says of a sound installation, and of a form that lies."""

import pytest
import torch
from typer.testing import CliRunner

from qed.cli import app
from qed.ops.registration import SEQUENCE_OPS

SMALL = ["doctor", "--device", "cpu", "--dtype", "float32", "--heads", "1", "--width", "8", "--tokens", "70"]


def test_a_sound_installation() -> None:
    result = CliRunner().invoke(app, SMALL)
    assert result.exit_code == 0, result.output
    assert result.output.count("within budget") >= 2
    assert "impl='auto' runs chunkwise" in result.output


def test_a_wrong_form_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*arguments: object, save: bool) -> tuple[torch.Tensor, torch.Tensor]:
        o, state = SEQUENCE_OPS["chunkwise"](*arguments, save=save)
        return o * 1.001, state

    monkeypatch.setattr("qed.ops.api.SEQUENCE_OPS", SEQUENCE_OPS | {"chunkwise": wrong})
    result = CliRunner().invoke(app, SMALL)
    assert result.exit_code == 1
    assert "not sound" in result.output


def test_an_unknown_dtype_is_refused() -> None:
    result = CliRunner().invoke(app, ["doctor", "--dtype", "int8"])
    assert result.exit_code == 2
    assert "--dtype: expected one of bfloat16, float16, float32, got int8" in result.output
