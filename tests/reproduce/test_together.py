"""Several processes over one folder: what they share is made once, each training by one; and how all of it stops."""

import multiprocessing
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from qed import locks
from qed.cli import app
from qed.data import TokenShards
from qed.locks import held
from qed.reproduce import run
from qed.reproduce.plan import Files, Plan, small
from qed.train.loop import STOPPED

from .test_reproduce import go, tiny

QUIET = Console(quiet=True)
FORK = multiprocessing.get_context("fork")


def least() -> Plan:
    return tiny(source="synthetic:60", lengths=(64,), samples=2)


def _share(out: Path, start: float) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not survive a fork
    locks.PAUSE = 0.02
    time.sleep(max(0, start - time.time()))
    run.share(least(), out, QUIET)


@pytest.mark.slow
def test_what_is_shared_is_made_once_by_processes_started_together(tmp_path: Path) -> None:
    """Twenty times four at once; in every other attempt one of them is killed on the way."""
    draw, identities = random.Random(0), set()
    for attempt in range(20):
        out, start = tmp_path / str(attempt), time.time() + 0.05
        processes = [FORK.Process(target=_share, args=(out, start)) for _ in range(4)]
        for process in processes:
            process.start()
        killed = processes[:1] if attempt % 2 else []
        for process in killed:
            time.sleep(0.05 + draw.random() * 0.1)
            process.kill()
        for process in processes:
            process.join()
        if killed:  # it may have been the last one to come; whoever comes next clears away what it left
            processes.append(FORK.Process(target=_share, args=(out, start)))
            processes[-1].start()
            processes[-1].join()
        assert {process.exitcode for process in processes if process not in killed} == {0}
        identities.add((TokenShards(out / "data").identity, TokenShards(out / "validation").identity))
        left = {x.name for x in out.iterdir()}
        assert left == {"plan.json", "data", "validation", "prompts"}
        assert {".jsonl", ".npz"} <= {x.suffix for x in (out / "prompts").iterdir()} <= {".jsonl", ".npz", ".json"}
    assert len(identities) == 1


@pytest.mark.slow
def test_a_training_is_left_to_whoever_has_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with held(out / "runs" / "gdn2-0", "unit"):
        status, said = go(tiny(arms=("gdn2",), lengths=(64,)), out)
    assert status in (STOPPED, run.FAILED)  # nothing is there to report on yet
    assert f"gdn2-0 is left to another process: {out / 'runs' / 'gdn2-0'}: process {os.getpid()} on" in said
    assert "failed" not in said


@pytest.mark.parametrize("cause", ["closed", "hung up"])
def test_trainings_save_when_nobody_watches_any_more(
    cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A closed pipe, which makes rich leave the program, or a closed terminal: trainings are stopped, not killed."""
    plan = tiny()
    units = run.Units(plan, tmp_path, "cpu", 1, QUIET)

    def start(self: run.Units, unit: Any) -> None:
        script = (
            f"trap 'sleep 0.3; touch {tmp_path}/saved; exit {STOPPED}' TERM; touch {tmp_path}/ready; sleep 60 & wait"
        )
        self.running[unit] = subprocess.Popen(["bash", "-c", script])
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)

    def update(*_: Any) -> None:
        if cause == "closed":
            raise SystemExit(1)
        if not units.stopping:
            os.kill(os.getpid(), signal.SIGHUP)

    monkeypatch.setattr(run.Units, "start", start)
    monkeypatch.setattr(run.Board, "update", update)
    assert units.run(plan.units[:1], None) == []
    assert units.stopping
    assert (tmp_path / "saved").exists()


def test_everything_is_checked_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.jsonl").write_text('{"text": "some words"}\n')
    out = tmp_path / "new" / "out"
    for plan, message in (
        (tiny(source="nowhere.jsonl"), "which does not exist"),
        (tiny(validation="nowhere.jsonl"), "which does not exist"),
        (tiny(tokenizer="nothing.model"), "no such file"),
        (small(Files(corpus="x.jsonl", essays="essays.json")), "--essays: expected a file, got essays.json"),
        (small(Files(corpus="x.jsonl", words="words")), "--words: expected a file, got words"),
        (small(Files(corpus="x.jsonl", recall={"fda": "fda.jsonl"})), "--data fda: expected a file, got fda.jsonl"),
    ):
        with pytest.raises(ValueError, match=message):
            run.reproduce(plan, out, device="cpu", jobs=1, only=[], minutes=None, console=QUIET)
        assert not out.parent.exists(), message
    with pytest.raises(ValueError, match="log_every: expected 1 or more, got 0"):
        tiny(changes={"log_every": "0"})


def test_bad_seeds_and_places(tmp_path: Path) -> None:
    def said(*arguments: object) -> str:
        result = CliRunner().invoke(app, ["reproduce", *map(str, arguments)])
        assert result.exit_code == 1, result.output
        return " ".join(result.output.split())

    assert "--seeds: expected numbers from 0 to 4294967295, got -1" in said("--seeds", "-1", "--out", tmp_path / "x")
    assert "--seeds: expected one or more, each once, got [0, 0]" in said("--seeds", "0,0", "--out", tmp_path / "x")
    assert "--arms: expected one or more, each once" in said("--arms", "qed,qed", "--out", tmp_path / "x")
    (tmp_path / "file").write_text("")
    assert "--out: expected a path below folders" in said("--out", tmp_path / "file" / "x")
    (tmp_path / "y").mkdir()
    (tmp_path / "y" / "plan.json").write_text("[]")
    assert "expected the plan of a reproduction, got []" in said("--out", tmp_path / "y")
    assert not (tmp_path / "x").exists()
