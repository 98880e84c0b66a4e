"""`qed export`: the folder of a run's model loads in programs that know transformers alone, and says what it is."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import qed.report.export
from qed import QEDConfig, QEDForCausalLM
from qed.cli import app
from qed.data import tokenization
from qed.data.prepare import prepare
from qed.data.synthetic import documents
from qed.model.stub import AUTO_MAP, STUB
from qed.report.card import FIGURE, describe
from qed.report.export import export
from qed.train.config import TrainConfig
from qed.train.loop import train
from tests.analysis.synthetic import answers, evaluated

IDS = torch.arange(64)[None]


def said(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(map(str, words)))
    return done.exit_code, " ".join(done.output.split())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps, with two results and one that is damaged."""
    base, quiet = tmp_path_factory.mktemp("trained"), Console(quiet=True)
    prepare("synthetic:300", tokenizer="bpe:300", out=base / "data", licence="CC0-1.0", console=quiet)
    config = TrainConfig(
        name="try-qed-3",
        model={"hidden_size": 32, "num_hidden_layers": 1, "num_heads": 1, "head_dim": 16, "intermediate_size": 32}
        | {"vocab_size": 320},
        data=str(base / "data"),
        validation=str(base / "data"),
        seed=3,
        sequence=64,
        batch_tokens=128,
        micro_tokens=128,
        total_tokens=384,
        decay_start_tokens=256,
        validation_tokens=128,
        compile=False,
        precision="float32",
    )
    assert train(config, base / "run", device="cpu", console=quiet) == 0
    for length in (2048, 1024):
        rows = answers("niah_single_1", length, 10.5, 20, np.random.default_rng(0))
        evaluated(base / "run" / "eval", "niah_single_1", length, rows, 1.0, {}, packed=False)
    (base / "run" / "eval" / "niah_single_2-64.json").write_text("{}")
    return base / "run"


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the fresh process, which takes seconds."""
    monkeypatch.setattr(qed.report.export, "_check", lambda *_: 0.0)


def test_a_trainings_export_ends_texts_where_its_tokenizer_does(trained: Path) -> None:
    model = QEDForCausalLM.from_pretrained(trained / "export")
    for config in (model.config, model.generation_config):
        assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (0, 0, 0)
    names = {x.name for x in (trained / "export").iterdir()}
    assert names == {"README.md", "config.json", "generation_config.json", "model.safetensors", STUB} | {
        "tokenizer.json",
        "tokenizer_config.json",
    }


@pytest.mark.usefixtures("unchecked")
def test_the_card_says_what_was_trained_and_measured(trained: Path, tmp_path: Path) -> None:
    code, text = said("export", trained, "--out", tmp_path / "a" / "b")
    assert code == 0, text
    assert "left out of the model card" in text
    assert "niah_single_2-64.json" in text
    card = (tmp_path / "a" / "b" / "README.md").read_text()
    assert "| arm | QED |" in card
    assert "| seed | 3 |" in card
    assert "| data | synthetic:300, " in card
    assert "licence of the data: CC0-1.0" in card
    assert "| tokenizer | bpe:300 |" in card
    assert f"]({FIGURE})" in card
    assert (tmp_path / "a" / "b" / FIGURE).read_bytes().startswith(b"\x89PNG")
    rows = [json.loads(x) for x in (trained / "metrics.jsonl").read_text().splitlines()]
    assert f"| last validation loss (nats) | {rows[-1]['validation_loss']:.4f} |" in card
    right = json.loads((trained / "eval" / "niah_single_1-1024.json").read_text())["result"]["correct"]
    short, long = (card.index(f"| S-NIAH-1 {n} | per cent right | ") for n in ("1K", "2K"))
    assert short < long
    assert card[short:].startswith(f"| S-NIAH-1 1K | per cent right | {100 * right / 20:.1f} [")
    assert str(trained.parent) not in card  # where it lay is nobody's business
    (parameters,) = {x for x in card.splitlines() if x.startswith("| parameters |")}
    model = QEDForCausalLM.from_pretrained(tmp_path / "a" / "b")
    assert parameters == f"| parameters | {sum(x.numel() for x in model.parameters()):,} |"


@pytest.mark.usefixtures("unchecked")
def test_what_is_in_the_folder_stays_and_old_weights_go(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    torch.manual_seed(0)
    QEDForCausalLM(QEDConfig.tiny()).save_pretrained(out, max_shard_size="100KB")
    (out / "notes.txt").write_text("mine")
    (out / "README.md").write_text("mine")
    code, text = said("export", trained, "--out", out)
    assert code == 0, text
    assert "README.md: left as it is, since somebody wrote or edited it" in text
    assert (out / "notes.txt").read_text() == (out / "README.md").read_text() == "mine"
    assert [x.name for x in out.glob("model*safetensors*")] == ["model.safetensors"]
    assert not list(tmp_path.glob("*.part"))
    model, loaded = (QEDForCausalLM.from_pretrained(x).eval() for x in (trained / "export", out))
    assert torch.equal(model(IDS).logits, loaded(IDS).logits)


@pytest.mark.usefixtures("unchecked")
def test_an_old_checkpoint_is_brought_up_to_date_in_its_place(trained: Path, tmp_path: Path) -> None:
    """One without stub, map, tokenizer settings and card, and with the ends of another tokenizer."""
    old = tmp_path / "run" / "export"
    shutil.copytree(trained / "export", old)
    for name in (STUB, "README.md", "tokenizer_config.json"):
        (old / name).unlink()
    config = json.loads((old / "config.json").read_text())
    del config["auto_map"], config["layer_rules"]
    (old / "config.json").write_text(json.dumps(config | {"layer_types": ["qed"], "eos_token_id": 2}))
    code, text = said("export", old, "--out", old)
    assert code == 0, text
    assert {x.name for x in old.iterdir()} == {x.name for x in (trained / "export").iterdir()}
    config = json.loads((old / "config.json").read_text())
    assert (config["auto_map"], config["eos_token_id"], config["layer_rules"]) == (AUTO_MAP, 0, ["qed"])


@pytest.mark.usefixtures("unchecked")
def test_the_tokenizer_may_be_named(tmp_path: Path) -> None:
    QEDForCausalLM(QEDConfig.tiny(vocab_size=300)).save_pretrained(tmp_path / "model")
    for size in (300, 400):
        texts = itertools.islice(documents(400), 400)
        tokenization.train(texts, size).save(str(tmp_path / f"{size}.json"))
    code, text = said("export", tmp_path / "model", "--out", tmp_path / "a")
    assert code == 0, text
    assert "no tokenizer" in text
    code, text = said("export", tmp_path / "model", "--out", tmp_path / "b", "--tokenizer", tmp_path / "400.json")
    assert code == 1
    assert "--tokenizer: expected at most the model's 300 tokens, got 400" in text
    assert not (tmp_path / "b").exists()
    code, text = said("export", tmp_path / "model", "--out", tmp_path / "b", "--tokenizer", tmp_path / "300.json")
    assert code == 0, text
    assert QEDConfig.from_pretrained(tmp_path / "b").eos_token_id == 0


def test_no_command_runs_code_of_a_checkpoint(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of the stub, and not of a tokenizer that asks for some."""
    ran, model = tmp_path / "ran", tmp_path / "model"
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    shutil.copytree(trained / "export", model)
    for name in (STUB, "evil.py"):
        (model / name).write_text(f"open({str(ran)!r}, 'w')\nclass Tokenizer: pass\n")
    for command in (["explain", model], ["generate", model, "A text", "--max-new-tokens", "2"]):
        code, text = said(*command, "--device", "cpu")
        assert code == 0, text
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings |= {"auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}, "tokenizer_class": "Tokenizer"}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    code, text = said("generate", model, "A text", "--device", "cpu")
    assert (code, "it needs code of its own to run; code of a folder is not run" in text) == (1, True), text
    code, text = said("export", model, "--out", tmp_path / "out")
    assert (code, "expected a tokenizer that needs no code" in text) == (1, True), text
    assert not ran.exists()
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_of_a_newer_package_is_named_by_commands(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "export", tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format_version": 7, "another": 1}))
    for command in (["export", file.parent, "--out", tmp_path / "out"], ["generate", file.parent, "A"]):
        code, text = said(*command)
        assert code == 1
        assert "format_version: this version of qed reads checkpoints of format 1, got 7" in text
        assert "install a newer qed-attention" in text


PIPELINE = """
import json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

assert "qed" not in sys.modules
folder, text = sys.argv[1:]
made = pipeline("text-generation", model=folder, trust_remote_code=True)
print(json.dumps(made(text, max_new_tokens=8, do_sample=False)[0]["generated_text"]))
"""

TASK = """
task: try
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


@pytest.mark.slow
def test_the_export_works_in_programs_that_know_transformers_alone(trained: Path, tmp_path: Path) -> None:
    """The command checks it itself; then `pipeline` and lm-eval's own command get what our class gives."""
    folder = tmp_path / "out"
    code, text = said("export", trained, "--out", folder)
    assert code == 0, text
    assert "checked in a fresh process without `import qed`: AutoModelForCausalLM gives the same logits" in text
    assert "AutoTokenizer the same tokens" in text
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    options: dict[str, Any] = {"env": environment, "capture_output": True, "text": True, "cwd": tmp_path}
    prompt = "The baker forgot"
    done = subprocess.run([sys.executable, "-c", PIPELINE, str(folder), prompt], **options)
    assert done.returncode == 0, done.stderr
    model, tokenizer = QEDForCausalLM.from_pretrained(folder).eval(), tokenization.load(str(folder / "tokenizer.json"))
    ids = tokenizer.encode(prompt).ids
    tokens = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)[0].tolist()
    assert json.loads(done.stdout.splitlines()[-1]) == tokenizer.decode(tokens)

    rows = [{"question": prompt, "choices": ["a lamp", "the lamp in the house"], "answer": 0}]
    (tmp_path / "try.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "try.yaml").write_text(TASK.replace("FILE", str(tmp_path / "try.jsonl")))
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args"]
    command += [f"pretrained={folder},trust_remote_code=True", "--tasks", "try", "--include_path", str(tmp_path)]
    command += ["--device", "cpu", "--batch_size", "1", "--log_samples", "--output_path", str(tmp_path / "evaluated")]
    done = subprocess.run(command, **options)
    assert done.returncode == 0, done.stderr
    (samples,) = (tmp_path / "evaluated").rglob("samples_try_*.jsonl")
    (row,) = map(json.loads, samples.read_text().splitlines())
    for choice, (said_by_them, _) in zip(rows[0]["choices"], row["filtered_resps"], strict=True):
        whole = tokenizer.encode(f"{prompt} {choice}").ids
        with torch.no_grad():
            chances = model(torch.tensor([whole])).logits[0].log_softmax(-1)
        ours = sum(chances[i - 1, whole[i]].item() for i in range(len(ids), len(whole)))
        assert float(said_by_them) == pytest.approx(ours, abs=1e-4)


@pytest.mark.slow
def test_an_export_that_does_not_load_is_not_kept(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the package is not installed for other programs, or is another one."""
    (tmp_path / "qed.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"does not load in a fresh process, and is not kept: .*qed-attention"):
        export(trained / "export", tmp_path / "out", place=trained)
    assert [x.name for x in tmp_path.iterdir()] == ["qed.py"]


def test_a_card_needs_no_figure(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where matplotlib is not installed."""
    shutil.copytree(trained / "export", tmp_path / "model")
    monkeypatch.setattr("qed.report.card.find_spec", lambda _: None)
    assert describe(tmp_path / "model", trained)[0]
    assert FIGURE not in (tmp_path / "model" / "README.md").read_text()
    assert not (tmp_path / "model" / FIGURE).exists()
