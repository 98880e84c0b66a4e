"""Keeping only products for the backward changes memory, not gradients."""

import pytest
import torch

from qed import QEDConfig, QEDForCausalLM
from qed.model.causal_lm import compile_blocks, recompute_cheap
from qed.testing import relative_error


def gradients(model: QEDForCausalLM, ids: torch.Tensor) -> tuple[list[torch.Tensor], int]:
    """And how many bytes autograd kept."""
    kept: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss = model(ids, labels=ids).loss
    return list(torch.autograd.grad(loss, list(model.parameters()))), sum(kept.values())


@pytest.mark.parametrize(("rule", "how"), [("qed", "light"), ("qed", "cheap"), ("qed", "lean"), ("gdn", "cheap")])
def test_gradients_are_the_same(rule: str, how: str) -> None:
    torch.manual_seed(0)
    model = QEDForCausalLM(QEDConfig.tiny(rule=rule)).train()
    ids = torch.randint(3, 256, (2, 70))
    truth, _ = gradients(model, ids)
    recompute_cheap(model, how)
    found, _ = gradients(model, ids)
    assert all(torch.equal(x, y) for x, y in zip(found, truth, strict=True))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler's own
def test_compiled_blocks_keep_less() -> None:
    torch.manual_seed(0)
    model, ids = QEDForCausalLM(QEDConfig.tiny()).train(), torch.randint(3, 256, (2, 200))
    compile_blocks(model)
    truth, before = gradients(model, ids)
    for how, share in (("cheap", 0.8), ("lean", 0.95)):
        torch._dynamo.reset()
        recompute_cheap(model, how)
        compile_blocks(model)
        found, after = gradients(model, ids)
        assert after < share * before
        before = after
        for x, y in zip(found, truth, strict=True):
            assert relative_error(x, y) < 1e-4


def test_the_residual_stream_is_in_low_precision_under_autocast() -> None:
    model = QEDForCausalLM(QEDConfig.tiny())
    seen = []
    for block in model.model.layers:
        block.register_forward_hook(lambda module, inputs, output: seen.append(output[0].dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model.model(torch.arange(20)[None]).last_hidden_state.dtype == torch.bfloat16
    assert set(seen) == {torch.bfloat16}
