"""lm-eval's own S-NIAH-1 and ours: the same prompts get the same answers and the same scores."""

import itertools
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from qed import QEDConfig, QEDForCausalLM
from qed.data import tokenization
from qed.data.synthetic import documents
from qed.eval.answers import answers
from qed.eval.options import Options
from qed.eval.tasks import niah

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("lm_eval")
    pytest.importorskip("accelerate")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # theirs
def test_the_same_prompts_get_the_same_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from qed.eval.harness import run

    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    torch.manual_seed(0)
    config = QEDConfig.tiny(vocab_size=512, eos_token_id=[0], bos_token_id=None, initializer_range=0.3)
    model = QEDForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "model")
    encoder = tokenization.train(itertools.islice(documents(400), 400), 512)
    encoder.save(str(tmp_path / "model" / "tokenizer.json"))
    options = Options(lengths=(1024,), samples=8, batch=4)
    run(tmp_path / "model", ["niah_single_1"], options, out=tmp_path, device="cpu", console=Console(quiet=True))
    rows = [json.loads(line) for line in (tmp_path / "lm-eval-niah_single_1.jsonl").read_text().splitlines()]
    assert len(rows) == 8
    ids = [encoder.encode(row["prompt"]).ids for row in rows]
    said = answers(model, ids, new_tokens=niah.NEW_TOKENS, ends=model.end_tokens(), batch=8)
    for row, mine in zip(rows, said, strict=True):
        assert row["prompt"].endswith("mentioned in the provided text is")
        assert encoder.decode(mine) == row["prediction"]
        gold = json.loads(row["gold"].replace("'", '"'))[0] if isinstance(row["gold"], str) else row["gold"][0]
        assert niah.correct(row["prediction"], gold) == bool(row["metrics"]["1024"])


@pytest.mark.parametrize("said", [" 1234567.", "it is\t1234567", "123456 7", "", "\x0012\n34567", "The 1234567th"])
def test_their_score_is_ours(said: str) -> None:
    from lm_eval.tasks.ruler.common_utils import process_results

    found = process_results({"max_length": 4096, "outputs": ["1234567"]}, [said])["4096"]
    assert bool(found) == niah.correct(said, "1234567")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # theirs
def test_what_cannot_run_is_found_first(tmp_path: Path) -> None:
    """A task lm-eval does not have, a file without answers, a checkpoint without a tokenizer; nothing is written."""
    from qed.eval.harness import run

    torch.manual_seed(0)
    QEDForCausalLM(QEDConfig.tiny()).save_pretrained(tmp_path / "model")
    (tmp_path / "fda.jsonl").write_text('{"text": "a:", "key": "a", "value": ""}\n')
    data = {"fda": tmp_path / "fda.jsonl"}

    def refused(task: str, message: str, **more: Any) -> None:
        with pytest.raises(ValueError, match=message):
            run(tmp_path / "model", [task], Options(**more), out=tmp_path / "out", device="cpu", console=Console())

    refused("niah_single_9", "--task: expected niah_single_.*, got 'niah_single_9'")
    refused("fda", "CHECKPOINT: expected a tokenizer.json")
    tokenization.train(["a b c"], 300).save(str(tmp_path / "model" / "tokenizer.json"))
    refused("fda", "fda.jsonl:1: expected an answer with at least one character", data=data)
    assert not (tmp_path / "out").exists()
