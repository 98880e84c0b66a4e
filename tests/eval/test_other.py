"""MQAR and loss by position."""

import pytest
import torch

from qed import QEDConfig, QEDForCausalLM
from qed.eval import mqar, positions
from qed.eval.mqar import Setting


@pytest.mark.parametrize("setting", [Setting(64, 4, 50), Setting(128, 32, 50)])
def test_every_query_has_its_pair(setting: Setting) -> None:
    tokens, targets = mqar.examples(setting, seed=0)
    assert tokens.shape == targets.shape == (50, setting.length)
    for row, wanted in zip(tokens.tolist(), targets.tolist(), strict=True):
        pairs = dict(zip(row[: 2 * setting.pairs : 2], row[1 : 2 * setting.pairs : 2], strict=True))
        assert len(pairs) == setting.pairs == len(set(pairs.values()))
        assert all(1 <= k < 4096 <= v < 8192 for k, v in pairs.items())
        asked = {i: x for i, x in enumerate(wanted) if x != -100}
        assert sorted(row[i] for i in asked) == sorted(pairs)  # each once
        assert all(i >= 2 * setting.pairs and i % 2 == 0 and pairs[row[i]] == x for i, x in asked.items())


def test_queries_come_early() -> None:
    """The first place is likelier than the second by 2^0.99, with one pair."""
    _, targets = mqar.examples(Setting(64, 1, 20_000), seed=0)
    counts = (targets != -100).sum(0)[2::2].float()
    assert 1.85 < counts[0] / counts[1] < 2.15
    assert 2.7 < counts[0] / counts[2] < 3.25


def test_accuracy_tells_right_from_wrong() -> None:
    torch.manual_seed(0)
    model = QEDForCausalLM(QEDConfig.tiny(vocab_size=64))
    tokens = torch.randint(64, (6, 20))
    said = model(tokens).logits.argmax(-1)
    targets = torch.where(torch.rand(6, 20) < 0.3, said, -100)
    assert mqar.accuracy(model, tokens, targets, batch=4) == 1
    targets[targets != -100] = (targets[targets != -100] + 1) % 64
    assert mqar.accuracy(model, tokens, targets, batch=4) == 0
    with pytest.raises(ValueError, match="mqar: expected a model of 8192 tokens, got 64"):
        mqar.accuracy(model, tokens + 64, targets)


def test_too_many_pairs() -> None:
    with pytest.raises(ValueError, match="pairs: expected at most a quarter of 64 tokens, got 17"):
        mqar.examples(Setting(64, 17, 1), seed=0)


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
