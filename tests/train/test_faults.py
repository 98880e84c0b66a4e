"""What goes wrong around a run: damaged and stray files, changed data, another process, a closed terminal. It is
refused before anything is written, or the run goes on to the same numbers; what was saved is never lost."""

import json
import os
import pty
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from qed.analysis.results import Run
from qed.cli import app
from qed.data.prepare import prepare
from qed.locks import LockedError, held
from qed.provenance import git_state
from qed.recipes import build
from qed.train import checkpoints
from qed.train.loop import STOPPED, Trainer, train
from qed.train.metrics import read_metrics

from .test_loop import QUIET, command, numbers, settings

STATE = {"skipped": 0, "validation_loss": None}


def save(folder: Path, step: int, loss: float | None = None) -> None:
    x = {"x": torch.full((3,), float(step))}
    checkpoints.save(folder, step, x, x, STATE | {"validation_loss": loss})


def steps(folder: Path) -> list[int]:
    return sorted(int(x.name.removeprefix("step-")) for x in folder.glob("step-????????"))


def loaded(folder: Path) -> int | None:
    said: list[str] = []
    found = checkpoints.newest(folder, said.append)
    assert all("damaged, passed over" in x for x in said)
    return None if found is None else int(found.weights["x"][0])


# Checkpoints


def test_damaged_and_stray_names_do_not_push_out_new_checkpoints(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for name in ("step-99999998", "step-99999997"):
        shutil.copytree(tmp_path / "step-00000001", tmp_path / name)
        (tmp_path / name / "weights.safetensors").write_bytes(b"damaged")
    (tmp_path / "step-99999996").mkdir()
    (tmp_path / "step-99999995").write_text("a file")
    (tmp_path / "step-notanumb").mkdir()
    for step in (2, 3, 4):
        save(tmp_path, step)
        assert loaded(tmp_path) == step
    assert [x for x in steps_of_numbers(tmp_path) if x < 100] == [3, 4]


def steps_of_numbers(folder: Path) -> list[int]:
    return sorted(int(x.name[5:]) for x in folder.glob("step-*") if x.name[5:].isdigit())


def test_the_newest_two_whole_ones_and_the_best_are_kept(tmp_path: Path) -> None:
    for step, loss in ((1, 2.0), (2, 1.0), (3, 3.0), (4, float("nan")), (5, 4.0)):
        save(tmp_path, step, loss)
    assert steps(tmp_path) == [2, 4, 5]
    (tmp_path / "step-00000005" / "state.json").write_text("null")
    save(tmp_path, 6, 5.0)
    save(tmp_path, 7, None)
    assert steps(tmp_path) == [2, 5, 6, 7]  # the damaged one is nobody's; it is not counted
    assert loaded(tmp_path) == 7


def test_what_is_kept_is_verified_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of old checkpoints are not made again at every save."""
    for step in range(3):
        save(tmp_path, step)
    checkpoints._sound.clear()  # a new process
    summed: list[str] = []
    usual = checkpoints._sum
    monkeypatch.setattr(checkpoints, "_sum", lambda file: (summed.append(file.parent.name), usual(file))[1])
    save(tmp_path, 3)
    assert {x for x in summed if not x.endswith(".part")} == {"step-00000001", "step-00000002"}
    summed.clear()
    save(tmp_path, 4)
    assert {x for x in summed if not x.endswith(".part")} == set()


@pytest.mark.parametrize("file", ["sums.json", "state.json"])
@pytest.mark.parametrize("content", [b"{}", b"[]", b"null", b"3", b'"x"', b"", b"\x00\xff", b"[" * 100_000, None])
def test_a_checkpoint_without_its_sums_or_state_is_passed_over(
    file: str, content: bytes | None, tmp_path: Path
) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    if content is None:
        (tmp_path / "step-00000002" / file).unlink()
    else:
        (tmp_path / "step-00000002" / file).write_bytes(content)
    assert loaded(tmp_path) == 1
    save(tmp_path, 3)
    assert {1, 3} <= set(steps(tmp_path))


def test_sums_of_some_files_alone_verify_nothing(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    sums = tmp_path / "step-00000002" / "sums.json"
    found = json.loads(sums.read_text())
    for missing in found:
        sums.write_text(json.dumps({name: x for name, x in found.items() if name != missing}))
        assert loaded(tmp_path) == 1
    sums.write_text(json.dumps(found))
    assert loaded(tmp_path) == 2


def test_something_in_the_way_of_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "step-00000001").write_text("a file")
    (tmp_path / "kept").mkdir()
    (tmp_path / "step-00000002").symlink_to(tmp_path / "kept")
    (tmp_path / "step-00000001.part").mkdir()
    for step in (1, 2):
        save(tmp_path, step)
        assert loaded(tmp_path) == step
    assert (tmp_path / "kept").is_dir()
    assert not list(tmp_path.glob("*.part"))


# Data


@pytest.fixture
def own(corpus: str, tmp_path: Path) -> Path:
    """A corpus that a test may change."""
    return Path(shutil.copytree(corpus, tmp_path / "own"))


@pytest.mark.parametrize("which", ["data", "validation"])
def test_changed_data_is_noticed(which: str, corpus: str, own: Path, tmp_path: Path) -> None:
    config = build("mini", settings(corpus, total_tokens="3840", **{which: str(own)}))
    Trainer(config, tmp_path / "run", "cpu", QUIET).save()
    before = json.loads((tmp_path / "run" / "config.json").read_text())
    shutil.rmtree(own)
    prepare("synthetic:100:7", tokenizer=str(Path(corpus) / "tokenizer.json"), out=own, console=QUIET)
    with pytest.raises(ValueError, match=rf"{which}: .* has changed since the run began") as caught:
        Trainer(config, tmp_path / "run", "cpu", QUIET)
    kept = before.pop("identities")
    assert kept[which] in str(caught.value)
    assert str(caught.value).count(" identity ") == 1
    (tmp_path / "run" / "config.json").write_text(json.dumps(before))  # as older versions wrote it
    assert Trainer(config, tmp_path / "run", "cpu", QUIET).step == 0


def test_inputs_are_checked_before_anything_is_written(corpus: str, own: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    prepare("synthetic:100", tokenizer="bpe:290", out=other, console=QUIET)
    short = tmp_path / "short"
    prepare("synthetic:1", tokenizer=str(own / "tokenizer.json"), out=short, console=QUIET)
    (own / "index.json").write_text("[]")
    for changes, message in (
        ({"validation": "/nowhere"}, "/nowhere: expected what `qed prepare` finished"),
        ({"validation": str(other)}, "validation: expected tokens of the same tokenizer as"),
        (
            {"validation": str(short), "sequence": "512", "batch_tokens": "512", "micro_tokens": "512"},
            "validation: expec",
        ),
        ({"data": str(own)}, "own: this version reads shards of format 1"),
    ):
        out = tmp_path / "run"
        with pytest.raises(ValueError, match=message):
            train(build("mini", settings(corpus, **changes)), out, device="cpu", console=QUIET)
        assert not out.exists(), changes
    with pytest.raises(Exception, match=r"(?i)device"):
        train(build("mini", settings(corpus)), out, device="gpu", console=QUIET)
    assert not out.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"log_every": "0"}, "log_every: expected 1 or more, got 0"),
        ({"total_tokens": "abc"}, "total_tokens: expected a whole number, got 'abc'"),
        ({"betas": "5"}, "betas: expected two numbers, such as .*, got 5"),
        ({"betas": "[1, 2, 3]"}, r"betas: expected two numbers, .*, got \(1, 2, 3\)"),
        ({"betas": "[0.9, 1]"}, "betas: expected two numbers from 0 to below 1"),
        ({"seed": "-1"}, "seed: expected a number from 0 to .*, got -1"),
        ({"seed": "one"}, "seed: expected a whole number, got 'one'"),
        ({"compile": "yes"}, "compile: expected true or false, got 'yes'"),
        ({"sequence": "true"}, "sequence: expected a whole number, got True"),
        ({"sequence": "1.5"}, "sequence: expected a whole number, got 1.5"),
        ({"learning_rate": "NaN"}, "learning_rate: expected a number, got nan"),
        ({"learning_rate": "-1"}, "learning_rate: expected 0 or more, got -1"),
        ({"weight_decay": "null"}, "weight_decay: expected a number, got None"),
        ({"clip": "0"}, "clip: expected .* or more, got 0"),
        ({"total_tokens": "1" + "0" * 400}, "total_tokens: expected a whole number"),
        ({"save_every": "[" * 100_000}, "save_every: expected a whole number"),
        ({"precision": "16"}, "precision: expected bfloat16 or float32, got '16'"),
    ],
)
def test_settings_of_the_wrong_kind(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build("mini", {"data": "x"} | changes)


def test_whole_numbers_may_be_written_in_any_way() -> None:
    assert build("mini", {"data": "x", "log_every": "1e2", "learning_rate": "1"}).log_every == 100


# Metrics

JUNK = [b"\x00" * 40, b"\xff\xfe binary", b"null", b"[1]", b'{"step": "3"}', b'{"step": 3, "loss": "x"}', b'{"ste']
JUNK += [b'{"step": true}', b'{"loss": 1.0}', b'{"step": 4, "strength": 3}', b"[" * 100_000, b'{"step": -1}']


def test_the_rest_of_damaged_metrics_is_used(tmp_path: Path) -> None:
    rows = [b'{"step": %d, "loss": 1.5, "validation_loss": null}' % i for i in range(len(JUNK))]
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\n".join(x for pair in zip(rows, JUNK, strict=True) for x in pair))
    found, problems = read_metrics(path)
    assert [row["step"] for row in found] == list(range(len(JUNK)))
    assert [int(x.split(":")[1]) for x in problems] == list(range(2, 2 * len(JUNK) + 1, 2))
    run = Run(tmp_path)
    assert len(run.metrics) == len(JUNK)
    assert "metrics.jsonl:2: a damaged line is left out" in run._problems[0]


def test_a_run_goes_on_over_damaged_metrics(corpus: str, whole: Path, tmp_path: Path) -> None:
    config = build("mini", settings(corpus))
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    shutil.rmtree(out / "export")
    for step in (28, 30):
        shutil.rmtree(out / "checkpoints" / f"step-{step:08d}")
    lines = (out / "metrics.jsonl").read_bytes().splitlines()
    (out / "metrics.jsonl").write_bytes(b"\n".join([*lines[:3], *JUNK, *lines[3:]]) + b"\n")
    console = Console(record=True, width=400, file=open(os.devnull, "w"))  # noqa: SIM115
    assert train(config, out, device="cpu", console=console) == 0
    assert numbers(out) == numbers(whole)
    assert "metrics.jsonl:4: a damaged line is left out" in console.export_text()


# Processes


def test_a_second_process_is_refused(corpus: str, tmp_path: Path) -> None:
    config = build("mini", settings(corpus))
    with held(tmp_path, "train"), pytest.raises(LockedError, match=rf"process {os.getpid()} on .* is at work there"):
        train(config, tmp_path, device="cpu", console=QUIET)
    assert not list(tmp_path.iterdir())


def test_without_git(corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state() == ""
    assert Trainer(build("mini", settings(corpus)), tmp_path / "run", "cpu", QUIET).step == 0


def stopped_and_going_on(corpus: str, out: Path, whole: Path) -> None:
    """A checkpoint of the very step at which it stopped; and the rest is what it would have been."""
    found = checkpoints.newest(out / "checkpoints")
    assert found is not None
    assert found.state["step"] == len((out / "metrics.jsonl").read_text().splitlines())
    assert 0 < found.state["step"] < 30
    config = build("mini", settings(corpus))
    assert train(config, out, device="cpu", console=QUIET) == 0
    assert numbers(out) == numbers(whole)


@pytest.mark.slow
def test_a_closed_pipe_saves(corpus: str, whole: Path, tmp_path: Path) -> None:
    """`qed train … | head -1`."""
    process = subprocess.Popen(command(corpus, tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read().decode()
    assert process.wait() == STOPPED, errors
    assert "Traceback" not in errors
    assert "BrokenPipe" not in errors
    stopped_and_going_on(corpus, tmp_path, whole)


@pytest.mark.slow
def test_a_closed_terminal_saves(corpus: str, whole: Path, tmp_path: Path) -> None:
    """SIGHUP, and a terminal that nothing can be written to any more."""
    master, slave = pty.openpty()
    process = subprocess.Popen(command(corpus, tmp_path), stdout=slave, stderr=subprocess.PIPE)
    os.close(slave)
    metrics = tmp_path / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_bytes()):  # before its first step there is nothing to save
        assert process.poll() is None
        time.sleep(0.005)
    os.close(master)
    process.send_signal(signal.SIGHUP)
    assert process.stderr is not None
    errors = process.stderr.read().decode()
    assert process.wait() == STOPPED, errors
    assert "Traceback" not in errors
    stopped_and_going_on(corpus, tmp_path, whole)


def test_nohup_goes_on(corpus: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Trainer._step
    monkeypatch.setattr(Trainer, "_step", lambda self: (os.kill(os.getpid(), signal.SIGHUP), usual(self))[1])
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert train(build("mini", settings(corpus)), tmp_path, device="cpu", console=QUIET) == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    assert numbers(tmp_path) == numbers(whole)


def test_on_the_command_line(corpus: str, tmp_path: Path) -> None:
    for change, message in (
        ({"log_every": "0"}, "log_every: expected 1 or more, got 0"),
        ({"validation": "/nowhere"}, "/nowhere: expected what `qed prepare` finished"),
    ):
        options = [word for name, x in (settings(corpus) | change).items() for word in ("--set", f"{name}={x}")]
        failed = CliRunner().invoke(app, ["train", "mini", "--out", str(tmp_path / "y"), *options])
        assert failed.exit_code == 1
        assert message in " ".join(failed.output.split())
        assert not (tmp_path / "y").exists()
