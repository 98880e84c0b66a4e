"""What transformers, its Trainer and TRL's collators call: right, or refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModel,
    DataCollatorWithFlattening,
    PreTrainedConfig,
    Trainer,
    TrainingArguments,
)

from qed import QEDCache, QEDConfig, QEDForCausalLM, QEDModel
from qed.model.stub import AUTO_MAP
from qed.recipes import build
from qed.train.config import TrainConfig

from .test_causal_lm import STACKS, close, make, padded, tokens


def documents() -> list[dict[str, list[int]]]:
    return [{"input_ids": tokens(20)[:n].add(i).tolist()} for i, n in enumerate((6, 1, 13, 4, 9, 2, 7, 5))]


# The Trainer


def trained(folder: Path, rows: int, steps: int, **options: Any) -> tuple[float, torch.Tensor]:
    """The loss that is logged for one step of so many pieces, and the weights after it."""
    model = make().float()
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=steps,
        max_steps=1,
        logging_steps=1,
        learning_rate=0.1,
        optim="sgd",
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )

    def collate(features: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        ids, mask = padded([torch.tensor(x["input_ids"]) for x in features], "right")
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask.bool(), -100)}

    trainer = Trainer(model=model, args=arguments, train_dataset=documents(), data_collator=collate)
    trainer.train()
    loss = next(x["loss"] for x in trainer.state.log_history if "loss" in x)
    return loss, torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_accumulated_gradients_are_those_of_the_whole_batch(smoothing: float, tmp_path: Path) -> None:
    loss, weights = trained(tmp_path, 8, 1, label_smoothing_factor=smoothing)
    in_parts, weights_in_parts = trained(tmp_path, 2, 4, label_smoothing_factor=smoothing)
    before = torch.cat([p.detach().flatten() for p in make().float().parameters()])
    assert abs(in_parts - loss) < 1e-5 * loss
    step = (weights - before).norm()
    assert (weights - weights_in_parts).norm() < 1e-4 * step
    if smoothing:  # the mean of a smoothed loss of the next token, not of the same one
        model, ids = make().float(), [torch.tensor(x["input_ids"])[None] for x in documents()]
        parts = [model(x).logits[0, :-1].detach().log_softmax(-1) for x in ids]
        picked = torch.cat([y.gather(1, x[0, 1:, None])[:, 0] for x, y in zip(ids, parts, strict=True)])
        even = torch.cat([y.mean(-1) for y in parts])
        assert abs(loss - float(-(1 - smoothing) * picked.mean() - smoothing * even.mean())) < 1e-4


@pytest.mark.parametrize("items", [7, torch.tensor(7)])
def test_num_items_in_batch_is_what_the_sum_is_divided_by(items: Any) -> None:
    model, x = make(), tokens(2, 6)
    assert close(model(x, labels=x, num_items_in_batch=items).loss, model(x, labels=x).loss * 10 / 7)
    assert model(x, num_items_in_batch=items).loss is None  # the Trainer may take the loss itself


# Packing


def trl_padding_free(examples: list[dict[str, list[int]]], pad_to_multiple_of: int | None = None) -> dict[str, Any]:
    """What TRL 1.16's DataCollatorForLanguageModeling(padding_free=True) returns."""
    input_ids = torch.cat([torch.tensor(x["input_ids"]) for x in examples])
    position_ids = torch.cat([torch.arange(len(x["input_ids"])) for x in examples])
    more = -input_ids.shape[0] % (pad_to_multiple_of or 1)
    output: dict[str, Any] = {"input_ids": torch.nn.functional.pad(input_ids, (0, more))[None]}
    output["labels"] = torch.nn.functional.pad(input_ids, (0, more), value=-100)[None]
    output["position_ids"] = torch.nn.functional.pad(position_ids, (0, more))[None]
    output["labels"][output["position_ids"] == 0] = -100
    starts = (output["position_ids"][0] == 0).nonzero().flatten()
    offsets = torch.cat([starts, torch.tensor([output["position_ids"].size(1)])]).to(torch.int32)
    output["cu_seq_lens_q"] = output["cu_seq_lens_k"] = offsets
    output["max_length_q"] = output["max_length_k"] = int(offsets.diff().max())
    index = torch.arange(offsets.numel() - 1, dtype=torch.int32)
    output["seq_idx"] = torch.repeat_interleave(index, offsets.diff())[None]
    return output


def flattening(**options: Any) -> Any:
    collator = DataCollatorWithFlattening(return_tensors="pt", **options)
    return lambda examples: dict(collator(examples))


COLLATORS = {
    "positions": flattening(),
    "positions from 2": flattening(position_ids_start=2),
    "offsets alone": flattening(return_position_ids=False, return_flash_attn_kwargs=True),
    "indices alone": flattening(return_position_ids=False, return_seq_idx=True),
    "all": flattening(return_flash_attn_kwargs=True, return_seq_idx=True),
    "TRL": trl_padding_free,
    "TRL, a multiple": lambda examples: trl_padding_free(examples, 16),
}


@pytest.mark.parametrize("collator", COLLATORS)
@pytest.mark.parametrize("stack", STACKS)
def test_what_collators_pack_is_separate(stack: str, collator: str) -> None:
    model, examples = make(stack), documents()
    found = model(**COLLATORS[collator](examples))
    parts = [torch.tensor(x["input_ids"])[None] for x in examples]
    alone = [model(x, labels=x) for x in parts]
    total = sum(x.shape[1] for x in parts)
    assert close(found.logits[:, :total], torch.cat([x.logits for x in alone], 1))
    counted = [(x.loss, part.shape[1] - 1) for x, part in zip(alone, parts, strict=True) if part.shape[1] > 1]
    assert close(found.loss, sum(loss * n for loss, n in counted) / sum(n for _, n in counted))
    assert found.past_key_values is None
    batch = {name: x for name, x in COLLATORS[collator](examples).items() if name != "labels"}
    assert close(model.lm_head(model.model(**batch).last_hidden_state), found.logits)


def test_positions_of_one_sequence_change_nothing() -> None:
    model, x = make(), tokens(2, 9)
    truth = model(x).logits
    for places in (torch.arange(9), torch.arange(9)[None], torch.arange(9).expand(2, -1), torch.arange(9) + 5):
        assert torch.equal(model(x, position_ids=places).logits, truth)
    assert torch.equal(model(x, seq_idx=torch.tensor([[0] * 9, [1] * 9])).logits, truth)


def test_positions_that_begin_again_mean_nothing_beside_a_mask_or_a_cache() -> None:
    """`generate` passes the positions of a batch padded on the left."""
    model, x = make(), tokens(2, 9)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 9])
    places = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    truth = model(x, attention_mask=mask).logits
    assert torch.equal(model(x, attention_mask=mask, position_ids=places).logits, truth)
    cache, places = QEDCache(), torch.tensor([[0, 1, 2, 0, 1]])
    first = model(x[:1, :5], past_key_values=cache, position_ids=places).logits
    rest = model(x[:1, 5:], past_key_values=cache, position_ids=torch.zeros(1, 4)).logits
    assert close(torch.cat([first, rest], 1), model(x[:1]).logits)


PLACES = torch.tensor([[0, 1, 0, 1, 2, 3]])
OFFSETS = torch.tensor([0, 2, 6], dtype=torch.int32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"cu_seqlens": OFFSETS, "cu_seq_lens_q": OFFSETS + torch.tensor([0, 1, 0])},
            "cu_seq_lens_q: expected the same",
        ),
        ({"cu_seq_lens_q": OFFSETS, "cu_seq_lens_k": torch.tensor([0, 6])}, "cu_seq_lens_k: expected the same"),
        ({"cu_seq_lens_q": OFFSETS, "position_ids": torch.arange(6)}, "position_ids: expected the same sequences"),
        ({"seq_idx": torch.tensor([[0, 0, 0, 1, 1, 1]]), "position_ids": PLACES}, "position_ids: expected the same"),
        ({"position_ids": torch.tensor([0, 1, 5, 6, 7, 8])}, "go on by one or begin again where the first one began"),
        ({"position_ids": torch.arange(5)}, r"position_ids: expected shape \[1, 6\], got \[5\]"),
        ({"position_ids": torch.zeros(3, 1, 6)}, r"position_ids: expected shape \[1, 6\], got \[3, 1, 6\]"),
        (
            {"seq_idx": torch.zeros(1, 6), "attention_mask": torch.ones(1, 6)},
            "seq_idx: packed sequences go with neither",
        ),
        ({"cu_seq_lens_q": OFFSETS, "past_key_values": QEDCache()}, "cu_seq_lens_q: packed sequences go with neither"),
        (
            {"cu_seq_lens_q": OFFSETS, "max_length_q": 3},
            "max_length_q: expected at least the longest sequence, 4, got 3",
        ),
    ],
)
def test_what_says_two_things_of_the_same_tokens(options: dict[str, Any], message: str) -> None:
    model = make()
    for part in (model, model.model):
        with pytest.raises(ValueError, match=message):
            part(tokens(1, 6), **options)


def test_several_rows_are_not_packed() -> None:
    with pytest.raises(ValueError, match="position_ids: packed sequences need batch size 1, got 2"):
        make()(tokens(2, 6), position_ids=PLACES)


# What a call may ask for


@pytest.mark.parametrize("where", ["left", "right"])
@pytest.mark.parametrize("stack", STACKS)
def test_hidden_states(stack: str, where: str) -> None:
    """The embeddings, what blocks give, and the last after the norm: each is what the rest goes on from."""
    model = make(stack)
    ids, mask = padded([tokens(7), tokens(4)], where)
    found = model(ids, attention_mask=mask, output_hidden_states=True)
    states, there = found.hidden_states, mask.bool()
    assert len(states) == model.config.num_hidden_layers + 1
    assert torch.equal(states[0][there], model.model.embed_tokens(ids)[there])
    assert close(model.lm_head(states[-1]), found.logits)
    whole = list(model.model.layers)
    for i in range(1, len(whole)):
        model.model.layers = torch.nn.ModuleList(whole[:i])
        assert close(model.model(ids, attention_mask=mask).last_hidden_state[there], model.model.norm(states[i])[there])
    model.model.layers = torch.nn.ModuleList(whole)
    assert model(ids, attention_mask=mask).hidden_states is None
    model.config.output_hidden_states = True
    assert len(model(ids, attention_mask=mask).hidden_states) == len(states)
    assert model(ids, attention_mask=mask, output_hidden_states=False).hidden_states is None


def test_tuples() -> None:
    model, x = make(), tokens(2, 6)
    loss, logits, cache = model(x, labels=x, return_dict=False)
    truth = model(x, labels=x)
    assert torch.equal(loss, truth.loss)
    assert torch.equal(logits, truth.logits)
    assert isinstance(cache, QEDCache)
    assert torch.equal(model.model(x, return_dict=False)[0], model.model(x).last_hidden_state)
    model.config.return_dict = False
    assert torch.equal(model(x)[0], truth.logits)
    assert torch.equal(model(x, return_dict=True).logits, truth.logits)
    model.generate(x, attention_mask=torch.ones_like(x), max_new_tokens=2, pad_token_id=0)


def test_what_a_call_cannot_have() -> None:
    model, x = make(), tokens(1, 6)
    for part in (model, model.model):
        with pytest.raises(TypeError, match=r"unexpected argument 'attention_maks'; .* 'attention_mask'"):
            part(x, attention_maks=torch.ones_like(x))
        with pytest.raises(ValueError, match="output_attentions: a recurrent layer has no attention weights"):
            part(x, output_attentions=True)
        with pytest.raises(ValueError, match="output_hidden_states: expected True for all layers, or False"):
            part(x, output_hidden_states=[1])
        part(x, output_attentions=None, output_hidden_states=None, return_dict=None, position_ids=None)


def test_generation_returns_what_it_is_asked_for() -> None:
    model, x = make(), tokens(2, 5)
    options = {"attention_mask": torch.ones_like(x), "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    options |= {"eos_token_id": None, "return_dict_in_generate": True, "output_logits": True}
    found = model.generate(x, output_hidden_states=True, **options)
    assert [len(states) for states in found.hidden_states] == [3] * 4
    for states, logits in zip(found.hidden_states, found.logits, strict=True):
        assert torch.allclose(model.lm_head(states[-1][:, -1]).float(), logits, atol=1e-5)


@pytest.mark.parametrize("read", [0, 2])
@pytest.mark.parametrize("where", ["left", "right", "between"])
@pytest.mark.parametrize("chunk", [None, 1, 3])
def test_a_prompt_in_pieces_keeps_its_padding(chunk: int | None, where: str, read: int) -> None:
    """Pieces of one token too, which `generate` also calls with a mask, and which is not of its own making then; also
    where a cache has read some columns."""
    model = make()
    ids, mask = padded([tokens(7), tokens(3)], where)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    cache = QEDCache()
    if read:
        with torch.no_grad():
            model(ids[:, :read], attention_mask=mask[:, :read], past_key_values=cache, use_cache=True)
    given = {"attention_mask": mask, "past_key_values": cache, "prefill_chunk_size": chunk}
    if read and chunk and transformers.__version__.startswith("5.17."):  # which would read the whole prompt again
        with pytest.raises(ValueError, match="attention_mask: expected shape"):
            model.generate(ids, **given, **options)
        return
    found = model.generate(ids, **given, **options)
    for row, prompt in zip(found[:, ids.shape[1] :], (tokens(7), tokens(3)), strict=True):
        alone = model.generate(prompt[None], attention_mask=torch.ones(1, len(prompt)), **options)
        assert torch.equal(row, alone[0, len(prompt) :])


def test_several_tokens_may_end_a_text() -> None:
    config = QEDConfig.tiny(eos_token_id=[5, 7], initializer_range=0.2)
    torch.manual_seed(0)
    model, x = QEDForCausalLM(config).eval(), tokens(1, 4)
    assert model.end_tokens() == {5, 7}
    free = model.generate(x, max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None)[0, 4:].tolist()
    model.generation_config.eos_token_id = [free[2], 255]
    model.config.eos_token_id = None
    ended = model.generate(x, max_new_tokens=6, do_sample=False, pad_token_id=0)[0, 4:].tolist()
    assert ended == free[: free.index(free[2]) + 1]
    assert model.end_tokens() == {free[2], 255}


# Configurations


def test_a_field_that_is_none_is_refused() -> None:
    message = "lamda_max: not a field of a model's configuration; the nearest is lambda_max"
    with pytest.raises(ValueError, match=message):
        QEDConfig(lamda_max=0.1)
    with pytest.raises(ValueError, match=message):
        build("mini", {"data": "nowhere", "model.lamda_max": "0.1"})
    with pytest.raises(ValueError, match="temperature: not a field of a model's configuration"):
        TrainConfig(name="x", data="nowhere", model={"temperature": 2.0})


def test_transformers_own_fields_stay(tmp_path: Path) -> None:
    fields = {"auto_map": {"AutoConfig": "other.Config"}, "quantization_config": {"quant_method": "none"}}
    fields |= {"torch_dtype": "bfloat16", "architectures": ["QEDForCausalLM"], "_name_or_path": "somewhere"}
    fields |= {
        "transformers_version": "5.17.0",
        "temperature": 0.7,
        "max_length": 20,
        "num_labels": 3,
        "is_decoder": True,
    }
    fields |= {"attn_implementation": "sdpa", "_attn_implementation_autoset": True}
    config = QEDConfig.tiny(**fields)
    assert config.dtype == torch.bfloat16
    assert config.auto_map == AUTO_MAP  # the classes that read the file are found through our stub, not through another
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path, trust_remote_code=False)
    assert again.to_dict() | {"_name_or_path": ""} == config.to_dict() | {"_name_or_path": ""}
    assert QEDConfig.from_dict(config.to_dict()).hidden_size == config.hidden_size


def test_the_first_versions_files_still_load(tmp_path: Path) -> None:
    """A config.json as the first version of this format wrote it."""
    old = {
        "architectures": ["QEDForCausalLM"],
        "bos_token_id": 1,
        "conv_size": 4,
        "decay_rank": None,
        "dtype": "float32",
    }
    old |= {"eos_token_id": 2, "expand_v": 1.0, "format_version": 1, "head_dim": 32, "hidden_size": 64}
    old |= {"initializer_range": 0.02, "intermediate_size": 128, "lambda_max": 0.25, "layer_types": ["qed", "qed"]}
    old |= {"model_type": "qed", "norm_eps": 1e-05, "num_heads": 2, "num_hidden_layers": 2, "output_gate": "silu"}
    old |= {"output_gate_rank": None, "pad_token_id": None, "read_scale": 1.0, "rope_theta": 10000.0, "rule": "qed"}
    old |= {"sliding_window": 512, "theta_init": -2.0, "tie_word_embeddings": True, "transformers_version": "5.17.0"}
    old |= {"use_cache": True, "vocab_size": 256}
    (tmp_path / "config.json").write_text(json.dumps(old))
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.initializer == "normal"  # which had no name then
    assert config.to_dict() | {"_name_or_path": "", "transformers_version": ""} == QEDConfig.tiny(
        dtype="float32", architectures=["QEDForCausalLM"]
    ).to_dict() | {"_name_or_path": "", "transformers_version": ""}
    assert type(AutoModel.from_config(config)) is QEDModel


MIXED = ["qed", "full_attention", "sliding_attention", "eda"]


def test_transformers_own_class_reads_the_file(tmp_path: Path) -> None:
    """Its Trainer does so when it resumes from a checkpoint. It refuses types of layers that it does not know."""
    QEDConfig.tiny(num_hidden_layers=4, layer_types=MIXED).save_pretrained(tmp_path)
    found = PreTrainedConfig.from_pretrained(tmp_path)
    assert found.layer_types == ["linear_attention", "full_attention", "sliding_attention", "linear_attention"]
    assert AutoConfig.from_pretrained(tmp_path).layer_rules == ["qed", None, None, "eda"]


def test_a_rule_as_a_layers_type_is_that_rule(tmp_path: Path) -> None:
    """As earlier versions wrote it, alone and beside other layers."""
    config = QEDConfig.tiny(num_hidden_layers=4, layer_types=MIXED)
    model = QEDForCausalLM(config)
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text())
    del fields["layer_rules"]
    file.write_text(json.dumps(fields | {"layer_types": MIXED}))
    again = QEDForCausalLM.from_pretrained(tmp_path)
    assert again.config.layer_types == config.layer_types
    assert again.config.layer_rules == config.layer_rules
    ids = tokens(1, 9)
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert QEDConfig.tiny(rule="gdn2").layer_rules == ["gdn2", "gdn2"]
    types = ["linear_attention", "full_attention"]
    assert QEDConfig.tiny(rule="gdn2", layer_types=types).layer_rules == ["gdn2", None]
