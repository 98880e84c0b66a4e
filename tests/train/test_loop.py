"""Nothing is lost: killed, stopped, damaged or out of disk, a run goes on to the same numbers, bit for bit."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from qed import QEDForCausalLM
from qed.cli import app
from qed.recipes import build
from qed.train import checkpoints
from qed.train.loop import STOPPED, Diverged, Trainer, train

QUIET = Console(quiet=True)
SHORT = {
    "sequence": "32", "batch_tokens": "128", "micro_tokens": "64", "total_tokens": "3840", "decay_start_tokens": "2560",
    "save_every": "4", "validate_every": "10", "validation_tokens": "256", "model.hidden_size": "16",
    "model.head_dim": "8", "model.intermediate_size": "32",
}  # fmt: skip


def settings(corpus: str, **changes: str) -> dict[str, str]:
    return SHORT | {"data": corpus, "validation": corpus} | changes


def numbers(out: Path) -> list[tuple[object, ...]]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    fields = ("step", "tokens", "loss", "learning_rate", "gradient_norm", "validation_loss", "strength")
    return [tuple(json.dumps(row.get(name)) for name in fields) for row in rows]


def test_it_learns_and_writes_what_it_should(whole: Path) -> None:
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(30))
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.5
    assert rows[-1]["validation_loss"] < rows[9]["validation_loss"]
    assert set(rows[0]["strength"]) == {"0", "1"}
    for layer in rows[9]["ranges"].values():
        assert 0 < layer["b"][0] <= layer["b"][1] <= layer["b"][2] < 1
        assert 0 <= layer["decay"][0] <= layer["decay"][2] <= 1
        assert -1 < layer["eigenvalue"][0] <= layer["eigenvalue"][2] < 1
    about = json.loads((whole / "config.json").read_text())
    assert about["config"]["seed"] == 0
    assert torch.__version__.startswith(about["environment"]["torch"])  # builds add "+cu130" and the like
    kept = sorted(x.name for x in (whole / "checkpoints").iterdir())
    assert kept[-2:] == ["step-00000028", "step-00000030"]
    assert len(kept) <= 3
    model = QEDForCausalLM.from_pretrained(whole / "export")
    last = checkpoints.newest(whole / "checkpoints")
    assert last is not None
    for name, x in last.weights.items():
        assert torch.equal(model.state_dict()[name], x), name
    assert (whole / "export" / "tokenizer.json").exists()


def test_pieces_add_up_to_the_batch(corpus: str, whole: Path, tmp_path: Path) -> None:
    """Four rows at once or one at a time: the same gradients but for the order of sums."""
    train(
        build("mini", settings(corpus, micro_tokens="32", total_tokens="640", decay_start_tokens="640")),
        tmp_path,
        device="cpu",
        console=QUIET,
    )
    pairs = zip(numbers(tmp_path)[:1], numbers(whole)[:1], strict=True)
    for found, truth in pairs:
        assert float(found[2]) == pytest.approx(float(truth[2]), rel=1e-6)
        assert float(found[4]) == pytest.approx(float(truth[4]), rel=1e-4)


def test_stopped_anywhere_goes_on_bit_for_bit(corpus: str, whole: Path, tmp_path: Path) -> None:
    config = build("mini", settings(corpus))
    for stop_at in (3, 4, 17):
        trainer = Trainer(config, tmp_path, "cpu", QUIET)
        taken = trainer._step

        def step(trainer: Trainer = trainer, taken: object = taken, stop_at: int = stop_at) -> object:
            trainer.stopping = trainer.step + 1 >= stop_at
            return taken()

        trainer._step = step
        trainer.run()
        assert trainer.step == stop_at
    assert train(config, tmp_path, device="cpu", console=QUIET) == 0
    assert numbers(tmp_path) == numbers(whole)


def command(corpus: str, out: Path) -> list[str]:
    options = [word for name, x in settings(corpus).items() for word in ("--set", f"{name}={x}")]
    code = "import torch; torch.set_num_threads(1); from qed.cli import app; app()"
    return [sys.executable, "-c", code, "train", "mini", "--out", str(out), "--device", "cpu", *options]


@pytest.mark.slow
def test_killed_again_and_again(corpus: str, whole: Path, tmp_path: Path) -> None:
    """kill -9 at random moments, during saves too, until it ends: the same numbers as if nothing had happened."""
    draw, kills = random.Random(0), 0
    while True:
        process = subprocess.Popen(command(corpus, tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        folder, before = tmp_path / "checkpoints", {x.name for x in (tmp_path / "checkpoints").glob("*")}
        while kills < 4 and process.poll() is None:
            # Let it get past its first save of this life, or right into the middle of one.
            now = {x.name for x in folder.glob("*")} if folder.exists() else set()
            if now - before:
                time.sleep(draw.random() * 0.05)
                process.send_signal(signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.001)
        _, errors = process.communicate()
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, errors.decode()
    assert kills == 4
    assert numbers(tmp_path) == numbers(whole)


@pytest.mark.slow
def test_sigterm_saves_and_says_it_can_go_on(corpus: str, whole: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(command(corpus, tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "metrics.jsonl"
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 2):
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    said, errors = process.communicate()
    if process.returncode != 0:  # it may have been done already
        assert process.returncode == STOPPED, errors
        found = checkpoints.newest(tmp_path / "checkpoints")
        assert found is not None
        assert said.splitlines()[-1] == f"saved at step {found.state['step']}; the same command resumes"
        assert found.state["step"] == len(metrics.read_text().splitlines())
    assert subprocess.run(command(corpus, tmp_path), capture_output=True).returncode == 0
    assert numbers(tmp_path) == numbers(whole)


def test_a_damaged_checkpoint_is_passed_over(corpus: str, whole: Path, tmp_path: Path) -> None:
    config = build("mini", settings(corpus))
    trainer = Trainer(config, tmp_path, "cpu", QUIET)
    while trainer.step < 8:
        trainer._step()
        trainer.step += 1
        if trainer.step % 4 == 0:
            trainer.save()
    newest = tmp_path / "checkpoints" / "step-00000008" / "weights.safetensors"
    data = bytearray(newest.read_bytes())
    data[-1] ^= 1
    newest.write_bytes(data)
    console = Console(record=True, width=300, file=open(os.devnull, "w"))  # noqa: SIM115
    again = Trainer(config, tmp_path, "cpu", console)
    assert again.step == 4
    assert "step-00000008: damaged, passed over: weights.safetensors is not what was written" in console.export_text()


def test_a_full_disk_leaves_the_checkpoint_before(corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    config = build("mini", settings(corpus))
    trainer = Trainer(config, tmp_path, "cpu", QUIET)
    trainer.save()
    trainer._step()
    trainer.step += 1
    monkeypatch.setattr(checkpoints, "save_file", full)
    with pytest.raises(OSError, match=r"could not be saved, the checkpoint before is whole: .*No space left"):
        trainer.save()
    found = checkpoints.newest(tmp_path / "checkpoints")
    assert found is not None
    assert found.state["step"] == 0
    assert [x.name for x in (tmp_path / "checkpoints").iterdir()] == ["step-00000000"]


def test_steps_without_a_finite_gradient(corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = build("mini", settings(corpus, stop_after_skipped="3"))
    trainer = Trainer(config, tmp_path, "cpu", QUIET)
    usual, before = trainer._loss, {name: x.clone() for name, x in trainer.model.named_parameters()}
    monkeypatch.setattr(trainer, "_loss", lambda rows: usual(rows) * float("nan"))
    assert trainer._step()[2] is False
    for name, x in trainer.model.named_parameters():
        assert torch.equal(x, before[name]), name
    with pytest.raises(Diverged, match=r"3 steps in a row without a finite gradient; see .*diverged-00000002"):
        trainer.run()
    folder = tmp_path / "diverged-00000002"
    assert {x.name for x in folder.iterdir()} == {"batch.safetensors", "ranges.json", "replay.txt"}
    words = (folder / "replay.txt").read_text().split()
    again = CliRunner().invoke(app, [*words[1:], "--device", "cpu"])
    assert again.exit_code == 0, again.output
    assert "layer 1" in again.output
    wrong = CliRunner().invoke(app, ["replay", str(tmp_path), "--device", "cpu"])
    assert wrong.exit_code == 1
    assert "expected a diverged-… folder" in " ".join(wrong.output.split())
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["skipped"] for row in rows] == [1, 2, 3]


def test_weights_that_are_not_finite_stop_a_run_in_the_same_way(corpus: str, tmp_path: Path) -> None:
    trainer = Trainer(build("mini", settings(corpus, stop_after_skipped="3")), tmp_path, "cpu", QUIET)
    with torch.no_grad():
        trainer.model.model.layers[0].mixer.dt_bias[0] = float("nan")
    with pytest.raises(Diverged, match="3 steps in a row without a finite gradient"):
        trainer.run()


def test_another_run_is_not_continued(corpus: str, whole: Path) -> None:
    with pytest.raises(ValueError, match="holds a run with another learning_rate, name, seed"):
        Trainer(build("mini", settings(corpus, seed="1", learning_rate="0.1")), whole, "cpu", QUIET)


def test_on_the_command_line(corpus: str, tmp_path: Path) -> None:
    options = [word for name, x in settings(corpus).items() for word in ("--set", f"{name}={x}")]
    plan = CliRunner().invoke(app, ["train", "mini", "--out", str(tmp_path / "x"), "--dry-run", *options])
    assert plan.exit_code == 0, plan.output
    assert "parameters" in plan.output
    assert not (tmp_path / "x").exists()
    bad = CliRunner().invoke(app, ["train", "mini", "--out", str(tmp_path / "y"), *options, "--set", "seed"])
    assert bad.exit_code == 1
    assert "--set: expected field=value, got 'seed'" in " ".join(bad.output.split())
    for change, message in (
        ({"data": "/nowhere"}, "expected what `qed prepare` finished"),
        ({"model.vocab_size": "100"}, "expected at least the corpus's 300, got 100"),
    ):
        changed = [word for name, x in (settings(corpus) | change).items() for word in ("--set", f"{name}={x}")]
        failed = CliRunner().invoke(app, ["train", "mini", "--out", str(tmp_path / "y"), *changed])
        assert failed.exit_code == 1
        assert message in " ".join(failed.output.split())
        assert not (tmp_path / "y").exists()
