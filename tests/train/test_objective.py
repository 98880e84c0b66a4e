"""The loss without logits in memory is cross-entropy, and so is its gradient."""

import pytest
import torch

from qed.train import objective
from qed.train.objective import linear_cross_entropy


@pytest.mark.parametrize("piece", [1, 7, 20, 100])
def test_the_loss_is_cross_entropy(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objective, "PIECE", piece)
    torch.manual_seed(0)
    hidden, weight = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((20, 8), (11, 8)))
    targets = torch.randint(0, 11, (20,))
    targets[[3, 19]] = -100
    found = linear_cross_entropy(hidden, weight, targets)
    truth = torch.nn.functional.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    assert torch.allclose(found, truth, rtol=1e-12)
    pairs = zip(*(torch.autograd.grad(0.3 * x, [hidden, weight]) for x in (found, truth)), strict=True)
    for a, b in pairs:
        assert torch.allclose(a, b, rtol=0, atol=1e-13)
