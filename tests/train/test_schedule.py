"""The learning rate: warm-up, plateau, linear decay."""

import pytest

from qed.recipes import build
from qed.train.schedule import learning_rate


def test_warm_up_plateau_and_fall() -> None:
    config = build("paper_340m", {"data": "x"})
    assert config.steps == 28611
    assert learning_rate(config, 0) == pytest.approx(3e-4 / 286)
    assert learning_rate(config, 285) == learning_rate(config, 20_000) == 3e-4
    start = 13_500_000_000 // 524_288
    assert learning_rate(config, start) == pytest.approx(3e-4, rel=1e-3)
    middle = (13_500_000_000 + 750_000_000) // 524_288
    assert learning_rate(config, middle) == pytest.approx(1.5e-4, rel=1e-2)
    assert 0 < learning_rate(config, config.steps - 1) < 3e-7
