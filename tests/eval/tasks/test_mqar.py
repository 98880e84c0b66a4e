"""MQAR: every query has its pair, and accuracy tells right from wrong."""

import pytest
import torch

from qed import QEDConfig, QEDForCausalLM
from qed.eval.tasks import mqar
from qed.eval.tasks.mqar import Setting


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
