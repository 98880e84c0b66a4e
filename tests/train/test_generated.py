"""A run on rows that are made: stopped and resumed it is the same run, and its model is evaluated like any other."""

import os
import signal
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from qed.data import Generated
from qed.eval.options import Options
from qed.eval.run import evaluate
from qed.model.causal_lm import QEDForCausalLM
from qed.recipes import build
from qed.train.loop import STOPPED, train
from qed.train.objective import SummedLoss

QUIET = Console(quiet=True)
SHORT = {"total_tokens": "2048", "validate_every": "2", "save_every": "100", "group": "s3", "arm": "gdn2"}


def test_stopped_and_resumed_it_is_the_same_run(tmp_path: Path) -> None:
    config = build("tracking", SHORT)

    def stop(model: QEDForCausalLM) -> dict[str, float]:
        os.kill(os.getpid(), signal.SIGTERM)
        return {}

    assert train(config, tmp_path / "whole", device="cpu", console=QUIET) == 0
    assert train(config, tmp_path / "cut", device="cpu", console=QUIET, watch=stop) == STOPPED
    assert train(config, tmp_path / "cut", device="cpu", console=QUIET) == 0
    whole, cut = (load_file(tmp_path / name / "export" / "model.safetensors") for name in ("whole", "cut"))
    assert whole.keys() == cut.keys()
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    options = Options(lengths=(64,), samples=2)
    given = {"out": tmp_path / "eval", "tokenizer": None, "device": "cpu", "console": QUIET}
    (result,) = evaluate(tmp_path / "cut" / "export", ["tracking_s3"], options, **given).values()  # type: ignore[arg-type]
    assert [x["asked"] for x in result["bins"]] == [64, 64]
    with pytest.raises(ValueError, match="tracking_s5: expected a model whose tokens are elements of s5"):
        evaluate(tmp_path / "cut" / "export", ["tracking_s5"], options, **given)  # type: ignore[arg-type]


def test_the_loss_is_that_of_the_targets_alone() -> None:
    """A row's own targets count where there are any; with the next tokens as targets it is the loss of a corpus."""
    torch.manual_seed(0)
    config = build("recall", {"width": "16"})
    loss = SummedLoss(QEDForCausalLM(config.model_config()))
    rows = Generated(config.data).rows(range(2), 64)
    logits = loss.model(rows[:, :-1, 0]).logits.flatten(0, 1)
    apart = torch.nn.functional.cross_entropy(logits, rows[:, 1:, 1].flatten(), reduction="sum", ignore_index=-100)
    torch.testing.assert_close(loss(rows), apart)
    tokens = rows[..., 0]
    torch.testing.assert_close(loss(torch.stack([tokens, tokens], -1)), loss(tokens))
