"""What goes wrong around `qed prepare`: a changed source or tokenizer, another process, kills, damaged state."""

import json
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from qed.cli import app
from qed.data import TokenShards, sources
from qed.data import prepare as module
from qed.data.prepare import prepare
from qed.data.synthetic import documents
from qed.data.tokenization import load, train
from qed.locks import LockedError, held

QUIET = Console(quiet=True)


def write(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": x}) + "\n" for x in texts))
    return path


class CutError(Exception):
    pass


@pytest.fixture
def cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """A corpus that was cut off after some shards: how to call for the rest."""
    monkeypatch.setattr("qed.data.prepare.BLOCK", 2000)
    train(documents(50), 300).save(str(tmp_path / "tokenizer.json"))
    source = write(tmp_path / "x.jsonl", list(documents(200)))
    usual = sources.documents

    def until(source: str, column: str) -> object:
        for i, text in enumerate(usual(source, column)):
            if i == 150:
                raise CutError
            yield text

    options = {"source": str(source), "tokenizer": str(tmp_path / "tokenizer.json"), "out": tmp_path / "out"}
    options |= {"shard_tokens": 2000, "console": QUIET}
    with monkeypatch.context() as patch:
        patch.setattr("qed.data.prepare.sources.documents", until)
        with pytest.raises(CutError):
            prepare(**options)
    assert (tmp_path / "out" / "progress.json").exists()
    return options


def test_a_source_that_has_changed_is_refused(cut: dict[str, object], tmp_path: Path) -> None:
    before = sources.identity(str(cut["source"]))["x.jsonl"]
    write(tmp_path / "x.jsonl", ["changed", *documents(200)])
    now = sources.identity(str(cut["source"]))["x.jsonl"]
    with pytest.raises(ValueError, match=rf"x.jsonl had sha256 {before}, now it has {now}"):
        prepare(**cut)
    write(tmp_path / "x.jsonl", list(documents(200)))
    assert prepare(**cut)["documents"] == 200
    write(tmp_path / "x.jsonl", list(documents(199)))
    with pytest.raises(ValueError, match=rf"x.jsonl had sha256 {before}, now it has"):
        prepare(**cut)
    (tmp_path / "x.jsonl").unlink()
    assert prepare(**cut)["documents"] == 200  # nothing is asked of a source that is not needed any more


def test_documents_that_have_changed_are_refused(cut: dict[str, object], tmp_path: Path) -> None:
    """Where there are no files to compare, as with a dataset of the hub."""
    state = tmp_path / "out" / "progress.json"
    found = json.loads(state.read_text())
    write(tmp_path / "x.jsonl", ["changed", *documents(200)])
    state.write_text(json.dumps(found | {"source_files": None}))
    with pytest.raises(ValueError, match=rf"documents had sha256 {found['documents_sha256']}, now they have \w{{64}};"):
        prepare(**cut)
    state.write_text(json.dumps({x: found[x] for x in ("asked", "documents", "shards")}))  # as older versions wrote it
    assert prepare(**cut)["documents"] == 201


def test_a_folder_with_another_file_is_another_source(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder / "a.jsonl", list(documents(20)))
    options = {"source": str(folder), "tokenizer": "bpe:300", "out": tmp_path / "out", "console": QUIET}
    prepare(**options)
    write(folder / "b.jsonl", list(documents(20)))
    with pytest.raises(ValueError, match=r"b.jsonl had sha256 none, being absent, now it has \w{64}"):
        prepare(**options)


def test_a_tokenizer_that_has_changed_is_refused(cut: dict[str, object], tmp_path: Path) -> None:
    kept = (tmp_path / "tokenizer.json").read_text()
    train(documents(50), 290).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"has changed since .* its identity was \w{64}, now it is \w{64}"):
        prepare(**cut)
    (tmp_path / "tokenizer.json").write_text(kept)
    assert prepare(**cut)["documents"] == 200
    train(documents(50), 290).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"--tokenizer: .* has changed since"):
        prepare(**cut)


@pytest.mark.parametrize("content", ["[]", "null", "", "{}", '{"asked": 3}'])
def test_progress_that_is_damaged_is_named(content: str, cut: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "out" / "progress.json").write_text(content)
    with pytest.raises(ValueError, match=r"progress.json: expected"):
        prepare(**cut)


def test_a_finished_shard_that_is_damaged_is_found(cut: dict[str, object], tmp_path: Path) -> None:
    shard = tmp_path / "out" / "tokens-00000.bin"
    shard.write_bytes(b"\x01" * shard.stat().st_size)
    with pytest.raises(ValueError, match=r"tokens-00000.bin: expected sha256 \w{64}, got \w{64}"):
        prepare(**cut)


def test_another_process_is_refused(tmp_path: Path) -> None:
    with held(tmp_path, "prepare"), pytest.raises(LockedError, match=rf"process {os.getpid()} on .* is at work there"):
        prepare("synthetic:20", tokenizer="bpe:300", out=tmp_path, console=QUIET)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("source", "tokenizer", "message"),
    [
        ("nowhere.jsonl", "bpe:300", "which does not exist"),
        ("synthetic:0", "bpe:300", "SOURCE: expected documents, got none from synthetic:0"),
        ("synthetic:x", "bpe:300", "SOURCE: expected synthetic:N"),
        ("hf:", "bpe:300", "SOURCE: expected hf:NAME|the hub needs the `data` extra"),
        ("x.jsonl", "bpe:300", "x.jsonl:1: expected a text under 'text', got keys"),
        ("half.jsonl", "bpe:300", "half.jsonl: document 1: expected Unicode text"),
        ("synthetic:20", "bpe:x", "--tokenizer: expected bpe:N"),
        ("synthetic:20", "nothing.json", "no such file"),
        ("synthetic:20", "x.jsonl", "--tokenizer: expected a .model or .json file"),
    ],
)
def test_nothing_is_written_before_all_is_checked(
    source: str, tokenizer: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.jsonl").write_text('{"body": "x"}\n')
    (tmp_path / "half.jsonl").write_text('{"text": "\\ud800"}\n')
    with pytest.raises(ValueError, match=message):
        prepare(source, tokenizer=tokenizer, out=tmp_path / "new" / "out", console=QUIET)
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    failed = CliRunner().invoke(
        app, ["prepare", "synthetic:20", "--tokenizer", "bpe:300", "--out", str(tmp_path / "file" / "x")]
    )
    assert failed.exit_code == 1
    assert "--out: expected a path below folders" in " ".join(failed.output.split())


def test_a_tokenizer_file_that_asks_for_truncation(tmp_path: Path) -> None:
    """Documents are taken whole all the same."""
    made = train(documents(50), 300)
    made.enable_truncation(5)
    made.enable_padding(length=7)
    made.save(str(tmp_path / "tokenizer.json"))
    index = prepare("synthetic:20", tokenizer=str(tmp_path / "tokenizer.json"), out=tmp_path / "out", console=QUIET)
    plain = load(str(tmp_path / "tokenizer.json"))
    assert index["tokens"] == sum(len(plain.encode(x).ids) + 1 for x in documents(20))
    assert index["tokens"] > 20 * 8


def _whole(out: Path) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not survive a fork
    module.BLOCK = 2000
    prepare("synthetic:600", tokenizer="bpe:300", out=out, shard_tokens=2000, console=QUIET)


def test_killed_again_and_again(tmp_path: Path) -> None:
    """kill -9 at random moments: the same bytes in the end, and nothing left behind."""
    fork = multiprocessing.get_context("fork")
    draw, kills, out = random.Random(1), 0, tmp_path / "cut"
    while True:
        process = fork.Process(target=_whole, args=(out,))
        before = {x.name for x in out.glob("*")}
        process.start()
        while kills < 12 and process.is_alive():
            if kills < 3 or {x.name for x in out.glob("*.bin")} - before:
                time.sleep(draw.random() * 0.05)
                process.kill()
                kills += 1
                break
            time.sleep(0.001)
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
    assert kills > 3
    whole = fork.Process(target=_whole, args=(tmp_path / "whole",))
    whole.start()
    whole.join()
    assert TokenShards(out).identity == TokenShards(tmp_path / "whole").identity
    # A process that was killed after its last write leaves its lock, and nobody needs one where all is done.
    found = {x.name for x in out.iterdir() if x.suffix != ".lock"}
    assert found == {x.name for x in (tmp_path / "whole").iterdir()}
