"""The examples do what they say: they learn, resumed is uninterrupted, merged is unmerged, continued is read once."""

import runpy
import sys
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that runs a script as a program, with arguments, and returns its variables."""
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def run_script(name: str, *arguments: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        return runpy.run_path(str(EXAMPLES / name), run_name="__main__")

    return run_script


def test_the_list_names_every_example() -> None:
    files = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")}
    lines = (EXAMPLES / "README.md").read_text().splitlines()
    assert {line.split("`")[1] for line in lines if line.startswith("- ")} == files


@pytest.mark.slow
def test_a_layer_of_ones_own_learns_and_sees_no_later_token(run: Any) -> None:
    after = run("own_layer.py")
    assert after["losses"][-1] < 0.4 * after["losses"][0]
    assert after["before"] < 0.3
    assert after["after"] > 0.9
    model, row = after["model"], after["rows"][:1]
    other = row.clone()
    other[:, 30:] = row[:, :20]
    with torch.no_grad():
        assert torch.allclose(model(row)[:, :30], model(other)[:, :30], atol=1e-5)
        assert not torch.allclose(model(row)[:, 30:], model(other)[:, 30:], atol=1e-5)
    start = 0.25 * torch.sigmoid(torch.tensor(-2.0))
    assert (after["strengths"] - start).abs().max() > 1e-5  # λ has a gradient


@pytest.mark.slow
def test_a_resumed_training_ends_where_an_uninterrupted_one_does(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    after = run("trainer.py", str(tmp_path))
    assert after["losses"][-1] < 0.5 * after["losses"][0]
    assert len(after["pairs"]) > 20
    assert all(torch.equal(x, y) for x, y in after["pairs"])
    untrained = after["tiny"].make_model(after["words"])
    moved = zip(untrained.parameters(), after["resumed"].parameters(), strict=True)
    assert all(not torch.equal(x, y) for x, y in moved)
    assert str(tmp_path / "model") in capsys.readouterr().out
    assert (tmp_path / "model" / "tokenizer.json").exists()


@pytest.mark.slow
def test_an_adapter_is_trained_switched_off_and_merged(run: Any) -> None:
    after = run("peft_lora.py")
    assert after["after"] > after["before"] + 0.05
    assert torch.equal(after["off_logits"], after["base_logits"])
    assert torch.allclose(after["merged_logits"], after["on_logits"], atol=1e-3)
    assert not torch.allclose(after["on_logits"], after["off_logits"], atol=1e-1)
    assert not any("lora" in name for name in after["merged"].state_dict())


@pytest.mark.slow
def test_generated_streamed_and_continued_are_the_same_text(run: Any) -> None:
    after = run("generation.py")
    tokenizer, model, prompt = after["tokenizer"], after["model"], after["prompt"]
    assert tokenizer.decode(after["greedy"][0].tolist()).endswith("the lamp? green.")
    alone = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12)
    assert after["streamed"] == alone[0, prompt.shape[1] :].tolist()
    assert tokenizer.decode(after["answers"].tolist()) == "green pink"
    for thing, continued in after["continued"].items():
        question = after["ids"](f"{after['facts']} the {thing}?")
        assert torch.equal(continued, model.generate(question, attention_mask=question > 0, max_new_tokens=1))
    assert after["cache"].get_seq_length() == after["ids"](after["facts"]).shape[1]
    assert after["sampled"].shape == (3, after["open_prompt"].shape[1] + 4)


@pytest.mark.slow
def test_a_look_shows_what_the_model_reads(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    after = run("look_inside.py")
    assert after["answer"] == "green"
    printed = capsys.readouterr().out
    for s, token in enumerate(after["tokens"]):
        assert f"{token:>8}  {after['read'][s]:8.4f}  {after['without'][s]:10.4f}" in printed
    assert torch.allclose(after["read"] + after["forgotten"], after["without"], atol=1e-6)
    # With λ = 0 in this layer, the model itself computes what the table says that it would read.
    model, mixer = after["model"], after["model"].model.layers[after["layer"]].mixer
    mixer.strength_scale = 0.0
    again = dict(sys.modules["qed.analysis.look"].look_inside(model, after["ids"]))[after["layer"]]
    assert torch.allclose(again.attention[0, after["head"], -1], after["without"], atol=1e-6)
    assert after["share"] > 1e-4


@pytest.mark.slow
def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells)  # outputs are made, not stored
    monkeypatch.chdir(EXAMPLES)
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.get("text", "") for output in outputs)
    right = float(printed.split("answers ")[1].split("%")[0])
    assert right > 90
    assert len([output for output in outputs if "image/png" in output.get("data", {})]) == 2
