"""Pieces that are compiled by themselves on a GPU give what they give as written, layer after layer, at any shape."""

import pytest
import torch

from qed import QEDConfig, QEDForCausalLM
from qed.layers import fused
from qed.testing import relative_error

pytestmark = pytest.mark.filterwarnings("ignore")
LENGTHS = (75, 40, 33)


@pytest.mark.parametrize("rule", ["qed", "qed-rand", "gdn"])
def test_compiled_pieces_are_the_pieces(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = QEDForCausalLM(QEDConfig.tiny(rule=rule, initializer_range=0.2)).eval()
    ids, compiled = torch.randint(0, 256, (2, 75)), []

    def everywhere(x: torch.Tensor) -> bool:
        if torch.compiler.is_compiling():
            return False
        compiled.append(x.shape)
        return True

    with torch.no_grad():
        truth = [model(ids[:, :n]).logits for n in LENGTHS]
        model.set_strength_scale(0.5)
        halved = model(ids).logits
        monkeypatch.setattr(fused, "pays", everywhere)
        assert relative_error(model(ids).logits, halved) < 1e-5
        model.set_strength_scale(1.0)
        for n, expected in zip(LENGTHS, truth, strict=True):
            assert relative_error(model(ids[:, :n]).logits, expected) < 1e-5
    pieces = 3 * model.config.num_hidden_layers  # operands, gated norm and SwiGLU's product
    assert len(compiled) == pieces * (1 + len(LENGTHS))
    if rule != "gdn":
        assert relative_error(halved, truth[0]) > 1e-4
