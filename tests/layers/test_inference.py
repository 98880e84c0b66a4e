"""A model whose pieces run in kernels gives what it gives in plain torch, layer after layer, at any shape."""

import pytest
import torch

from qed import QEDConfig, QEDForCausalLM
from qed.routes import TRITON_INSTALLED
from qed.testing import relative_error

pytestmark = pytest.mark.filterwarnings("ignore")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLOSE = 1e-5 if DEVICE == "cpu" else 1e-4
LENGTHS = (75, 40, 33)


@pytest.mark.skipif(not TRITON_INSTALLED, reason="needs Triton")
@pytest.mark.slow
@pytest.mark.parametrize("rule", ["qed", "gdn", "eda"])
def test_inference_is_plain_torch(rule: str) -> None:
    torch.manual_seed(0)
    model = QEDForCausalLM(QEDConfig.tiny(rule=rule, initializer_range=0.2)).eval().to(DEVICE)
    ids = torch.randint(0, 256, (2, 75), device=DEVICE)
    packed = {"cu_seqlens": torch.tensor([0, 30, 31, 75], device=DEVICE)}
    kernels = {"norm": "triton", "product": "triton"} | ({} if rule == "eda" else {"operands": "triton"})
    with torch.no_grad():
        model.set_impl("reference", recurrence="auto")
        truth = [model(ids[:, :n]).logits for n in LENGTHS]
        truth_packed = model(ids[:1], **packed).logits
        model.set_strength_scale(0.5)
        halved = model(ids).logits
        model.set_impl("auto", **kernels)
        assert relative_error(model(ids).logits, halved) < CLOSE
        model.set_strength_scale(1.0)
        for n, expected in zip(LENGTHS, truth, strict=True):
            assert relative_error(model(ids[:, :n]).logits, expected) < CLOSE
        assert relative_error(model(ids[:1], **packed).logits, truth_packed) < CLOSE
        first = model(ids[:, :20], use_cache=True)
        rest = model(ids[:, 20:74], past_key_values=first.past_key_values, use_cache=True)
        last = model(ids[:, 74:], past_key_values=rest.past_key_values)
        parts = torch.cat([first.logits, rest.logits, last.logits], 1)
        assert relative_error(parts, truth[0]) < CLOSE
    if rule == "qed":
        assert relative_error(halved, truth[0]) > 1e-4


@pytest.mark.parametrize("layers", [["qed", "qed"], ["qed", "full_attention"]])
def test_products_over_the_residual_stream(layers: list[str]) -> None:
    """They leave alone what the caller gave."""
    torch.manual_seed(0)
    model = QEDForCausalLM(QEDConfig.tiny(layer_types=layers, initializer_range=0.2)).eval()
    given = torch.randn(2, 40, model.config.hidden_size)
    kept = given.clone()
    with torch.no_grad():
        truth = model(inputs_embeds=given).logits
        model.set_impl("auto", projection="in-place")
        assert relative_error(model(inputs_embeds=given).logits, truth) < 1e-5
    assert torch.equal(given, kept)


class Wrapped(torch.nn.Module):
    """Takes one tensor, as modules of quantised and adapted models do."""

    def __init__(self, linear: torch.nn.Linear):
        super().__init__()
        self.linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_every_matrix_is_a_plain_linear_that_may_be_replaced() -> None:
    torch.manual_seed(0)
    model = QEDForCausalLM(QEDConfig.tiny(layer_types=["qed", "full_attention"])).eval()
    ids = torch.randint(0, 256, (2, 20))
    truth = model(ids).logits
    matrices = {name: x for name, x in model.named_modules() if isinstance(x, torch.nn.Linear)}
    assert {type(x) for x in matrices.values()} == {torch.nn.Linear}
    assert {name.split(".")[-1] for name in matrices} == {
        *("in_proj", "f_proj", "g_proj", "o_proj", "q_proj", "k_proj", "v_proj"),
        *("gate_up_proj", "down_proj", "lm_head"),
    }
    for name, x in matrices.items():
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, Wrapped(x))
    assert torch.equal(model(ids).logits, truth)


def test_hooks_of_a_matrix_are_called() -> None:
    """The product over the residual stream would pass them by: it leaves the matrix to its module then."""
    torch.manual_seed(0)
    model, calls = QEDForCausalLM(QEDConfig.tiny()).eval().to(DEVICE), []
    model.model.layers[0].mixer.o_proj.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        model(torch.randint(0, 256, (2, 20), device=DEVICE))
        assert calls == [1]
        model.set_impl("auto", projection="in-place")
        with pytest.raises(RuntimeError, match="projection: the module has hooks"):
            model(torch.randint(0, 256, (2, 20), device=DEVICE))


@pytest.mark.skipif(not TRITON_INSTALLED, reason="needs Triton")
def test_hooks_of_the_convolution_are_called() -> None:
    """The kernel that makes the operands convolves by itself: it leaves a convolution with hooks to its module."""
    torch.manual_seed(0)
    model, calls = QEDForCausalLM(QEDConfig.tiny()).eval().to(DEVICE), []
    model.model.layers[0].mixer.conv.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        model(torch.randint(0, 256, (2, 20), device=DEVICE))
        assert calls == [1]
        model.set_impl("auto", operands="triton")
        with pytest.raises(RuntimeError, match="operands: the convolution has hooks"):
            model(torch.randint(0, 256, (2, 20), device=DEVICE))


@pytest.mark.skipif(not TRITON_INSTALLED, reason="needs Triton")
def test_hooks_of_all_modules_are_called() -> None:
    model = QEDForCausalLM(QEDConfig.tiny()).eval().to(DEVICE)
    model.set_impl("auto", projection="in-place")
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with torch.no_grad(), pytest.raises(RuntimeError, match="projection: the module has hooks"):
            model(torch.randint(0, 256, (2, 20), device=DEVICE))
    finally:
        handle.remove()
