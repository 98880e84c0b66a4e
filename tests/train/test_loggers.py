"""Loggers get what metrics.jsonl gets, a resumed run goes on in the same run of theirs, and none can end a training."""

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from qed.cli import app
from qed.recipes import build
from qed.train.loggers import LOGGERS, LoggedRun, make, numbers
from qed.train.loop import Trainer, train

from .conftest import trained
from .test_loop import QUIET, settings
from .test_loop import numbers as metrics


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def stopped(trainer: Trainer, at: int) -> Trainer:
    """A trainer that is asked to stop after so many steps."""
    usual = trainer._step

    def step() -> object:
        trainer.stopping = trainer.step + 1 >= at
        return usual()

    trainer._step = step  # type: ignore[method-assign, assignment]
    return trainer


def killed_and_resumed(corpus: str, out: Path, name: str) -> Path:
    """A run of 30 steps that was killed after step 6, when its last checkpoint was that of step 4, and resumed."""
    config = build("mini", settings(corpus, loggers=name))
    trainer = stopped(Trainer(config, out, "cpu", QUIET), 6)
    save = trainer.save
    trainer.save = lambda: save() if trainer.step == 4 else None  # type: ignore[method-assign]
    trainer.run()
    assert train(config, out, device="cpu", console=QUIET) == 0
    return out


class Kept:
    """A logger that keeps what it is told."""

    runs: list[LoggedRun]
    calls: list[tuple[str, Any]]

    def start(self, run: LoggedRun) -> None:
        self.runs.append(run)
        self.calls.append(("start", run.id))

    def log(self, step: int, values: dict[str, Any]) -> None:
        self.calls.append(("log", {"step": step} | values))

    def finish(self) -> None:
        self.calls.append(("finish", None))


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> type[Kept]:
    Kept.runs, Kept.calls = [], []
    monkeypatch.setitem(LOGGERS, "kept", Kept)
    return Kept


def test_a_logger_gets_the_rows_of_the_file(corpus: str, whole: Path, tmp_path: Path, kept: type[Kept]) -> None:
    out = trained(corpus, tmp_path / "run", loggers="kept")
    first, *logged, last = kept.calls
    assert (first[0], last) == ("start", ("finish", None))
    assert [row for _, row in logged] == rows(out)
    (run,) = kept.runs
    assert (run.folder, run.first_step, run.steps, run.config["seed"]) == (out, 0, 30, 0)
    assert metrics(out) == metrics(whole)
    assert [list(row) for row in rows(out)] == [list(row) for row in rows(whole)]  # the file is as without loggers
    kept.calls.clear()
    assert train(build("mini", settings(corpus, loggers="kept")), out, device="cpu", console=QUIET) == 0
    assert kept.calls == []  # nothing was left to do


def test_a_resumed_run_is_the_same_run(corpus: str, tmp_path: Path, kept: type[Kept]) -> None:
    killed_and_resumed(corpus, tmp_path / "a", "kept")
    assert [run.first_step for run in kept.runs] == [0, 4]
    assert len({run.id for run in kept.runs}) == 1
    logged = [row["step"] for name, row in kept.calls if name == "log"]
    assert logged == [*range(6), *range(4, 30)]
    assert [row["step"] for row in rows(tmp_path / "a")] == list(range(30))
    other = LoggedRun({}, tmp_path, 0, 1, print)
    assert other.id not in {run.id for run in kept.runs}
    assert other.id == other.id


def test_numbers_have_names_of_one_level() -> None:
    values = {"loss": 2, "gradient_norm": None, "strength": {"0": 0.1}, "strength_by_head": {"0": [0.1, 0.2]}}
    values |= {"ranges": {"0": {"b": [0.0, 0.5, 1.0]}}}
    assert numbers(values) == {
        "loss": 2.0,
        "strength/0": 0.1,
        "strength_by_head/0/0": 0.1,
        "strength_by_head/0/1": 0.2,
        "ranges/0/b/least": 0.0,
        "ranges/0/b/mean": 0.5,
        "ranges/0/b/most": 1.0,
    }


@pytest.mark.parametrize(
    ("name", "missing", "message"),
    [
        ("wandbb", None, "expected one of jsonl, tensorboard, trackio, wandb, got 'wandbb'; the nearest is wandb"),
        ("jsonl,", None, "got ''"),
        ("tensorboard", "tensorboard", "pip install 'qed-attention[tensorboard]' installs it"),
        ("jsonl,trackio", "trackio", "loggers: trackio needs a package that cannot be imported"),
        ("wandb", "wandb", "pip install 'qed-attention[wandb]' installs it"),
    ],
)
def test_what_cannot_be_logged_is_said_before_anything_is_written(
    name: str, missing: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing is not None:
        for module in [x for x in sys.modules if x == missing or x.startswith((f"{missing}.", "torch.utils.tensorb"))]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.setitem(sys.modules, missing, None)
    call = ["train", "mini", "--out", str(tmp_path / "run"), "--set", f"loggers={name}", "--device", "cpu"]
    result = CliRunner().invoke(app, call)
    assert result.exit_code == 1
    assert message in " ".join(result.output.split())
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", ["log", "finish"])
def test_a_logger_that_fails_does_not_end_the_training(
    method: str, corpus: str, whole: Path, tmp_path: Path, kept: type[Kept], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the line is dead")

    monkeypatch.setattr(kept, method, fail)
    console = Console(record=True, quiet=False, width=200, file=(tmp_path / "said").open("w"))
    config = build("mini", settings(corpus, loggers="kept"))
    assert train(config, tmp_path / "run", device="cpu", console=console) == 0
    assert console.export_text().count("the logger kept failed and is left out from here on") == 1
    assert metrics(tmp_path / "run") == metrics(whole)


def test_a_logger_that_cannot_start_is_said_before_the_first_step(
    corpus: str, tmp_path: Path, kept: type[Kept], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no key")

    monkeypatch.setattr(kept, "start", fail)
    with pytest.raises(ValueError, match="loggers: kept cannot start: no key"):
        train(build("mini", settings(corpus, loggers="kept")), tmp_path, device="cpu", console=QUIET)
    assert rows(tmp_path) == []


def test_nothing_is_said_of_loggers_that_nobody_asked_for(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    console = Console(record=True, width=200, file=(tmp_path / "said").open("w"))
    short = settings(corpus, total_tokens="256", decay_start_tokens="128")
    assert train(build("mini", short), tmp_path / "run", device="cpu", console=console) == 0
    assert "tensorboard" not in console.export_text().lower()
    assert not (tmp_path / "run" / "tensorboard").exists()
    assert not (tmp_path / "run" / "run_id").exists()
    assert list(make("jsonl")) == ["jsonl"]


# The packages themselves, on this machine alone.


@pytest.mark.slow
def test_tensorboard(corpus: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = killed_and_resumed(corpus, tmp_path / "run", "tensorboard")
    found = EventAccumulator(str(out / "tensorboard"), purge_orphaned_data=True)
    found.Reload()
    shown = [(x.step, x.value) for x in found.Scalars("loss")]
    assert [step for step, _ in shown] == list(range(30))
    assert [value for _, value in shown] == pytest.approx([row["loss"] for row in rows(out)])


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file: after a header of 7 bytes, blocks of 32 KiB with pieces of records in them."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        whole, at = whole + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # a whole record, or the last piece of one
            yield Record.FromString(whole)
            whole = b""


@pytest.mark.slow
def test_wandb(corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    out = killed_and_resumed(corpus, tmp_path / "run", "wandb")
    files = sorted((out / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    records = [record for file in files for record in wandb_records(file)]
    begun = [x.run for x in records if x.WhichOneof("record_type") == "run"]
    assert {x.run_id for x in begun} == {(out / "run_id").read_text().strip()}
    assert {(x.display_name, x.project) for x in begun} == {("mini-qed-0", "qed")}
    logged = [x.history for x in records if x.WhichOneof("record_type") == "history"]
    assert [x.step.num for x in logged] == [*range(6), *range(4, 30)]
    losses = {x.step.num: {y.key or "/".join(y.nested_key): json.loads(y.value_json) for y in x.item} for x in logged}
    for row in rows(out):
        assert losses[row["step"]].items() >= numbers({x: y for x, y in row.items() if x == "loss"}).items()
        assert losses[row["step"]]["strength/0"] == row["strength"]["0"]


@pytest.mark.slow
def test_trackio(corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio")
    storage = pytest.importorskip("trackio.sqlite_storage")
    for name in ("TRACKIO_DIR", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "kept"))
    for module in ("trackio.utils", "trackio.sqlite_storage"):
        monkeypatch.setattr(f"{module}.TRACKIO_DIR", tmp_path / "kept", raising=False)
    out = killed_and_resumed(corpus, tmp_path / "run", "trackio")
    (name,) = storage.SQLiteStorage.get_runs("qed")
    assert name == f"mini-qed-0-{(out / 'run_id').read_text().strip()}"
    logged = storage.SQLiteStorage.get_logs("qed", name)
    assert [x["step"] for x in logged] == [*range(6), *range(4, 30)]
    assert {x["step"]: x["loss"] for x in logged} == {row["step"]: row["loss"] for row in rows(out)}
