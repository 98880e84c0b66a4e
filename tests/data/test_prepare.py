"""From documents to tokens: every source gives its texts, tokens give the texts back, and a cut run goes on."""

import gzip
import itertools
import json
import lzma
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import sentencepiece
from rich.console import Console
from tokenizers import Tokenizer
from typer.testing import CliRunner

from qed.cli import app
from qed.data import TokenShards, sources
from qed.data.prepare import prepare
from qed.data.synthetic import document, documents
from qed.data.tokenization import END, from_sentencepiece, train

TEXTS = ["One.", "Zwei Wörter,\nzwei Zeilen.", "三 🙂", "<s> is no token </s> here"]
SHARED = Path(os.environ.get("QED_SHARED", Path(__file__).parents[3] / "shared"))


def quiet(source: str, out: Path, tokenizer: str = "bpe:300", **options: object) -> TokenShards:
    prepare(source, tokenizer=tokenizer, out=out, console=Console(quiet=True), **options)
    return TokenShards(out)


def texts_of(shards: TokenShards) -> list[str]:
    tokens = shards.read(0, len(shards))
    encoder, index = Tokenizer.from_file(str(shards.folder / "tokenizer.json")), shards.index
    parts = np.split(tokens, np.flatnonzero(tokens == index["end"]) + 1)[:-1]
    return [encoder.decode([int(x) for x in part[:-1] if x != index["begin"]]) for part in parts]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """The same texts in every form."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    lines = "".join(json.dumps({"text": x, "id": i}) + "\n" for i, x in enumerate(TEXTS))
    (folder / "a.jsonl").write_text(lines)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (folder / "c.jsonl.xz").write_bytes(lzma.compress(lines.encode()))
    others = {"id": "x", "dump": "CC-MAIN", "url": "u", "language": "en", "score": 3.5, "token_count": 1}
    fineweb = {"text": TEXTS} | {name: [x] * 4 for name, x in others.items()}
    pyarrow.parquet.write_table(pyarrow.table(fineweb), folder / "d.parquet")
    return folder


@pytest.mark.parametrize("name", ["a.jsonl", "b.jsonl.gz", "c.jsonl.xz", "d.parquet"])
def test_every_form_gives_the_texts(name: str, corpus: Path) -> None:
    assert list(sources.documents(str(corpus / name))) == TEXTS


def test_a_folder_gives_its_files_in_order(corpus: Path) -> None:
    assert list(sources.documents(str(corpus))) == TEXTS * 4


def test_plain_text_is_parted_by_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("a\nb\n\n\nc\n")
    assert list(sources.documents(str(tmp_path / "x.txt"))) == ["a\nb\n", "c\n"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", b'{"text": "a"}\n{"body": "b"}\n', r"x.jsonl:2: expected a text under 'text', got keys \['body'\]"),
        ("x.jsonl", b'{"text": "a"}\nnonsense\n', r"x.jsonl:2: expected a JSON object, got 'nonsense"),
        ("x.jsonl.xz", b"not xz", r"x.jsonl.xz: expected UTF-8 text, got a damaged file"),
        ("x.txt", b"\xff\xfe", r"x.txt: expected UTF-8 text, got a damaged file"),
        ("x.parquet", b"PAR?", r"x.parquet: expected a Parquet file"),
        ("x.csv", b"a,b", r"SOURCE: expected .jsonl, .parquet, .txt"),
    ],
)
def test_what_is_no_source(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(sources.SourceError, match=message):
        list(sources.documents(str(tmp_path / name)))


def test_a_missing_column_is_named(corpus: Path) -> None:
    with pytest.raises(sources.SourceError, match="expected a column 'content', got text, id, dump"):
        list(sources.documents(str(corpus / "d.parquet"), "content"))


def test_a_dataset_is_streamed(corpus: Path) -> None:
    """From a folder of Parquet files, which is what a hub's dataset is."""
    pytest.importorskip("datasets")
    for other in corpus.glob("*.jsonl*"):
        other.unlink()
    assert list(sources.documents(f"hf:{corpus}")) == TEXTS


def test_the_hub_needs_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(sources.SourceError, match="the hub needs the `data` extra"):
        list(sources.documents("hf:HuggingFaceFW/fineweb-edu:sample-10BT"))


def test_synthetic_documents_are_functions_of_their_number() -> None:
    assert list(documents(5, seed=3)) == [document(i, 3) for i in range(5)]
    assert document(1, 3) != document(1, 4)
    assert len({document(i) for i in range(200)}) == 200


def test_tokens_give_the_texts_back(corpus: Path, tmp_path: Path) -> None:
    """Also where a text looks like a special token."""
    shards = quiet(str(corpus / "a.jsonl"), tmp_path / "out")
    assert texts_of(shards) == TEXTS
    assert shards.index["documents"] == 4
    shards.verify()


def test_without_sentencepiece_a_model_of_it_is_refused_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    (tmp_path / "llama2.model").write_bytes(b"x")
    call = ["prepare", "synthetic:5", "--out", str(tmp_path / "out"), "--tokenizer"]
    result = CliRunner().invoke(app, [*call, str(tmp_path / "llama2.model")])
    assert result.exit_code == 1
    said = " ".join(result.stderr.split())
    assert "llama2.model is a SentencePiece model" in said
    assert said.endswith("pip install 'qed-attention[sentencepiece]' installs it")
    assert not (tmp_path / "out").exists()
    assert CliRunner().invoke(app, [*call, "bpe:300"]).exit_code == 0


def test_practice_that_a_tokenizer_loses_is_warned_of(tmp_path: Path) -> None:
    """Before the documents are encoded, and only where there is practice."""

    def said(out: str, *more: str) -> str:
        result = CliRunner().invoke(app, ["prepare", "synthetic:60", "--out", str(tmp_path / out), *more])
        assert result.exit_code == 0, result.output
        return " ".join(result.stderr.split())

    lost = said("a", "--tokenizer", "words:300", "--practice", "0.2")
    assert "warning: what practice documents practise cannot be answered with this tokenizer: the answer '" in lost
    assert lost.index("warning") < lost.index("documents,")
    assert "warning" not in said("b", "--tokenizer", "words:300")
    assert "warning" not in said("c", "--tokenizer", "bpe:300", "--practice", "0.2")


def test_sentencepiece_models_keep_their_tokens(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("\n".join(itertools.chain(documents(300), TEXTS)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(tmp_path / "spm"), vocab_size=600, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
    )  # fmt: skip
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "spm.model"))
    ours = from_sentencepiece(tmp_path / "spm.model")
    ours.encode_special_tokens = True
    for x in [*TEXTS, *documents(50, seed=1), "", " two  spaces ", "\t\n"]:
        found = ours.encode(x, add_special_tokens=False).ids
        assert found == theirs.encode(x), x
        assert ours.decode(found) == x


@pytest.mark.skipif(not (SHARED / "data" / "tokenizers" / "llama2.model").exists(), reason="no Llama-2 tokenizer here")
def test_llama_2_keeps_its_tokens() -> None:
    path = SHARED / "data" / "tokenizers" / "llama2.model"
    theirs, ours = sentencepiece.SentencePieceProcessor(model_file=str(path)), from_sentencepiece(path)
    ours.encode_special_tokens = True
    for x in [*TEXTS, *documents(50)]:
        assert ours.encode(x, add_special_tokens=False).ids == theirs.encode(x)


class CutError(Exception):
    pass


@pytest.mark.parametrize("after", [0, 1, 90, 250])
def test_a_cut_run_goes_on_to_the_same_bytes(after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qed.data.prepare.BLOCK", 5000)
    options = {"shard_tokens": 5000}
    whole = quiet("synthetic:300", tmp_path / "whole", **options)
    assert len(whole.parts) > 2
    everything = sources.documents

    def until(source: str, column: str) -> Iterator[str]:
        yield from itertools.islice(everything(source, column), after)
        raise CutError

    encoder = train(documents(300), 300)
    monkeypatch.setattr("qed.data.prepare.sources.documents", until)
    monkeypatch.setattr("qed.data.prepare.tokenization.load", lambda name, texts=(): encoder)
    with pytest.raises(CutError):
        quiet("synthetic:300", tmp_path / "cut", **options)
    assert not (tmp_path / "cut" / "index.json").exists()
    monkeypatch.undo()
    monkeypatch.setattr("qed.data.prepare.BLOCK", 5000)
    again = quiet("synthetic:300", tmp_path / "cut", **options)
    assert [x["sha256"] for x in again.index["shards"]] == [x["sha256"] for x in whole.index["shards"]]
    assert not list((tmp_path / "cut").glob("*.part"))


def test_another_corpus_is_not_mixed_in(tmp_path: Path) -> None:
    quiet("synthetic:20", tmp_path)
    with pytest.raises(ValueError, match="holds another corpus, made from synthetic:20"):
        quiet("synthetic:30", tmp_path)
    assert quiet("synthetic:20", tmp_path).index["documents"] == 20


def test_damage_is_found(tmp_path: Path) -> None:
    quiet("synthetic:20", tmp_path)
    file = tmp_path / "tokens-00000.bin"
    data = bytearray(file.read_bytes())
    data[5] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match=r"tokens-00000.bin: expected sha256"):
        quiet("synthetic:20", tmp_path)
    file.write_bytes(data[:-2])
    with pytest.raises(ValueError, match=r"tokens-00000.bin: expected \d+ tokens, got \d+"):
        TokenShards(tmp_path)


def test_on_the_command_line(tmp_path: Path) -> None:
    command = ["prepare", "synthetic:30", "--tokenizer", "bpe:300", "--out", str(tmp_path / "x"), "--licence", "none"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    index = TokenShards(tmp_path / "x").index
    assert (index["documents"], index["licence"], index["vocab_size"]) == (30, "none", 300)
    for change, message in (
        ({1: "nowhere.jsonl"}, "which does not exist"),
        ({3: "bpe:9"}, "expected bpe:N with N of 257 or more"),
        ({3: "words:two"}, "expected words:N with N of 3 or more"),
        ({3: "nothing.model"}, "no such file"),
    ):
        broken = [change.get(i, x) for i, x in enumerate(command)]
        broken[5] = str(tmp_path / "y")
        failed = CliRunner().invoke(app, broken)
        assert failed.exit_code == 1
        assert message in " ".join(failed.output.split())


def test_a_tokenizer_that_cannot_part_documents(tmp_path: Path) -> None:
    tokenizer = train(documents(20), 300)
    text = tokenizer.to_str().replace(END, "<x>")
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match="to separate documents"):
        quiet("synthetic:20", tmp_path / "out", tokenizer=str(tmp_path / "tokenizer.json"))
