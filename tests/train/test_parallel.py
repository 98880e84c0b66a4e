"""Two processes (gloo, on CPU) train what one trains, and either goes on from the other's checkpoint."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qed.train.parallel import Gradients
from tests.marks import slow

from .test_loop import command

Rows = list[dict[str, object]]


def torchrun(processes: int) -> list[str]:
    start = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--master-port=0"]
    return [*start, "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]


def run(
    corpus: str,
    out: Path,
    processes: int,
    parallel: str = "ddp",
    stop_at: int | None = None,
    context: int = 1,
    die_at: int | None = None,
    optimizer: str = "adamw",
    by_torchrun: bool = False,
) -> Rows:
    """The metrics after `processes` processes have run to the end, or to a step and a save there. `die_at`: one process
    is killed before that step, once, and torchrun starts all again. `by_torchrun`: start a single process by it too."""
    words = [*command(corpus, out)[3:], "--set", f"parallel={parallel}", "--set", f"context={context}"]
    words += ["--set", f"optimizer={optimizer}"]
    stop = (
        ""
        if stop_at is None
        else f"""
from qed.train.loop import Trainer
taken = Trainer._step
def step(self):
    self.stopping = self.step + 1 >= {stop_at}
    return taken(self)
Trainer._step = step
"""
    )
    if die_at is not None:
        stop = f"""
import os, pathlib, signal
from qed.train.loop import Trainer
taken, mark = Trainer._step, pathlib.Path({str(out.parent / "died")!r})
def step(self):
    if self.step == {die_at} and self.parallel.rank == 1 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return taken(self)
Trainer._step = step
"""
    script = out.parent / f"script-{processes}-{stop_at}.py"
    script.write_text(f"import torch\ntorch.set_num_threads(1)\n{stop}\nfrom qed.cli import app\napp()\n")
    restarts = f"--max-restarts={int(die_at is not None)}"
    start = [*torchrun(processes), restarts] if processes > 1 or by_torchrun else [sys.executable]
    done = subprocess.run(
        [*start, str(script), *words], capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0 or stop_at is not None, done.stderr[-3000:]
    return rows_of(out)


def rows_of(out: Path) -> Rows:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def close(found: Rows, truth: Rows) -> None:
    assert [row["step"] for row in found] == [row["step"] for row in truth]
    for a, b in zip(found, truth, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4), a["step"]
        assert a["gradient_norm"] == pytest.approx(b["gradient_norm"], rel=1e-2), a["step"]
        assert a.get("validation_loss", 0) == pytest.approx(b.get("validation_loss", 0), rel=1e-4), a["step"]


@pytest.fixture(scope="module")
def alone(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    return run(corpus, tmp_path_factory.mktemp("alone") / "run", 1)


@pytest.mark.parametrize("parallel", slow("ddp", "fsdp"))
def test_two_processes_are_one(parallel: str, corpus: str, alone: Rows, tmp_path: Path) -> None:
    close(run(corpus, tmp_path / "run", 2, parallel), alone)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_world_of_one_is_one(parallel: str, corpus: str, alone: Rows, tmp_path: Path) -> None:
    """A single process under torchrun exchanges gradients with itself, to the same numbers."""
    found = run(corpus, tmp_path / "run", 1, parallel, by_torchrun=True)
    assert [(row["loss"], row["gradient_norm"]) for row in found] == [
        (row["loss"], row["gradient_norm"]) for row in alone
    ]


def test_a_gradient_that_was_put_elsewhere_is_refused() -> None:
    layer = torch.nn.Linear(3, 2)
    gradients = Gradients(layer.parameters())
    layer(torch.ones(1, 3)).sum().backward()
    assert gradients.whole.sum() == 2 * 3 + 2  # a gradient of 1 for every weight and bias
    layer.zero_grad()  # to None
    with pytest.raises(RuntimeError, match="gradient has been replaced"):
        gradients.sum()


def test_processes_join_again(tmp_path: Path) -> None:
    """For one training after the other, while another process is still in the first; torchrun's store has the addresses
    of both."""
    script = tmp_path / "script.py"
    script.write_text("""
import time
from qed.train.parallel import Parallel
for _ in range(2):
    parallel = Parallel("ddp", "cpu")
    assert parallel.any(parallel.rank == 1)
    time.sleep(0 if parallel.rank else 1)
    parallel.close()
""")
    subprocess.run([*torchrun(2), str(script)], check=True, timeout=100, env=os.environ | {"OMP_NUM_THREADS": "1"})


@pytest.mark.slow
def test_one_row_over_two_processes(corpus: str, alone: Rows, tmp_path: Path) -> None:
    """Each has half of every sequence's tokens."""
    close(run(corpus, tmp_path / "run", 2, "ddp", context=2), alone)


@pytest.mark.slow
def test_either_goes_on_from_the_other(corpus: str, alone: Rows, tmp_path: Path) -> None:
    """Begun by two with shards, carried on by one, then by two with copies."""
    out = tmp_path / "run"
    assert len(run(corpus, out, 2, "fsdp", stop_at=6)) == 6
    assert len(run(corpus, out, 1, stop_at=15)) == 15
    close(run(corpus, out, 2, "ddp"), alone)


@pytest.mark.slow
def test_a_killed_process_is_started_again(corpus: str, alone: Rows, tmp_path: Path) -> None:
    """torchrun's elastic restart: all go on from the last checkpoint to the same losses."""
    close(run(corpus, tmp_path / "run", 2, die_at=13), alone)
    assert (tmp_path / "died").exists()


@pytest.mark.slow
def test_muon_over_two_processes(corpus: str, muon_run: Path, tmp_path: Path) -> None:
    """A matrix of which each process has some rows is orthogonalised as a whole."""
    out = tmp_path / "run"
    assert len(run(corpus, out, 2, "fsdp", stop_at=15, optimizer="muon")) == 15
    close(run(corpus, out, 2, "ddp", optimizer="muon"), rows_of(muon_run))
