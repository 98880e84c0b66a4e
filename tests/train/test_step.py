"""A training step by itself."""

import torch

from qed import QEDConfig, QEDForCausalLM
from qed.train.step import tokens_per_second, training_step


def test_steps_on_the_same_rows_learn_them() -> None:
    torch.manual_seed(0)
    step = training_step(QEDForCausalLM(QEDConfig.tiny()), "cpu", compiled=False)
    step.rows = torch.randint(3, 256, (2, 33))
    before = float(step.loss(step.rows).detach())
    for _ in range(20):
        step()
    assert float(step.loss(step.rows).detach()) < 0.9 * before
    assert all(x.grad is None for x in step.model.parameters())


def test_speed_is_a_positive_number() -> None:
    assert tokens_per_second(QEDConfig.tiny(), "cpu", shape=(1, 16), compiled=False) > 0
