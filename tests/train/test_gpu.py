"""Training on a GPU: captured pieces give the same bits as launched ones, and so does a resumed run."""

from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from qed.recipes import build
from qed.train import loop
from qed.train.captured import Captured

from .test_loop import numbers

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
QUIET = Console(quiet=True)
STEPS = 6
SHORT = {  # pieces of two rows, two rows and one
    "sequence": "96", "batch_tokens": "480", "micro_tokens": "192", "total_tokens": str(480 * STEPS),
    "decay_start_tokens": "1440", "save_every": "3", "validate_every": "3", "validation_tokens": "384",
    "precision": "bfloat16", "compile": "true", "model.head_dim": "32",
}  # fmt: skip


@pytest.mark.parametrize(
    ("recomputed", "optimizer"),
    [
        ("none", "adamw"),
        ("light", "adamw"),
        ("cheap", "adamw"),
        ("lean", "adamw"),
        ("full", "adamw"),
        ("cheap", "muon"),
    ],
)
def test_captured_pieces(
    recomputed: str, optimizer: str, corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"data": corpus, "validation": corpus, "activation_checkpointing": recomputed, "optimizer": optimizer}
    config = build("mini", SHORT | settings)
    trainer = loop.Trainer(config, tmp_path / "captured", "cuda", QUIET)
    trainer.run()
    assert trainer.captured is not None
    assert trainer.captured.graph is not None
    with monkeypatch.context() as patch:
        patch.setattr(Captured, "__call__", lambda self, work, rows: work(rows))
        loop.train(config, tmp_path / "launched", device="cuda", console=QUIET)

    halfway = loop.Trainer(config, tmp_path / "resumed", "cuda", QUIET)
    save = halfway.save
    monkeypatch.setattr(halfway, "save", lambda: (save(), setattr(halfway, "stopping", True)))
    halfway.run()
    assert halfway.step == STEPS // 2 + 1  # asked to stop after it had looked, it does one more step
    loop.train(config, tmp_path / "resumed", device="cuda", console=QUIET)

    runs = [tmp_path / name for name in ("captured", "launched", "resumed")]
    truth, weights = numbers(runs[0]), load_file(runs[0] / "export" / "model.safetensors")
    assert len(truth) == STEPS
    for run in runs[1:]:
        assert numbers(run) == truth, run
        found = load_file(run / "export" / "model.safetensors")
        assert all(torch.equal(x, found[name]) for name, x in weights.items()), run


def test_a_world_of_one_is_captured(corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun, with gradients that are exchanged after the last piece: the bits of one process by itself."""
    config = build("mini", SHORT | {"data": corpus, "validation": corpus})
    loop.train(config, tmp_path / "alone", device="cuda", console=QUIET)
    world = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    for name, value in world.items():
        monkeypatch.setenv(name, value)
    trainer = loop.Trainer(config, tmp_path / "world", "cuda", QUIET)
    try:
        trainer.run()
    finally:
        trainer.parallel.close()
    assert trainer.captured is not None
    assert trainer.captured.graph is not None
    assert trainer.parallel.gradients is not None
    assert numbers(tmp_path / "world") == numbers(tmp_path / "alone")


def test_what_waits_for_the_device_cannot_be_captured() -> None:
    captured, rows = Captured(), torch.ones(2, 3, device="cuda")

    def work(rows: torch.Tensor) -> torch.Tensor:
        return rows.sum() * float(rows[0, 0])

    assert captured(work, rows) == 6
    with pytest.raises(RuntimeError, match="compile=false"):
        captured(work, rows)
    assert torch.rand(3, device="cuda").isfinite().all()  # torch itself refuses to draw after a failed capture
