"""Files are whole or not there, have the permissions of plain ones, and are never written through a link."""

import lzma
import os
import stat
from pathlib import Path

import pytest
from rich.console import Console

from qed import files
from qed.data.prepare import prepare
from qed.recipes import build
from qed.train.loop import train

QUIET = Console(quiet=True)
SHORT = {
    "sequence": "16", "batch_tokens": "32", "micro_tokens": "32", "total_tokens": "64", "decay_start_tokens": "64",
    "validate_every": "1", "validation_tokens": "32", "model.hidden_size": "16", "model.head_dim": "8",
    "model.intermediate_size": "16",
}  # fmt: skip


@pytest.fixture
def umask() -> None:
    before = os.umask(0o027)
    yield
    os.umask(before)


def test_everything_a_run_writes_has_plain_permissions(umask: None, tmp_path: Path) -> None:
    """Some libraries write through private files, which nobody else of a group could read afterwards."""
    data = tmp_path / "data"
    prepare("synthetic:40", tokenizer="bpe:300", out=data, console=QUIET)
    config = build("mini", SHORT | {"data": str(data), "validation": str(data)})
    assert train(config, tmp_path / "run", device="cpu", console=QUIET) == 0
    found = [x for x in tmp_path.rglob("*") if x.is_file()]
    assert {"weights.safetensors", "model.safetensors", "metrics.jsonl", "index.json"} <= {x.name for x in found}
    assert {str(x.relative_to(tmp_path)): oct(stat.S_IMODE(x.stat().st_mode)) for x in found} == {
        str(x.relative_to(tmp_path)): "0o640" for x in found
    }
    assert not [x for x in tmp_path.rglob("*") if x.name.endswith((files.PART, ".lock"))]


def test_parts_do_not_follow_links(tmp_path: Path) -> None:
    """Whatever lies under the other names, files or folders, that a run writes first."""
    victim, data, run = tmp_path / "victim", tmp_path / "data", tmp_path / "run"
    victim.mkdir()
    (victim / "kept").write_text("kept")
    for folder in (data, run / "checkpoints"):
        folder.mkdir(parents=True)
    for name in ("tokens-00000.bin", "starts-00000.bin", "tokenizer.json", "index.json"):
        (data / f"{name}.part").symlink_to(victim / "kept")
    prepare("synthetic:40", tokenizer="bpe:300", out=data, console=QUIET)
    for name in ("config.json.part", "config.part", "metrics.part", "metrics.jsonl.part"):
        (run / name).symlink_to(victim / "kept")
    (run / "export.part").symlink_to(victim)
    (run / "checkpoints" / "step-00000002.part").symlink_to(victim)
    config = build("mini", SHORT | {"data": str(data)})
    assert train(config, run, device="cpu", console=QUIET) == 0
    assert {x.name: x.read_text() for x in victim.iterdir()} == {"kept": "kept"}
    assert (run / "export" / "model.safetensors").exists()
    assert not (run / "export").is_symlink()


def test_a_block_that_raises_leaves_what_was_there(tmp_path: Path) -> None:
    files.write_text(tmp_path / "x", "before")
    with pytest.raises(TypeError), files.replacing(tmp_path / "x") as file:
        file.writelines([b"half", 3])
    assert [(x.name, x.read_text()) for x in tmp_path.iterdir()] == [("x", "before")]


@pytest.mark.parametrize("content", [b"", b"\xff", b"{", b"[" * 100_000, b"\x00" * 10])
def test_what_is_no_json(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"x\.json: expected JSON"):
        files.read_json(tmp_path / "x.json")


def test_what_is_no_result(tmp_path: Path) -> None:
    """With words for what a file should be, whatever is wrong with it is one kind of error, which says them."""
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "damaged.json.xz").write_bytes(lzma.compress(b"{}")[:-5])
    for name in ("list.json", "damaged.json.xz", "missing.json", "."):
        with pytest.raises(ValueError, match="expected a result, got"):
            files.read_json(tmp_path / name, "a result")
    with pytest.raises(OSError, match=r"missing\.json"):
        files.read_json(tmp_path / "missing.json")
    (tmp_path / "whole.json.xz").write_bytes(lzma.compress(b'{"a": 1}'))
    assert files.read_json(tmp_path / "whole.json.xz", "a result") == {"a": 1}
    assert files.read_json(tmp_path / "list.json") == []
