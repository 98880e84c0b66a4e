"""A saved folder loads in a process that never heard of this package, and none of ours ever runs a folder's code."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.dynamic_module_utils import get_imports

from qed import QEDConfig, QEDForCausalLM, QEDModel
from qed.model.loading import load
from qed.model.stub import AUTO_MAP, STUB, TEXT


@pytest.fixture
def model(tmp_path: Path) -> QEDForCausalLM:
    """A small model, saved in `tmp_path`/saved."""
    torch.manual_seed(0)
    model = QEDForCausalLM(QEDConfig.tiny()).eval()
    model.save_pretrained(tmp_path / "saved")
    return model


IDS = torch.arange(3, 13)[None]

FRESH = """
import sys
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
import torch

assert "qed" not in sys.modules
saved, again, out = sys.argv[1:]
kind = type(AutoConfig.from_pretrained(saved, trust_remote_code=True)).__module__
assert kind == "qed.model.config", kind
model = AutoModelForCausalLM.from_pretrained(saved, trust_remote_code=True)
model.register_for_auto_class("AutoModelForCausalLM")
model.save_pretrained(again)
assert type(AutoModel.from_pretrained(again, trust_remote_code=True)).__name__ == "QEDModel"
torch.save(model(torch.arange(3, 13)[None]).logits, out)
"""


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Of a process that has no network and keeps transformers' copies of stubs in a folder of its own."""
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder)} | more


@pytest.mark.slow
def test_auto_classes_need_no_import(model: QEDForCausalLM, tmp_path: Path) -> None:
    """And what they load is saved with stub and map, as often as one likes."""
    saved, again, out = (tmp_path / name for name in ("saved", "again", "logits.pt"))
    command = [sys.executable, "-c", FRESH, str(saved), str(again), str(out)]
    done = subprocess.run(command, env=environment(tmp_path / "hub"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(out), model(IDS).logits)
    assert {x.name: x.read_bytes() for x in again.iterdir()} == {x.name: x.read_bytes() for x in saved.iterdir()}


@pytest.mark.slow
def test_without_the_package_the_stub_says_what_to_install(model: QEDForCausalLM, tmp_path: Path) -> None:
    """In an environment whose `qed` is somebody else's."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "qed.py").touch()
    code = (
        "import sys; from transformers import AutoModelForCausalLM as A; A.from_pretrained(sys.argv[1], "
        "trust_remote_code=True)"
    )
    path = os.pathsep.join([str(tmp_path / "other"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", code, str(tmp_path / "saved")]
    done = subprocess.run(command, env=environment(tmp_path / "hub", PYTHONPATH=path), capture_output=True, text=True)
    assert "ImportError: this checkpoint needs the Python package qed-attention" in done.stderr
    assert "pip install qed-attention" in done.stderr


def test_the_stub_only_imports_the_package(
    model: QEDForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = tmp_path / "saved" / STUB
    assert stub.read_text() == TEXT
    names: dict[str, object] = {}
    exec(TEXT, names)
    assert {name: names[name] for name in names["__all__"]} == {
        "QEDConfig": QEDConfig,
        "QEDForCausalLM": QEDForCausalLM,
        "QEDModel": QEDModel,
    }
    assert set(AUTO_MAP.values()) == {f"modeling_qed.{name}" for name in names["__all__"]}
    assert get_imports(stub) == []  # for what it finds, transformers advises `pip install` of the module's name
    monkeypatch.setitem(sys.modules, "qed", None)
    with pytest.raises(ImportError, match=r"needs the Python package qed-attention.*pip install qed-attention"):
        exec(TEXT, {})


def test_no_code_of_a_checkpoint_runs(model: QEDForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of our stub's name, and not of another that config.json asks for."""
    saved, ran = tmp_path / "saved", tmp_path / "ran"
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    code = f"open({str(ran)!r}, 'w')\nclass QEDConfig: pass\nclass QEDForCausalLM: pass\nclass QEDModel: pass\n"
    for name in (STUB, "other.py"):
        (saved / name).write_text(code)
    config = json.loads((saved / "config.json").read_text())
    for module in ("modeling_qed", "other"):
        mapped = {auto: f"{module}.{name.split('.')[1]}" for auto, name in AUTO_MAP.items()}
        mapped["AutoModelForSequenceClassification"] = f"{module}.QEDModel"
        (saved / "config.json").write_text(json.dumps(config | {"auto_map": mapped}))
        for trust in (None, False, True):
            assert type(QEDForCausalLM.from_pretrained(saved, trust_remote_code=trust)) is QEDForCausalLM
            assert type(QEDModel.from_pretrained(saved, trust_remote_code=trust)) is QEDModel
            assert type(QEDConfig.from_pretrained(saved, trust_remote_code=trust)) is QEDConfig
            assert type(AutoConfig.from_pretrained(saved, trust_remote_code=trust)) is QEDConfig
            assert type(AutoModel.from_pretrained(saved, trust_remote_code=trust)) is QEDModel
            assert type(AutoModelForCausalLM.from_pretrained(saved, trust_remote_code=trust)) is QEDForCausalLM
        assert torch.equal(load(str(saved), dtype=torch.float32, device="cpu")(IDS).logits, model(IDS).logits)
    assert not ran.exists()
    QEDForCausalLM.from_pretrained(saved).save_pretrained(saved)
    assert (saved / STUB).read_text() == TEXT
    assert json.loads((saved / "config.json").read_text())["auto_map"] == AUTO_MAP


def test_registering_for_an_auto_class_changes_nothing(model: QEDForCausalLM, tmp_path: Path) -> None:
    """transformers would copy the file of the class and all that it imports into the folder."""
    QEDConfig.register_for_auto_class()
    QEDForCausalLM.register_for_auto_class(AutoModelForCausalLM)
    model.save_pretrained(tmp_path / "again")
    names = {x.name for x in (tmp_path / "again").iterdir()}
    assert names == {x.name for x in (tmp_path / "saved").iterdir()}
    assert [name for name in names if name.endswith(".py")] == [STUB]
    with pytest.raises(ValueError, match=r"auto_class: expected one of AutoConfig.*, got 'AutoModelForMaskedLM'"):
        QEDForCausalLM.register_for_auto_class("AutoModelForMaskedLM")


READERS = [kind.from_pretrained for kind in (QEDConfig, QEDForCausalLM, AutoConfig, AutoModelForCausalLM)]
READERS.append(partial(load, dtype=torch.float32, device="cpu"))


@pytest.mark.parametrize("read", READERS)
def test_a_checkpoint_of_a_newer_package_is_refused(
    read: Callable[[Path], object], model: QEDForCausalLM, tmp_path: Path
) -> None:
    """By its format, though it has fields and rules that this version does not know either."""
    file = tmp_path / "saved" / "config.json"
    newer = {"format_version": 2, "rule": "of-the-future", "another_field": 3}
    file.write_text(json.dumps(json.loads(file.read_text()) | newer))
    message = r"format_version: this version of qed reads checkpoints of format 1, got 2; .* newer qed-attention"
    with pytest.raises(ValueError, match=message):
        read(file.parent)


def test_fields_that_are_changed_while_loading(tmp_path: Path) -> None:
    """They are checked like all others, and another rule is one of all layers that had the rule before."""
    QEDConfig.tiny(num_hidden_layers=4, layer_types=["qed", "full_attention", "eda", "qed"]).save_pretrained(tmp_path)
    for kind in (QEDConfig, AutoConfig):
        changed = kind.from_pretrained(tmp_path, rule="gdn2", norm_eps=1e-6)
        assert (changed.rule, changed.norm_eps) == ("gdn2", 1e-6)
        assert changed.layer_rules == ["gdn2", None, "eda", "gdn2"]
    _, unused = QEDConfig.from_pretrained(tmp_path, rule="gdn2", another=1, return_unused_kwargs=True)
    assert unused.keys() & {"rule", "another"} == {"another"}
    for changes in ({"rule": "none-such"}, {"num_hidden_layers": 2}, {"hidden_size": 0}, {"layer_types": ["qed"] * 4}):
        with pytest.raises(ValueError, match=rf"{next(iter(changes))}|layer_"):
            QEDConfig.from_pretrained(tmp_path, **changes)
