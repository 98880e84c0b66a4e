"""kill −9 at random moments of a training run, until it ends: the same bits as if nothing had happened.

Python's fork server imports torch and this package once; every life of the run is then a fork of it, which starts in
milliseconds. The server itself never trains, since autograd's threads do not survive a fork.
"""

import multiprocessing
import time
from functools import cache
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from qed.train.config import TrainConfig

from . import training
from .drawing import Draw

KILLS = 5  # of one case
STEPS = 40
LONGEST_LIFE = 8  # steps after which a life ends at the latest, so that a run has several
PATIENCE_S = 120


@cache
def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.attack.training"])
    return context


@cache
def _whole() -> Path:
    """A run that nothing happened to, in a process like those that will be killed."""
    out = training.scratch() / "never-killed"
    life = _life(training.config(STEPS), out)
    life.join(PATIENCE_S)
    assert life.exitcode == 0, f"a run that nothing happened to ended with status {life.exitcode}"
    return out


def _life(config: TrainConfig, out: Path) -> BaseProcess:
    process = _server().Process(target=training.finish, args=(out, config))
    process.start()
    return process


def _lines(out: Path) -> int:
    try:
        return (out / "metrics.jsonl").read_bytes().count(b"\n")
    except OSError:
        return 0


def _wait(draw: Draw, life: BaseProcess, out: Path) -> None:
    """For a random moment: while it starts, after some steps, or in the middle of a save."""
    if draw.chance(0.2):
        life.join(draw.uniform_seconds(0.3))
        return
    before, steps = _lines(out), draw.randint(1, LONGEST_LIFE)
    end = time.monotonic() + PATIENCE_S
    # A life first drops the lines after its checkpoint: what counts is how many there are beyond the least seen.
    while life.is_alive() and _lines(out) - before < steps and time.monotonic() < end:
        before = min(before, _lines(out))
        time.sleep(0.001)
    life.join(draw.uniform_seconds(0.03))


def kill(seed: int) -> None:
    """Killed at random moments and begun again until it ends, a run has the losses and weights of one never killed."""
    draw = Draw("kill", seed)
    config, truth, kills = training.config(STEPS), _whole(), 0
    # A run may end before it was killed often enough; then another one is begun.
    while kills < KILLS:
        with training.workplace() as place:
            out = place / "run"
            while True:
                life = _life(config, out)
                if kills < KILLS:
                    _wait(draw, life, out)
                    if life.is_alive():
                        life.kill()
                life.join(PATIENCE_S)
                if life.exitcode == 0:
                    break
                assert life.exitcode == -9, f"after {kills} kills a life ended with status {life.exitcode}"
                kills += 1
            assert training.numbers(out) == training.numbers(truth), f"other losses after {kills} kills"
            training.same_end(out, truth, STEPS)
