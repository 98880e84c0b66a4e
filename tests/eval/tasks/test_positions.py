"""Loss by position: the model's own, every position in one bin."""

import pytest
import torch

from qed import QEDConfig, QEDForCausalLM
from qed.eval.tasks import positions


def test_losses_in_pieces_are_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, rows = QEDForCausalLM(QEDConfig.tiny()).eval(), torch.randint(256, (2, 102))
    monkeypatch.setattr(positions, "PIECE", 40)
    found = positions.losses(model, rows)
    logits = model(rows[:, :-1]).logits.detach()
    truth = torch.nn.functional.cross_entropy(logits.mT, rows[:, 1:], reduction="none")
    assert torch.allclose(found, truth, rtol=1e-5, atol=1e-5)


def test_bins_cover_every_position_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tokens:
        def __len__(self) -> int:
            return 1001

        def read(self, start: int, count: int) -> object:
            return torch.arange(start, start + count).numpy()

    given = torch.rand(3, 300)
    monkeypatch.setattr(positions, "losses", lambda model, rows: given[int(rows[0, 0]) // 300][None])
    found = positions.by_position(None, Tokens(), length=300, rows=10)  # type: ignore[arg-type]
    assert [(x["from"], x["to"]) for x in found["bins"]] == [(0, 64), (64, 128), (128, 256), (256, 300)]
    assert found["rows"] == 3
    assert found["loss"] == pytest.approx(float(given.mean()), rel=1e-6)
    assert found["bins"][1]["loss"] == pytest.approx(float(given[:, 64:128].mean()), rel=1e-6)
    with pytest.raises(ValueError, match="--data: expected more than 2000 tokens for one row, got 1001"):
        positions.by_position(None, Tokens(), length=2000, rows=1)  # type: ignore[arg-type]
