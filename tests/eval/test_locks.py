"""Two evaluations do not write the same results at the same time."""

import os
from pathlib import Path

import pytest
import torch
from rich.console import Console

from qed import QEDConfig, QEDForCausalLM
from qed.data import tokenization
from qed.data.synthetic import documents
from qed.eval.options import Options
from qed.eval.run import evaluate
from qed.locks import LockedError, held


def test_a_task_that_another_process_is_at_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    QEDForCausalLM(QEDConfig.tiny(vocab_size=512, eos_token_id=0, bos_token_id=None)).save_pretrained(
        tmp_path / "model"
    )
    encoder = tokenization.words(documents(400), 512)
    encoder.save(str(tmp_path / "model" / "tokenizer.json"))
    out, options = tmp_path / "out", Options(lengths=(128,), samples=2, batch=2)

    def run() -> dict[str, object]:
        console = Console(quiet=True)
        return evaluate(tmp_path / "model", ["pairs"], options, out=out, tokenizer=None, device="cpu", console=console)

    with held(out, "eval-mqar"):
        assert list(run()) == ["pairs-128"]
    before = {x.name: x.stat().st_mtime_ns for x in out.iterdir()}
    busy = rf"process {os.getpid()} on .* is at work there"
    with held(out, "eval-pairs-128"), pytest.raises(LockedError, match=busy):
        run()
    assert before == {x.name: x.stat().st_mtime_ns for x in out.iterdir()}
