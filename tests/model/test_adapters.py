"""PEFT's adapters: where they go by default, that they are what they say, and what they are refused for.

One import of PEFT for all of them, so they are slow together.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from qed import QEDConfig, QEDForCausalLM, explain
from qed.auto import ADAPTED
from qed.model import routes
from qed.model.fingerprint import fingerprint
from qed.model.matrices import matrices

from .test_causal_lm import HYBRID, close, make, tokens

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.slow
STACKS: dict[str, dict[str, Any]] = {"qed": {}, "gdn": {"rule": "gdn"}, "hybrid": HYBRID}
KINDS: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "DoRA": {"use_dora": True},
    "LoRA everywhere": {"target_modules": "all-linear"},
    "DoRA everywhere": {"target_modules": "all-linear", "use_dora": True},
}
GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def filled(model: Any, seed: int = 3) -> Any:
    """The model with an adapter that does something: PEFT lets its second factor start as zeros."""
    draw = torch.Generator().manual_seed(seed)
    for name, x in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(x, std=0.3, generator=draw)
    return model


def adapted(stack: str = "qed", kind: str = "LoRA", **options: Any) -> Any:
    config = peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **(KINDS[kind] | options))
    return filled(peft.get_peft_model(make(**STACKS[stack]), config)).eval()


def logits(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(x).logits


def test_peft_knows_the_model_if_it_is_imported_first_too() -> None:
    code = "import peft, qed; print(peft.utils.constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING['qed'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == str(ADAPTED), done.stderr


@pytest.mark.parametrize("stack", STACKS)
def test_where_adapters_go_by_default(stack: str) -> None:
    """To the matrices of the token mixers that read from the residual stream or lead back into it, and to no other."""
    model = peft.get_peft_model(make(**STACKS[stack]), peft.LoraConfig())
    found = {name for name, x in model.get_base_model().named_modules() if isinstance(x, peft.tuners.lora.LoraLayer)}
    plain = make(**STACKS[stack])
    assert found == {name for name in matrices(plain) if ".mixer." in name and name.split(".")[-1] in ADAPTED}
    assert len(found) == sum(4 if x.mixer.__class__.__name__ == "Attention" else 2 for x in plain.model.layers)


@pytest.mark.parametrize("stack", STACKS)
def test_everywhere_is_every_matrix_but_the_last(stack: str) -> None:
    model = adapted(stack, "LoRA everywhere").get_base_model()
    found = {name for name, x in model.named_modules() if isinstance(x, peft.tuners.lora.LoraLayer)}
    assert found == set(matrices(make(**STACKS[stack]))) - {"lm_head"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stack", STACKS)
def test_switched_off_saved_and_merged(stack: str, kind: str, tmp_path: Path) -> None:
    """Off, the model is what it was; loaded again, the adapter is the same; merged is unmerged."""
    x, plain = tokens(2, 20), make(**STACKS[stack])
    model = adapted(stack, kind)
    on = logits(model, x)
    assert not torch.allclose(on, logits(plain, x), atol=0.1)
    with model.disable_adapter():
        assert torch.equal(logits(model, x), logits(plain, x))
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(make(**STACKS[stack]), tmp_path, autocast_adapter_dtype=False)
    assert torch.allclose(logits(again, x), on, atol=1e-4)  # adapters are saved and loaded in float32
    merged = model.merge_and_unload()
    assert type(merged) is QEDForCausalLM
    assert set(merged.state_dict()) == set(plain.state_dict())
    assert close(logits(merged, x), on)


def learns_alone(model: Any, x: torch.Tensor, rate: float) -> None:
    """Assert that training lowers the loss on x, and changes the adapter's weights and no others."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
    model.train()
    losses = []
    for _ in range(15):
        loss = model(x, labels=x).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.8 * losses[0]
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) == ("lora_" not in name), name


def test_only_the_adapter_is_trained() -> None:
    learns_alone(adapted(), tokens(4, 24), 1e-2)


@pytest.mark.parametrize("kind", ["LoRA", "DoRA"])
def test_switched_between_generations(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two adapters, one, the other, none, merged: every generation has the tokens that are recomputed without a cache,
    also through the decoder that a GPU would capture, which is kept as long as nothing changes."""
    model, x = adapted(kind=kind), tokens(2, 6)
    base = model.get_base_model()
    model.add_adapter("other", peft.LoraConfig(r=3, lora_alpha=6, **KINDS[kind]))
    for name, p in model.named_parameters():
        if "lora_B.other" in name:
            torch.nn.init.normal_(p, std=0.5, generator=torch.Generator().manual_seed(7))
    monkeypatch.setattr(routes, "_pays", lambda device: True)  # as on a GPU
    texts, mask = [], torch.ones_like(x)

    def check() -> None:
        found = model.generate(input_ids=x, attention_mask=mask, **GREEDY)
        recomputed = model.generate(input_ids=x, attention_mask=mask, use_cache=False, **GREEDY)
        assert torch.equal(found, recomputed)
        decoder, now = base.decoders.of(base, 2), fingerprint(base)
        model.generate(input_ids=x, attention_mask=mask, **GREEDY)
        assert fingerprint(base) == now
        assert base.decoders.of(base, 2) is decoder
        texts.append(found)

    for name in ("default", "other", "default"):
        model.set_adapter(name)
        check()
    with model.disable_adapter():
        check()
    model.merge_adapter()
    check()
    first, other, again, off, merged = texts
    assert torch.equal(first, again)
    assert torch.equal(first, merged)
    assert torch.equal(off, make().generate(x, attention_mask=mask, **GREEDY))
    assert not torch.equal(first, other)
    assert not torch.equal(first, off)


def test_kernels_for_a_block_step_aside_and_say_so() -> None:
    text = str(explain(adapted()))
    assert (
        "not triton: it takes an nn.Linear, and this matrix was quantised, adapted or replaced: it is a Linear" in text
    )
    assert "matrices are converted" not in text  # which would say that they are quantised


# Adapters of other models


def saved(folder: Path, **options: Any) -> Path:
    """An adapter of a model with three layers."""
    torch.manual_seed(0)
    model = QEDForCausalLM(QEDConfig.tiny(**({"num_hidden_layers": 3} | options)))
    filled(peft.get_peft_model(model, peft.LoraConfig(r=4, task_type="CAUSAL_LM"))).save_pretrained(folder)
    return folder


def test_modules_that_there_are_not() -> None:
    with pytest.raises(ValueError, match=r"Target modules .*query_key_value.* not found in the base model"):
        peft.get_peft_model(make(), peft.LoraConfig(target_modules=["query_key_value"]))
    with pytest.raises(ValueError, match=r"Target modules .*query_key_value.* not found in the base model"):
        make().add_adapter(peft.LoraConfig(target_modules=["query_key_value"]))


OTHERS = {
    "more layers": {},
    "attention": {"num_hidden_layers": 2, "layer_types": ["qed", "full_attention"]},
}


@pytest.mark.parametrize("other", OTHERS)
def test_an_adapter_of_other_modules_is_refused(other: str, tmp_path: Path) -> None:
    """PEFT alone would leave out what it has no place for. Both ways to load: PEFT's and transformers'."""
    folder = saved(tmp_path / "adapter", **OTHERS[other])
    make().save_pretrained(tmp_path / "base")
    with pytest.raises(
        ValueError, match=r"adapter: expected weights for modules of this model, .* the model has 2 in_"
    ):
        peft.PeftModel.from_pretrained(QEDForCausalLM.from_pretrained(tmp_path / "base"), folder)
    with pytest.raises(ValueError, match=r"(?s)not an adapter of this model, which has 2 in_proj.*not in the model"):
        QEDForCausalLM.from_pretrained(tmp_path / "base").load_adapter(folder)


def test_an_adapter_of_another_width_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "adapter", num_hidden_layers=2, hidden_size=32)
    make().save_pretrained(tmp_path / "base")
    with pytest.raises(RuntimeError, match=r"size mismatch for .*in_proj.lora_A"):
        peft.PeftModel.from_pretrained(QEDForCausalLM.from_pretrained(tmp_path / "base"), folder)
    with pytest.raises(
        ValueError, match=r"(?s)not an adapter of this model.*in_proj.lora_A.*: \[4, 32\] in the checkpoint"
    ):
        QEDForCausalLM.from_pretrained(tmp_path / "base").load_adapter(folder)


def test_an_adapter_of_this_model_is_loaded_by_transformers_too(tmp_path: Path) -> None:
    folder, x = saved(tmp_path / "adapter", num_hidden_layers=2), tokens(1, 9)
    make().float().save_pretrained(tmp_path / "base")
    base = QEDForCausalLM.from_pretrained(tmp_path / "base")
    before = logits(base, x)
    base.load_adapter(folder)
    truth = peft.PeftModel.from_pretrained(QEDForCausalLM.from_pretrained(tmp_path / "base"), folder)
    assert torch.equal(logits(base, x), logits(truth, x))
    assert not torch.allclose(before, logits(base, x), atol=1e-3)
    base.disable_adapters()
    assert torch.equal(logits(base, x), before)
