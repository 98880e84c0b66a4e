"""lm-eval's scores are ours; what it cannot run is found before anything is written."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from qed import QEDConfig, QEDForCausalLM
from qed.data import tokenization
from qed.eval.options import Options
from qed.eval.tasks import niah

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("lm_eval")
    pytest.importorskip("accelerate")


@pytest.mark.parametrize("said", [" 1234567.", "it is\t1234567", "123456 7", "", "\x0012\n34567", "The 1234567th"])
def test_their_score_is_ours(said: str) -> None:
    from lm_eval.tasks.ruler.common_utils import process_results

    found = process_results({"max_length": 4096, "outputs": ["1234567"]}, [said])["4096"]
    assert bool(found) == niah.correct(said, "1234567")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # theirs
def test_what_cannot_run_is_found_first(tmp_path: Path) -> None:
    """A task lm-eval does not have, a file without answers, a checkpoint without a tokenizer; nothing is written."""
    from qed.eval.harness.running import run

    torch.manual_seed(0)
    QEDForCausalLM(QEDConfig.tiny(vocab_size=512)).save_pretrained(tmp_path / "model")
    (tmp_path / "fda.jsonl").write_text('{"text": "a:", "key": "a", "value": ""}\n')
    data = {"fda": tmp_path / "fda.jsonl"}

    def refused(task: str, message: str, **more: Any) -> None:
        with pytest.raises(ValueError, match=message):
            run(tmp_path / "model", [task], Options(**more), out=tmp_path / "out", device="cpu", console=Console())

    refused("niah_single_9", "--task: expected niah_single_.*, got 'niah_single_9'")
    refused("fda", "--tokenizer: expected a file, since there is none in")
    tokenization.train(["a b c"], 300).save(str(tmp_path / "model" / "tokenizer.json"))
    refused("fda", "fda.jsonl:1: expected an answer with at least one character", data=data)
    assert not (tmp_path / "out").exists()
