"""Quantisers convert every matrix but the last, generation goes on, and what cannot take quantised weights says so.

One import of torchao and bitsandbytes for all of them, so they are slow together.
"""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BitsAndBytesConfig, TorchAoConfig

from qed import QEDConfig, QEDForCausalLM, explain
from qed.layers.obstacles import plain_linear_obstacle
from qed.layers.routes import BLOCK, block_in_torch
from qed.model.decoding import stream
from qed.model.fingerprint import fingerprint
from qed.model.matrices import converted, listed, matrices
from qed.routes import Call
from qed.testing import relative_error

from .test_causal_lm import HYBRID, tokens

torchao = pytest.importorskip("torchao.quantization")
bitsandbytes = pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.slow
SIZES = {"hidden_size": 128, "num_heads": 2, "head_dim": 64, "intermediate_size": 256}
STACKS: dict[str, dict[str, Any]] = {
    "qed": {},
    "gdn": {"rule": "gdn"},  # whose gates have one number per head
    "narrow": {"num_heads": 4, "head_dim": 32},  # f_proj and g_proj have fewer columns than share a scale
    "hybrid": HYBRID,
    "untied": {"tie_word_embeddings": False, "initializer": "xavier"},
}
# Two numbers: bytes of a weight in storage, scales aside; how far logits may be off, relative to their norm.
QUANTISERS: dict[str, tuple[str, float, float]] = {
    "torchao, 8 bits": ("Int8Tensor", 1.0, 0.02),
    "bitsandbytes, 8 bits": ("Linear8bitLt", 1.0, 0.04),
    "bitsandbytes, 4 bits": ("Linear4bit", 0.5, 0.25),
    "bitsandbytes, 4 bits, double": ("Linear4bit", 0.5, 0.25),
}
GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def make_settings(quantiser: str, excluded: list[str] | None = None) -> Any:
    if quantiser == "torchao, 8 bits":
        return TorchAoConfig(torchao.Int8WeightOnlyConfig(), modules_to_not_convert=excluded)
    options = {"load_in_8bit": True} if "8 bits" in quantiser else {"load_in_4bit": True}
    double = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": "double" in quantiser}
    return BitsAndBytesConfig(**options, **double, llm_int8_skip_modules=excluded)


def make(stack: str = "qed") -> QEDForCausalLM:
    torch.manual_seed(0)
    changes = SIZES | STACKS[stack] | {"initializer_range": 0.02}
    return QEDForCausalLM(QEDConfig.tiny(**changes)).eval()


def load(folder: Path, quantiser: str, stack: str = "qed", **options: Any) -> QEDForCausalLM:
    make(stack).save_pretrained(folder)
    return QEDForCausalLM.from_pretrained(folder, quantization_config=make_settings(quantiser, **options))


def stored(x: Any) -> int:
    """Bytes of a tensor, or of the tensors that it is made of."""
    if hasattr(x, "__tensor_flatten__"):
        return sum(stored(getattr(x, name)) for name in x.__tensor_flatten__()[0])
    return x.numel() * x.element_size()


@pytest.mark.parametrize("quantiser", QUANTISERS)
@pytest.mark.parametrize("stack", STACKS)
def test_every_matrix_but_the_last_is_converted(stack: str, quantiser: str, tmp_path: Path) -> None:
    """They take the bytes they should; everything else stays as it was; logits are near, and generation goes on."""
    kind, bytes_each, budget = QUANTISERS[quantiser]
    plain, model, x = make(stack), load(tmp_path / "plain", quantiser, stack), tokens(2, 24)
    names = set(matrices(plain)) - {"lm_head"}
    assert converted(model) == dict.fromkeys(names, kind)
    sizes = {name: plain.get_submodule(name).weight.numel() for name in names}
    for name in names:
        scales = 2 * 4 * plain.get_submodule(name).out_features  # torchao's zero points too
        assert bytes_each * sizes[name] <= stored(model.get_submodule(name).weight) <= bytes_each * sizes[name] + scales
    before, after = (sum(map(stored, {id(p): p for p in m.parameters()}.values())) for m in (plain, model))
    assert after < before - (4 - bytes_each - 0.2) * sum(sizes.values())
    rest = {name: p for name, p in plain.named_parameters() if name.removesuffix(".weight") not in names}
    assert all(torch.equal(model.get_parameter(name), p) for name, p in rest.items())
    with torch.no_grad():
        found = model(x).logits
        assert relative_error(found, plain(x).logits) < budget
    text = model.generate(x, attention_mask=torch.ones_like(x), **GREEDY)
    assert torch.equal(text, torch.cat([x, *stream(model, x, max_new_tokens=6)], 1))
    model.save_pretrained(tmp_path / "quantised")
    again = QEDForCausalLM.from_pretrained(tmp_path / "quantised")
    assert converted(again) == converted(model)
    with torch.no_grad():
        assert relative_error(again(x).logits, found) < 0.03  # bitsandbytes rounds scales when it saves what has run


def test_torch_s_own_dynamic_quantisation() -> None:
    """Its matrices have a method where others have their weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it will move
        model = torch.ao.quantization.quantize_dynamic(make(), {torch.nn.Linear}, dtype=torch.qint8)
    x = tokens(1, 20)
    assert set(converted(model)) == set(matrices(make()))
    with torch.no_grad():
        assert relative_error(model(x).logits, make()(x).logits) < 0.05
    text = model.generate(x, attention_mask=torch.ones_like(x), **GREEDY)
    assert torch.equal(text, torch.cat([x, *stream(model, x, max_new_tokens=6)], 1))


# What cannot take them says so


@pytest.mark.parametrize("quantiser", QUANTISERS)
def test_routes_that_cannot_take_quantised_weights_say_so(quantiser: str, tmp_path: Path) -> None:
    model, kind = load(tmp_path, quantiser), QUANTISERS[quantiser][0]
    block = model.model.layers[0]
    for matrix in (block.mixer.o_proj, block.mlp.down_proj):
        why_not = str(plain_linear_obstacle(matrix))
        assert "quantised" in why_not
        assert kind in why_not
    call = Call(torch.device("cuda"), torch.bfloat16, batch=1, state=True)
    triton, compiled = (route.obstacle(call, block) for route in BLOCK.routes[:2])
    assert kind in str(triton)
    assert (compiled is None) == (kind == "Int8Tensor")  # which torch.compile knows
    text = str(explain(model))
    assert "12 of 13 matrices are converted: " + kind in text
    assert "quantised" in text.partition("decoding")[2]
    assert isinstance(fingerprint(model), str) == (kind != "Int8Tensor")


def test_a_block_of_torchao_s_weights_is_one_program(tmp_path: Path) -> None:
    """As a GPU would compile it to decode."""
    block = load(tmp_path, "torchao, 8 bits").model.layers[0]
    state = block.mixer(torch.randn(1, 5, 128))[1]
    x = torch.randn(1, 128)
    with torch.no_grad():
        truth = block_in_torch(block, x.clone(), *(y.detach().clone() for y in state))
        compiled = torch.compile(block_in_torch, fullgraph=True, backend="eager")
        assert torch.allclose(compiled(block, x.clone(), *(y.detach().clone() for y in state)), truth, atol=1e-6)


# A quantisation that converted nothing


@pytest.mark.parametrize("quantiser", QUANTISERS)
def test_a_quantisation_that_converts_nothing_is_refused(quantiser: str, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"quantization_config: expected .* to convert some .* 2 in_proj.*leave out \['model"
    ):
        load(tmp_path, quantiser, excluded=["model", "lm_head"])
    some = load(tmp_path, quantiser, excluded=["lm_head", ".*f_proj", ".*g_proj"])
    assert {name.rpartition(".")[2] for name in converted(some)} == {"in_proj", "o_proj", "gate_up_proj", "down_proj"}


@pytest.mark.parametrize("quantiser", [x for x in QUANTISERS if x.startswith("bitsandbytes")])
def test_the_embedding_is_no_quantised_matrix(quantiser: str, tmp_path: Path) -> None:
    """A list of what to leave out replaces bitsandbytes' own, which has lm_head."""
    with pytest.raises(ValueError, match=r"quantization_config: lm_head is the embedding .* got a Linear[48]bit"):
        load(tmp_path, quantiser, excluded=["f_proj"])
    assert "lm_head" in converted(load(tmp_path, quantiser, "untied", excluded=["f_proj"]))


def test_explain_counts_what_a_filter_left() -> None:
    model = make()
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig(), filter_fn=lambda _, name: name.endswith("in_porj"))
    assert converted(model) == {}
    assert "converted" not in explain(model).title
    assert listed(model).startswith("2 in_proj, 2 f_proj, 2 g_proj, 2 o_proj")
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig(), filter_fn=lambda _, name: name.endswith("in_proj"))
    assert "2 of 13 matrices are converted: Int8Tensor" in explain(model).title


# QLoRA


@pytest.mark.parametrize("quantiser", ["bitsandbytes, 8 bits", "bitsandbytes, 4 bits"])
def test_an_adapter_on_quantised_weights_is_trained(quantiser: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from .test_adapters import learns_alone

    checkpointing = {"use_reentrant": False}
    base = peft.prepare_model_for_kbit_training(load(tmp_path, quantiser), gradient_checkpointing_kwargs=checkpointing)
    model, x = peft.get_peft_model(base, peft.LoraConfig(r=8, lora_alpha=16, task_type="CAUSAL_LM")), tokens(4, 24)
    learns_alone(model, x, 2e-2)
    model.eval()
    text = model.generate(input_ids=x[:1, :6], attention_mask=torch.ones(1, 6), **GREEDY)
    assert text.shape == (1, 12)
