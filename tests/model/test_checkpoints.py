"""Configurations and checkpoints: what is saved comes back, and what is not this model's is refused by name."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from qed import RULES, QEDConfig, QEDForCausalLM, QEDModel

THETA = "model.layers.0.mixer.theta"


def saved(folder: Path, **changes: object) -> QEDForCausalLM:
    torch.manual_seed(0)
    model = QEDForCausalLM(QEDConfig.tiny(**changes)).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("rule", [*RULES, "full_attention"])
def test_round_trip(rule: str, tmp_path: Path) -> None:
    model = saved(tmp_path, layer_types=["qed", rule], read_scale=0.5)
    assert {x.suffix for x in tmp_path.iterdir()} == {".json", ".md", ".py", ".safetensors"}
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is QEDForCausalLM
    assert again.config.to_diff_dict() | {"_name_or_path": ""} == model.config.to_diff_dict() | {"_name_or_path": ""}
    assert again.lm_head.weight is again.get_input_embeddings().weight
    for (name, x), y in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(x, y), name


def test_auto_classes_need_only_import_qed(tmp_path: Path) -> None:
    saved(tmp_path)
    code = (
        "import sys, qed; assert 'transformers' not in sys.modules; "
        "from transformers import AutoModelForCausalLM as A; "
        f"print(type(A.from_pretrained({str(tmp_path)!r})).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "QEDForCausalLM", done.stderr


def test_gates_stay_in_float32(tmp_path: Path) -> None:
    saved(tmp_path, rule="qed-rand")
    model = QEDForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    kept = {name.split(".")[-1] for name, x in model.state_dict().items() if x.dtype == torch.float32}
    assert kept == {"A_log", "dt_bias", "theta", "random_direction"}
    assert model(torch.zeros(1, 5, dtype=torch.long)).logits.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.pop(THETA), f"{THETA}: not in the checkpoint"),
        (lambda x: x.update({THETA: torch.zeros(7)}), f"{THETA}: [7] in the checkpoint, [2] in the model"),
        (lambda x: x.update(extra=torch.zeros(1)), "extra: not in the model"),
    ],
)
def test_another_models_tensors_are_refused(change: object, message: str, tmp_path: Path) -> None:
    saved(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="not this model's checkpoint") as error:
        QEDForCausalLM.from_pretrained(tmp_path)
    assert message in str(error.value)


def test_pickles_and_damaged_files_are_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match="expected safetensors, got a damaged file"):
        QEDForCausalLM.from_pretrained(tmp_path)
    file.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"expected model.safetensors, got pytorch_model.bin: pickles can run code"):
        QEDForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="use_safetensors: pickles are not read"):
        QEDForCausalLM.from_pretrained(tmp_path, use_safetensors=False)


def sharded(folder: Path) -> tuple[QEDForCausalLM, dict[str, str]]:
    """A checkpoint of several files, and its map of names."""
    torch.manual_seed(0)
    model = QEDForCausalLM(QEDConfig.tiny()).eval()
    model.save_pretrained(folder, max_shard_size="100KB")
    return model, json.loads((folder / INDEX).read_text())["weight_map"]


INDEX = "model.safetensors.index.json"


def test_several_files_are_read(tmp_path: Path) -> None:
    model, _ = sharded(tmp_path / "a")
    again = QEDForCausalLM.from_pretrained(tmp_path / "a")
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
    model.save_pretrained(tmp_path / "b" / "inner", variant="small")
    again = QEDForCausalLM.from_pretrained(tmp_path / "b", subfolder="inner", variant="small")
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
    # As the hub's cache has them: links into a store.
    snapshot, store = tmp_path / "hub" / "snapshots" / "1", tmp_path / "hub" / "blobs"
    snapshot.mkdir(parents=True), store.mkdir()
    for i, file in enumerate(sorted((tmp_path / "a").iterdir())):
        (store / str(i)).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(store / str(i))
    assert torch.equal(QEDForCausalLM.from_pretrained(snapshot).lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pytorch_model.bin", "expected safetensors files, got 'pytorch_model.bin': other files can run code"),
        ("../outside.safetensors", "expected names of files beside it, got the path '../outside.safetensors'"),
        ("{folder}/outside.safetensors", "expected names of files beside it, got the path '/"),
        ("/dev/zero", "expected safetensors files, got '/dev/zero'"),
        ("link.safetensors", "expected regular files of its own folder, got 'link.safetensors', which is none"),
        ("device.safetensors", "expected regular files of its own folder, got 'device.safetensors', which is none"),
        ("fifo.safetensors", "expected regular files of its own folder, got 'fifo.safetensors', which is none"),
        ("nowhere.safetensors", "expected regular files of its own folder, got 'nowhere.safetensors', which is none"),
    ],
)
@pytest.mark.parametrize("kind", [QEDForCausalLM, QEDModel, AutoModelForCausalLM])
def test_an_index_names_safetensors_of_its_folder(
    name: str, message: str, kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is opened of what it names; the pickle here would leave a file."""
    folder = tmp_path / "checkpoint"
    _, names = sharded(folder)
    save_file({"x": torch.zeros(1)}, tmp_path / "outside.safetensors")
    (folder / "link.safetensors").symlink_to(tmp_path / "outside.safetensors")
    (folder / "device.safetensors").symlink_to("/dev/null")
    os.mkfifo(folder / "fifo.safetensors")
    torch.save(Leaves(tmp_path / "ran"), folder / "pytorch_model.bin")
    names[THETA] = name.format(folder=tmp_path)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    opened: list[str] = []
    monkeypatch.setattr(transformers.modeling_utils, "safe_open", lambda file, **_: opened.append(file))
    monkeypatch.setattr(torch, "load", lambda file, **_: opened.append(file))
    with pytest.raises(ValueError, match=re.escape(message)):
        kind.from_pretrained(folder)
    assert not opened
    assert not (tmp_path / "ran").exists()


class Leaves:
    """A pickle that makes a file when it is read."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_safetensors": False}, "use_safetensors: pickles are not read"),
        ({"weights_only": False}, "weights_only: pickles are not read"),
        ({"gguf_file": "model.gguf"}, "gguf_file: only safetensors are read"),
        ({"variant": "odd"}, r"expected a regular file, got something else"),
        (
            {"subfolder": "pickles"},
            r"expected model.safetensors, got pytorch_model.bin.index.json: pickles can run code",
        ),
        ({"subfolder": "named"}, r"got transformers_weights='adapter_model.bin' in config.json"),
        ({"subfolder": "adapted"}, r"expected adapter_model.safetensors, got a pickle"),
        ({"subfolder": "adapter"}, r"expected a model, got an adapter alone"),
    ],
)
def test_no_option_leads_to_another_file(options: dict[str, object], message: str, tmp_path: Path) -> None:
    saved(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "model.odd.safetensors").symlink_to("/dev/null")
    for name in ("pickles", "named", "adapted", "adapter"):
        (tmp_path / name).mkdir()
    (tmp_path / "pickles" / "pytorch_model.bin.index.json").write_text("{}")
    (tmp_path / "named" / "config.json").write_text(json.dumps(config | {"transformers_weights": "adapter_model.bin"}))
    (tmp_path / "adapted" / "config.json").write_text(json.dumps(config))
    for name in ("adapted", "adapter"):
        (tmp_path / name / "adapter_config.json").write_text('{"base_model_name_or_path": "/elsewhere"}')
        (tmp_path / name / "adapter_model.bin").touch()
    with pytest.raises(ValueError, match=message):
        QEDForCausalLM.from_pretrained(tmp_path, **options)
    assert QEDForCausalLM.from_pretrained(tmp_path, use_safetensors=None).config.hidden_size == 64


def test_an_index_that_is_none(tmp_path: Path) -> None:
    sharded(tmp_path)
    for text in ("{}", "[]", "nothing", '{"weight_map": 3}'):
        (tmp_path / INDEX).write_text(text)
        with pytest.raises(ValueError, match="expected a safetensors index with a weight_map"):
            QEDForCausalLM.from_pretrained(tmp_path)


def test_weights_that_are_passed_need_no_file() -> None:
    model = QEDForCausalLM(QEDConfig.tiny())
    again = QEDForCausalLM.from_pretrained(None, config=model.config, state_dict=model.state_dict())
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)


def test_another_format_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"format_version": 9}))
    with pytest.raises(ValueError, match="format_version: this version of qed reads checkpoints of format 1, got 9"):
        AutoConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rule": "qet"}, "rule: expected one of linear, .*, got 'qet'"),
        ({"layer_types": ["qed"]}, "layer_types: expected 2 entries, one a layer, got 1"),
        ({"layer_types": ["qed", "gqa"]}, r"layer_types\[1\]: expected one of linear, .*, got 'gqa'"),
        ({"layer_rules": ["qed"]}, "layer_rules: expected 2 entries, one a layer, got 1"),
        ({"layer_rules": ["qed", "gqa"]}, r"layer_rules\[1\]: expected one of linear, .*, got 'gqa'"),
        (
            {"layer_types": ["eda", "qed"], "layer_rules": ["qed", "qed"]},
            r"layer_rules\[0\]: expected 'eda', which layer_types\[0\] says, got 'qed'",
        ),
        (
            {"layer_types": ["linear_attention", "full_attention"], "layer_rules": ["qed", "qed"]},
            r"layer_rules\[1\]: expected None, as layer_types\[1\] is 'full_attention', got 'qed'",
        ),
        ({"expand_v": 0.3}, "expand_v: expected expand_v × head_dim to be a positive whole number, got 0.3 × 32"),
        ({"num_heads": 0}, "num_heads: expected a positive whole number, got 0"),
        ({"hidden_size": 6.5}, "hidden_size: expected a positive whole number, got 6.5"),
        ({"output_gate": "relu"}, "output_gate: expected silu, sigmoid or None, got 'relu'"),
        ({"initializer": "kaiming"}, "initializer: expected one of normal, xavier, got 'kaiming'"),
    ],
)
def test_what_cannot_be_a_model_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QEDConfig.tiny(**changes)


def test_the_default_is_the_papers_model() -> None:
    with torch.device("meta"):
        model = QEDForCausalLM(QEDConfig())
        larger = QEDForCausalLM(QEDConfig(intermediate_size=QEDConfig().intermediate_size + 64))
        smaller = QEDForCausalLM(QEDConfig(intermediate_size=QEDConfig().intermediate_size - 64))
    count, more, less = (sum(p.numel() for p in m.parameters()) for m in (model, larger, smaller))
    assert abs(count - 340e6) < 3.4e6
    assert abs(count - 340e6) < min(abs(more - 340e6), abs(less - 340e6))
    config = model.config
    assert (config.num_hidden_layers, config.hidden_size, config.num_heads, config.head_dim) == (24, 1024, 6, 128)
    assert (config.vocab_size, config.rule, config.lambda_max, config.theta_init) == (32000, "qed", 0.25, -2.0)
    assert config.tie_word_embeddings
    assert 0.029 < 0.25 * torch.sigmoid(torch.tensor(config.theta_init)) < 0.031
