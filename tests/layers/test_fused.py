"""What inference on a GPU does its own way gives what it gives as written, layer after layer, at any shape."""

from collections import Counter
from typing import Any

import pytest
import torch

from qed import QEDConfig, QEDForCausalLM
from qed.layers import fused, linear, mixer, mlp, norm, prologue, row_kernels
from qed.testing import relative_error

pytestmark = pytest.mark.filterwarnings("ignore")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLOSE = 1e-5 if DEVICE == "cpu" else 1e-4
LENGTHS = (75, 40, 33)


@pytest.mark.parametrize("rule", ["qed", "gdn", "eda"])
def test_inference_is_what_is_written(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = QEDForCausalLM(QEDConfig.tiny(rule=rule, initializer_range=0.2)).eval().to(DEVICE)
    ids, used = torch.randint(0, 256, (2, 75), device=DEVICE), Counter()
    packed = {"cu_seqlens": torch.tensor([0, 30, 31, 75], device=DEVICE)}

    def ways(own: bool) -> None:
        for module in (fused, linear, mixer, mlp, norm):
            monkeypatch.setattr(module, "pays", lambda x: own and not torch.compiler.is_compiling())

    def counted(module: Any, name: str) -> None:
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *x: (used.update([name]), function(*x))[1])

    with torch.no_grad():
        ways(own=False)
        truth = [model(ids[:, :n]).logits for n in LENGTHS]
        truth_packed = model(ids[:1], **packed).logits
        model.set_strength_scale(0.5)
        halved = model(ids).logits
        ways(own=True)
        assert relative_error(model(ids).logits, halved) < CLOSE
        model.set_strength_scale(1.0)
        for n, expected in zip(LENGTHS, truth, strict=True):
            assert relative_error(model(ids[:, :n]).logits, expected) < CLOSE
        assert relative_error(model(ids[:1], **packed).logits, truth_packed) < CLOSE
        first = model(ids[:, :20], use_cache=True)
        for module, name in ((row_kernels, "rms_norm"), (row_kernels, "silu_product"), (prologue, "operands")):
            counted(module, name)
        rest = model(ids[:, 20:74], past_key_values=first.past_key_values, use_cache=True)
        of_a_stretch = Counter(used)  # one token on a GPU is a step, with kernels of its own
        last = model(ids[:, 74:], past_key_values=rest.past_key_values)
        parts = torch.cat([first.logits, rest.logits, last.logits], 1)
        assert relative_error(parts, truth[0]) < CLOSE
    n = model.config.num_hidden_layers
    assert of_a_stretch == {"rms_norm": 3 * n + 1, "silu_product": n} | ({} if rule == "eda" else {"operands": n})
    if rule == "qed":
        assert relative_error(halved, truth[0]) > 1e-4


@pytest.mark.parametrize("layers", [["qed", "qed"], ["qed", "full_attention"]])
def test_products_over_the_residual_stream(layers: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = QEDForCausalLM(QEDConfig.tiny(layer_types=layers, initializer_range=0.2)).eval()
    given = torch.randn(2, 40, model.config.hidden_size)
    kept, over = given.clone(), []
    with torch.no_grad():
        truth = model(inputs_embeds=given).logits
        monkeypatch.setattr(linear, "pays", lambda x: over.append(x.shape) or True)
        assert relative_error(model(inputs_embeds=given).logits, truth) < 1e-5
    assert len(over) == 2 * len(layers)
    assert torch.equal(given, kept)


def test_a_bias_is_added_to_any_shape() -> None:
    torch.manual_seed(0)
    layer, x = linear.Linear(6, 5), torch.randn(2, 3, 4, 12)[..., 2:8]
    assert torch.allclose(layer(x), x @ layer.weight.t() + layer.bias, atol=1e-6)


def test_projections_may_be_replaced() -> None:
    """By modules that take one tensor, as those of quantised and adapted models do."""
    torch.manual_seed(0)
    model = QEDForCausalLM(QEDConfig.tiny(layer_types=["qed", "full_attention"])).eval()
    ids = torch.randint(0, 256, (2, 20))
    truth = model(ids).logits
    for block in model.model.layers:
        for parent, name in ((block.mixer, "o_proj"), (block.mlp, "down_proj")):
            plain = torch.nn.Linear(*reversed(getattr(parent, name).weight.shape), bias=False)
            plain.load_state_dict(getattr(parent, name).state_dict())
            setattr(parent, name, plain)
    assert torch.equal(model(ids).logits, truth)
