"""`qed train` on a terminal: one bar that is never wrapped, and Ctrl-C that saves."""

import json
import re
from pathlib import Path

import pytest
from rich.cells import cell_len

from qed.train.checkpoints import newest
from qed.train.loop import STOPPED

from .terminal import lines, on_terminal
from .test_training import few_documents, words

__all__ = ["few_documents"]
BAR = re.compile(r"[━╸╺]")


@pytest.mark.parametrize("width", [50, 80, 120])
@pytest.mark.usefixtures("few_documents")
def test_a_bar_says_how_the_run_goes(tmp_path: Path, width: int) -> None:
    status, written = on_terminal(words(tmp_path), width=width)
    assert status == 0, written
    shown = lines(written)
    bars = [line for line in shown if BAR.search(line)]
    assert bars
    assert max(map(cell_len, bars)) <= width - 3  # there is room for ^C
    assert not [line for line in shown if line.startswith("step ")]
    row = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    last = bars[-1]
    assert last.startswith("10/10 ")
    assert f"loss {row['loss']:.4f}" in last
    if width >= 80:
        assert re.search(rf"val(idation)? {row['validation_loss']:.4f}  [\d,]+ tokens/s  0:00 left", last)
    assert f"final loss {row['loss']:.4f}" in " ".join(shown)


@pytest.mark.usefixtures("few_documents")
def test_lines_are_printed_when_asked_for_and_never_wrapped(tmp_path: Path) -> None:
    status, written = on_terminal(words(tmp_path, "--lines"), width=60)
    assert status == 0, written
    steps = [line for line in lines(written) if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == [f"{step}/10" for step in range(1, 11)]
    assert all(" loss " in line and cell_len(line) <= 60 for line in steps)
    assert not BAR.search(written)


@pytest.mark.usefixtures("few_documents")
def test_control_c_saves_and_the_same_command_resumes(tmp_path: Path) -> None:
    call = words(tmp_path, total_tokens="640000")
    status, written = on_terminal(call, width=80, interrupt=lambda shown: " loss " in shown)
    assert status == STOPPED, written
    saved = newest(tmp_path / "checkpoints")
    assert saved is not None
    assert lines(written)[-1] == f"saved at step {saved.state['step']}; the same command resumes"
    status, written = on_terminal(call, width=80, interrupt=lambda shown: " loss " in shown)
    assert status == STOPPED, written
    assert f"resuming at step {saved.state['step']}" in written
