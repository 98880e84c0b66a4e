"""Pieces that are compiled by themselves on a GPU give what they give as written, layer after layer, at any shape."""

import pytest
import torch

from qed import QEDConfig, QEDForCausalLM
from qed.layers import fused
from qed.testing import relative_error

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("rule", ["qed", "qed-rand", "gdn"])
def test_compiled_pieces_are_the_pieces(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = QEDForCausalLM(QEDConfig.tiny(rule=rule, initializer_range=0.2)).eval()
    ids = torch.randint(0, 256, (2, 75))
    compiled = []
    plain_compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda piece: compiled.append(piece) or plain_compile(piece))
    with torch.no_grad():
        truth = [model(ids[:, :n]).logits for n in (75, 40, 33)]
        assert not compiled
        monkeypatch.setattr(fused, "pays", lambda x: not torch.compiler.is_compiling())
        for n, expected in zip((75, 40, 33), truth, strict=True):
            assert relative_error(model(ids[:, :n]).logits, expected) < 1e-5
    cache_used = {piece.__qualname__ for piece in compiled}
    assert cache_used <= {"Mixer._operands", "GatedRMSNorm.forward", "SwiGLU._product"}
    with torch.no_grad():
        model.set_strength_scale(0.5)
        halved = model(ids).logits
        monkeypatch.undo()
        assert relative_error(halved, model(ids).logits) < 1e-5
        if rule != "gdn":
            assert relative_error(halved, truth[0]) > 1e-4
