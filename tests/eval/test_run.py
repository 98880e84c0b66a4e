"""`qed eval`: answers are the model's own, files are resumable and the same twice, bad input is named."""

import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from qed import QEDConfig, QEDForCausalLM
from qed.cli import app
from qed.data import tokenization
from qed.data.prepare import prepare
from qed.data.synthetic import documents
from qed.eval import answers as answering
from qed.eval.answers import Answer, answers, read
from qed.eval.options import Options
from qed.eval.packing import ANSWERS, EXAMPLES, Examples, compressed, packed, unpacked
from qed.eval.prompts import frozen, needle_and_question, needle_prompts
from qed.eval.records import write_rows
from qed.testing import relative_error


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = QEDConfig.tiny(vocab_size=512, eos_token_id=0, bos_token_id=None, initializer_range=0.3)
    QEDForCausalLM(config).save_pretrained(folder)
    tokenization.train(itertools.islice(documents(400), 400), 512).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("words")
    (folder / "adjectivelist.txt").write_text("red\nold\nwide\n")
    (folder / "nounlist.txt").write_text("fox\nowl\ncat\n")
    return folder


def run(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["eval", *map(str, arguments)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, " ".join(done.output.split())


def test_the_distance_of_a_needle_is_nearly_its_tokens_from_the_end(
    checkpoint: Path, words: Path, tmp_path: Path
) -> None:
    """It is found from characters; the tokens of the rest of the prompt are the truth."""
    tokenizer = tokenization.load(str(checkpoint / "tokenizer.json"))
    options = Options(lengths=(2048,), samples=20, words=words)
    path = frozen("niah_single_1", 2048, options, tokenizer, tmp_path, Console(quiet=True))
    found = list(needle_prompts(path, tokenizer, options))
    assert len({prompt.more["distance"] for prompt in found}) > 10
    for prompt in found:
        rest = prompt.text[prompt.text.index(prompt.golds[0]) :]
        truth = len(tokenizer.encode(rest, add_special_tokens=False).ids)
        assert abs(prompt.more["distance"] - truth) < 0.02 * len(prompt.ids)


@pytest.mark.parametrize("kinds", [["qed"] * 3, ["qed", "sliding_attention", "gdn"]], ids=["recurrent", "hybrid"])
def test_answers_in_a_batch_are_those_alone(kinds: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded, piece by piece and many at a time, and up to an end: what `generate` gives each alone."""
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 3, "layer_types": kinds, "sliding_window": 32, "initializer_range": 0.3}
    model = QEDForCausalLM(QEDConfig.tiny(**sizes)).eval()
    prompts = [torch.randint(3, 256, (n,)).tolist() for n in (150, 7, 99, 64)]
    monkeypatch.setattr(answering, "PIECE_TOKENS", 64 * 4)
    truth = []
    for ids in prompts:
        given = torch.tensor([ids])
        options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        truth.append(model.generate(given, attention_mask=torch.ones_like(given), **options)[0, len(ids) :].tolist())
    assert answers(model, prompts, new_tokens=12, ends=set(), batch=4) == [Answer(row) for row in truth]
    end = truth[1][5]
    cut = [row[: row.index(end)] if end in row else row for row in truth]
    assert answers(model, prompts, new_tokens=12, ends={end}, batch=4) == [Answer(row) for row in cut]
    with torch.no_grad():
        logits, _ = read(model, prompts)
        for row, ids in zip(logits, prompts, strict=True):
            assert relative_error(row, model(torch.tensor([ids])).logits[0, -1]) < 1e-4


@pytest.mark.parametrize("where", ["logits", "state"])
def test_answers_of_numbers_that_are_not_finite_are_marked(where: str, caplog: pytest.LogCaptureFixture) -> None:
    """One prompt's overflow is its own, and no other prompt of the batch is touched."""
    torch.manual_seed(0)
    model = QEDForCausalLM(QEDConfig.tiny(initializer_range=0.3)).eval()
    prompts = [torch.randint(10, 256, (n,)).tolist() for n in (50, 7, 99)]
    before = answers(model, prompts, new_tokens=2, ends=set(), batch=4)
    assert [x.finite for x in before] == [True, True, True]
    assert not caplog.records

    def overflow(module: torch.nn.Module, given: Any, found: Any) -> None:
        if where == "logits":
            found[1] = float("nan")
        elif given[0].shape[1] == 1:  # after the only step
            found[1].recurrent[1] = float("inf")

    (model.lm_head if where == "logits" else model.model.layers[-1]).register_forward_hook(overflow)
    found = answers(model, prompts, new_tokens=2, ends=set(), batch=4)
    assert [x.finite for x in found] == [True, False, True]
    assert (found[0], found[2]) == (before[0], before[2])
    assert "not finite in 1 of 3 answers" in caplog.text


def test_a_result_counts_answers_that_say_nothing(tmp_path: Path, checkpoint: Path, words: Path) -> None:
    model = QEDForCausalLM.from_pretrained(checkpoint)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    shutil.copytree(checkpoint, tmp_path / "broken")
    model.save_pretrained(tmp_path / "broken")
    assert needle_run(tmp_path / "out", tmp_path / "broken", words)[0] == 0
    result = json.loads((tmp_path / "out" / "niah_single_1-768.json").read_text())["result"]
    rows = [json.loads(line) for line in (tmp_path / "out" / "niah_single_1-768.jsonl").read_text().splitlines()]
    assert result["not_finite"] == len(rows) == 10
    assert not any(row["finite"] for row in rows)
    kept = Examples(tmp_path)
    line = packed("niah_single_1-768", {"about": {"prompts": "p"}, "result": result}, rows, kept)
    (tmp_path / EXAMPLES).write_bytes(kept.compressed())
    (tmp_path / "out" / ANSWERS).write_bytes(compressed([line]))
    assert unpacked(tmp_path / "out")["niah_single_1-768"][1] == sorted(rows, key=lambda row: row["index"])


def test_prompts_only(tmp_path: Path, checkpoint: Path, words: Path) -> None:
    options = ("--task", "niah_single_1", "--lengths", 1024, "--samples", 6, "--words", words, "--out", tmp_path)
    status, _ = run("--tokenizer", checkpoint / "tokenizer.json", "--prompts-only", *options)
    assert status == 0
    (path,) = (tmp_path / "prompts").glob("niah_single_1-1024-*.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    encoder = tokenization.load(str(checkpoint / "tokenizer.json"))
    assert len(rows) == 6
    for row in rows:
        assert row.keys() == {"prompt", "answer", "tokens", "depth"}
        assert row["tokens"] == len(encoder.encode(row["prompt"]).ids) <= 1024 - 128
    before = path.stat().st_mtime_ns
    run("--tokenizer", checkpoint / "tokenizer.json", "--prompts-only", *options)
    assert path.stat().st_mtime_ns == before  # frozen


def needle_run(out: Path, checkpoint: Path, words: Path, *more: object) -> tuple[int, str]:
    options = ("--task", "niah_single_1", "--lengths", 768, "--samples", 10, "--batch", 4, "--words", words)
    return run(checkpoint, *options, "--out", out, *more)


def test_two_runs_and_an_interrupted_one_give_the_same_files(tmp_path: Path, checkpoint: Path, words: Path) -> None:
    outs = [tmp_path / name for name in ("one", "two", "three")]
    for out in outs:
        assert needle_run(out, checkpoint, words)[0] == 0
    texts = [(out / "niah_single_1-768.jsonl").read_text() for out in outs]
    assert texts[0] == texts[1]
    # Cut off in the middle of a line of the second batch, then run again.
    whole = texts[2].splitlines(keepends=True)
    (outs[2] / "niah_single_1-768.jsonl").write_text("".join(whole[:5]) + whole[5][:20])
    assert needle_run(outs[2], checkpoint, words)[0] == 0
    assert (outs[2] / "niah_single_1-768.jsonl").read_text() == texts[0]
    results = [json.loads((out / "niah_single_1-768.json").read_text()) for out in outs]
    assert results[0] == results[1] == results[2]
    assert results[0]["result"]["samples"] == 10
    row = json.loads(whole[0])
    about = {"tokens", "depth", "distance", "needle", "question"}
    assert {"index", "prompt_sha256", "prediction", "gold", "correct", *about} == row.keys()
    assert re.fullmatch(rf"One of the special magic numbers for \S+ is: {row['gold']}\.", row["needle"])
    key = row["needle"].split()[7]
    assert row["question"].startswith(f"What is the special magic number for {key} mentioned")
    assert "grass" not in row["needle"] + row["question"]
    assert {"checkpoint", "tokenizer", "strength", "dtype", "sizing", "prompts"} <= results[0]["about"].keys()
    assert {"environment", "git", "code", "impl"} <= results[0]["provenance"].keys()


@pytest.mark.parametrize(
    ("prompt", "needle", "question"),
    [
        (
            "Listen.\nSo he said. One of the numbers for a-b is: 7. He left. What for?\nWhat is the number for a-b?",
            "One of the numbers for a-b is: 7.",
            "What is the number for a-b?",
        ),
        ("Remember bomi 7. A dog ran. Remember teka 7. Remember lo 8. Recall teka", "Remember teka 7.", "Recall teka"),
        ("Remember lo 8. Recall teka", None, "Recall teka"),
    ],
)
def test_needle_and_question_are_kept_without_the_haystack(prompt: str, needle: str | None, question: str) -> None:
    """Of two facts with the same value, the one that is asked for."""
    assert needle_and_question(prompt, "7") == {"question": question} | ({"needle": needle} if needle else {})


def test_another_evaluation_is_not_mixed_in(tmp_path: Path, checkpoint: Path, words: Path) -> None:
    assert needle_run(tmp_path, checkpoint, words)[0] == 0
    status, said = needle_run(tmp_path, checkpoint, words, "--strength", 0.5)
    assert status == 1
    assert "another evaluation is there; strength was 1.0, now 0.5" in said


def test_recall_from_a_file(tmp_path: Path, checkpoint: Path) -> None:
    rows = [{"key": "maker", "value": f"firm {i}", "text": f"The maker: firm {i} of many.\nmaker:"} for i in range(5)]
    (tmp_path / "fda.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for variant in ("A0", "A1", "B"):
        out = tmp_path / variant
        data = ("--data", f"fda={tmp_path / 'fda.jsonl'}", "--variant", variant)
        assert run(checkpoint, "--task", "fda", *data, "--out", out)[0] == 0
        found = json.loads((out / f"fda-{variant}.json").read_text())
        assert found["about"]["variant"] == variant
        assert found["about"]["golds_in_prompt"] == found["result"]["samples"] == 5
    data = ("--data", f"fda={tmp_path / 'fda.jsonl'}", "--max-length", 64)
    assert run(checkpoint, "--task", "fda", *data, "--out", tmp_path / "cut")[0] == 0
    found = json.loads((tmp_path / "cut" / "fda-A1-64.json").read_text())
    assert found["about"]["truncated"] == 5
    assert found["about"]["golds_in_prompt"] < 5


def test_loss_by_position(tmp_path: Path, checkpoint: Path) -> None:
    tokenizer = str(checkpoint / "tokenizer.json")
    prepare("synthetic:60", tokenizer=tokenizer, out=tmp_path / "data", console=Console(quiet=True))
    options = ("--task", "positions", "--lengths", 300, "--samples", 3, "--out", tmp_path / "out")
    assert run(checkpoint, *options, "--data", f"positions={tmp_path / 'data'}")[0] == 0
    found = json.loads((tmp_path / "out" / "positions-300.json").read_text())["result"]
    assert found["bins"][-1]["to"] == 300
    assert 3 < found["loss"] < 60


def test_norms_of_states(tmp_path: Path, checkpoint: Path) -> None:
    prepare(
        "synthetic:60", tokenizer=str(checkpoint / "tokenizer.json"), out=tmp_path / "data", console=Console(quiet=True)
    )
    options = (
        "--task",
        "states",
        "--lengths",
        1024,
        "--data",
        f"states={tmp_path / 'data'}",
        "--out",
        tmp_path / "out",
    )
    status, said = run(checkpoint, *options)
    assert status == 0
    assert "fastest" in said
    found = json.loads((tmp_path / "out" / "states-1024.json").read_text())["result"]
    assert {name: len(points) for name, points in found["texts"].items()} == {"noise": 16, "corpus": 16}
    for length in (1000, 10**6):
        status, said = run(checkpoint, *options[:2], "--lengths", length, *options[4:])
        assert (status, "expected" in said, str(length) in said) == (1, True, True)


def test_bad_input(tmp_path: Path, checkpoint: Path, words: Path) -> None:
    other = tmp_path / "other.json"
    tokenization.train(["a b c"], 300).save(str(other))
    status, said = needle_run(tmp_path, checkpoint, words, "--tokenizer", other)
    assert (status, "--tokenizer: expected the checkpoint's own" in said) == (1, True)
    (tmp_path / "empty.txt").write_text(" \n")
    essay = ("--task", "niah_single_2", "--lengths", 1024, "--words", words, "--out", tmp_path / "out")
    status, said = run(checkpoint, *essay, "--essays", tmp_path / "empty.txt")
    assert (status, "expected text for a haystack" in said) == (1, True)
    status, said = run(
        checkpoint, "--task", "niah_single_1", "--lengths", 100, "--words", words, "--out", tmp_path / "out"
    )
    assert (status, "--lengths: expected 256 or more, got 100" in said) == (1, True)
    (tmp_path / "bad.jsonl").write_text('{"key": "ab", "value": "cd", "text": "x"}\n{"key": \n')
    status, said = run(
        checkpoint, "--task", "fda", "--data", f"fda={tmp_path / 'bad.jsonl'}", "--out", tmp_path / "out"
    )
    assert (status, "bad.jsonl:2: expected a JSON object" in said) == (1, True)
    status, said = run(checkpoint, "--task", "niah_single_9", "--out", tmp_path / "out")
    assert (status, "--task: expected" in said) == (1, True)
    assert not (tmp_path / "out").exists()


def test_a_task_that_cannot_run_keeps_the_others_from_running(tmp_path: Path, checkpoint: Path, words: Path) -> None:
    """Everything is looked at first: the last task's earlier results are another evaluation's."""
    rows = [{"key": "maker", "value": f"firm {i}", "text": f"The maker: firm {i} of many.\nmaker:"} for i in range(3)]
    file, out = tmp_path / "fda.jsonl", tmp_path / "out"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run(checkpoint, "--task", "fda", "--data", f"fda={file}", "--batch", 4, "--out", out)[0] == 0
    before = sorted(out.iterdir())
    file.write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
    status, said = needle_run(out, checkpoint, words, "--task", "fda", "--data", f"fda={file}")
    assert (status, "another evaluation is there; forms was {'as given': 3}, now {'as given': 2}" in said) == (1, True)
    assert sorted(out.iterdir()) == before


def edited(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_edited_prompts_are_noticed(tmp_path: Path, checkpoint: Path, words: Path) -> None:
    """Text, tokens, with and without the sha256 that was kept; what a set without it should be is drawn again."""
    assert needle_run(tmp_path / "first", checkpoint, words, "--prompts-only")[0] == 0
    (path,) = (tmp_path / "first" / "prompts").glob("*.jsonl")
    about, tokens = path.with_suffix(".json"), path.with_suffix(".npz")
    kept = {x: x.read_bytes() for x in (path, about, tokens)}

    def again() -> tuple[int, str]:
        out = tmp_path / "second"
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(tmp_path / "first" / "prompts", out / "prompts")
        return needle_run(out, checkpoint, words, "--prompts-only")

    def without_sum() -> None:
        found = json.loads(about.read_text())
        del found["sha256"]
        about.write_text(json.dumps(found))

    assert again()[0] == 0
    edited(path, "The grass is green", "The grass is grey")
    status, said = again()
    assert (status, "expected the prompts as they were frozen" in said) == (1, True)
    status, said = needle_run(tmp_path / "first", checkpoint, words)
    assert (status, "expected the prompts as they were frozen" in said) == (1, True)
    assert [x.name for x in (tmp_path / "first").iterdir()] == ["prompts"]
    without_sum()
    status, said = again()
    assert (status, ".jsonl:1: expected the prompt that task, length and seed give" in said) == (1, True)
    path.write_bytes(kept[path])
    assert again()[0] == 0  # a set of an earlier version: the same, and now it has its sha256
    write_rows(tokens, [[1, 2, 3]] * 10)
    status, said = again()
    assert (status, "npz: expected the tokens of the prompts" in said) == (1, True)
    about.write_bytes(kept[about])
    status, said = again()
    assert (status, "npz: expected the prompts as they were frozen" in said) == (1, True)
    tokens.write_bytes(b"junk")
    without_sum()
    status, said = again()
    assert (status, "npz: expected the tokens of frozen prompts" in said) == (1, True)


def test_predictions_of_other_prompts_are_not_mixed_in(tmp_path: Path, checkpoint: Path, words: Path) -> None:
    assert needle_run(tmp_path, checkpoint, words)[0] == 0
    file = tmp_path / "niah_single_1-768.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(row | {"prompt_sha256": "0" * 64}) + "\n" for row in rows[:4]))
    status, said = needle_run(tmp_path, checkpoint, words)
    assert (status, "expected predictions of the same prompts, got one of another prompt" in said) == (1, True)
    file.write_text("".join(json.dumps(row) + "\n" for row in (rows[0], rows[0])))
    status, said = needle_run(tmp_path, checkpoint, words)
    assert (status, ":2: expected each example once" in said) == (1, True)


@pytest.mark.parametrize("gold", ["", "  \n"])
def test_an_empty_answer_is_refused(tmp_path: Path, checkpoint: Path, words: Path, gold: str) -> None:
    """It would stand in every prediction."""
    found = tokenization.load(str(checkpoint / "tokenizer.json"))
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "a b", "answer": gold, "tokens": 3, "depth": 0.0}) + "\n")
    write_rows(path.with_suffix(".npz"), [[1, 2, 3]])
    with pytest.raises(ValueError, match=r"prompts.jsonl:1: expected an answer with at least one character"):
        list(needle_prompts(path, found, Options()))
    rows = {
        "fda": {"key": "k", "value": gold, "text": "k: v"},
        "swde": {"key": "k", "value": gold, "text": "k: v"},
        "squad_completion": {"context": "c", "question": "q", "answers": {"text": ["x", gold]}},
    }
    for task, row in rows.items():
        file = tmp_path / f"{task}.jsonl"
        file.write_text("\n" + json.dumps(row) + "\n")
        status, said = run(checkpoint, "--task", task, "--data", f"{task}={file}", "--out", tmp_path / "out")
        assert (status, f"{task}.jsonl:2: expected an answer with at least one" in said) == (1, True)
    assert not (tmp_path / "out").exists()
