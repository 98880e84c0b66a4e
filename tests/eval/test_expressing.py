"""A tokenizer that loses the words of a task is warned about, and no other."""

import io
import itertools
import json
from pathlib import Path

import pytest
from rich.console import Console
from tokenizers import Tokenizer

from qed.data import tokenization
from qed.data.practice import Practice
from qed.data.prepare import prepare
from qed.data.synthetic import documents
from qed.eval.expressing import obstacle, practice_obstacle, usual_task, warn, warn_of_corpus
from qed.eval.options import Options
from qed.eval.tasks import TASKS


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    texts = list(itertools.islice(documents(400), 400))
    return {"words": tokenization.words(texts, 512), "bytes": tokenization.train(texts, 512)}


@pytest.fixture
def options(tmp_path: Path) -> Options:
    for name, text in (("adjectivelist.txt", "red\nold\n"), ("nounlist.txt", "fox\nowl\n")):
        (tmp_path / name).write_text(text)
    facts = [{"key": "a", "value": value, "text": f"a: {value}. The colour is {value}. a:"} for value in ("zebra", "b")]
    (tmp_path / "fda.jsonl").write_text("".join(json.dumps(fact) + "\n" for fact in facts))
    return Options(lengths=(512,), words=tmp_path, data={"fda": tmp_path / "fda.jsonl"})


def test_answers_that_no_model_can_give_are_named(tokenizers: dict[str, Tokenizer], options: Options) -> None:
    said = obstacle(TASKS["niah_single_1"], options, tokenizers["words"])
    assert said is not None
    assert "becomes '<|other|>'" in said
    assert "the answer 'zebra' becomes '<|other|>'" in str(obstacle(TASKS["fda"], options, tokenizers["words"]))
    for name in ("niah_single_1", "fda"):
        assert obstacle(TASKS[name], options, tokenizers["bytes"]) is None
    assert obstacle(TASKS["pairs"], options, tokenizers["words"]) is None
    assert obstacle(TASKS["positions"], options, tokenizers["words"]) is None


def test_prompts_of_unknown_words_are_named(tokenizers: dict[str, Tokenizer], options: Options) -> None:
    known = next(word for word in tokenizers["words"].get_vocab() if word.isalpha())
    path = options.data["fda"]
    path.write_text(json.dumps({"key": "a", "value": known, "text": f"xylem quokka {known} xylem quokka a:"}) + "\n")
    assert "it does not know" in str(obstacle(TASKS["fda"], options, tokenizers["words"]))


def test_the_warning_is_one_line(tokenizers: dict[str, Tokenizer], options: Options) -> None:
    console = Console(record=True, width=60, file=io.StringIO())
    warn(["pairs", "niah_single_1"], options, tokenizers["words"], console)
    (line,) = console.export_text().splitlines()
    assert line.startswith("warning: niah_single_1 cannot be answered with this tokenizer: the answer '")


def test_practice_needs_numbers_and_uuids(tokenizers: dict[str, Tokenizer]) -> None:
    assert "becomes '<|other|>'" in str(practice_obstacle(tokenizers["words"]))
    assert practice_obstacle(tokenizers["bytes"]) is None
    digits = [" ".join("0123456789"), *(x for x in documents(400))]
    assert practice_obstacle(tokenization.words(digits, 600)) is not None  # a number is one word, which it has not seen
    assert {name: usual_task(x).name for name, x in tokenizers.items()} == {"words": "pairs", "bytes": "niah_single_1"}


def test_a_corpus_whose_models_cannot_be_asked_is_warned_of(tmp_path: Path) -> None:
    """The built-in corpus is what `pairs` is made of; a text of other words is not."""
    (tmp_path / "other.txt").write_text("xylem quokka. " * 50)

    def said(source: str, **more: object) -> str:
        out = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        prepare(source, tokenizer="words:512", out=out, console=Console(quiet=True), **more)
        console = Console(record=True, width=300, file=io.StringIO())
        warn_of_corpus(out, console)
        return console.export_text()

    assert said("synthetic:2000") == ""
    assert said(str(tmp_path / "other.txt")).startswith("warning: pairs cannot be answered with this tokenizer")
    mixed = said("synthetic:2000", mix=Practice(share=0.3))
    assert mixed.startswith("warning: what practice documents practise cannot be answered with this tokenizer")
    assert len(mixed.splitlines()) == 1
    warn_of_corpus(tmp_path / "nowhere", Console(quiet=True))  # whoever opens it says that it is none
