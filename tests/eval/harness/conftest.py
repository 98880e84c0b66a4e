"""A tiny checkpoint whose tokenizer knows the words of made-up examples."""

import warnings
from pathlib import Path

import pytest
import torch

from qed import QEDConfig, QEDForCausalLM
from qed.bench import made_up
from qed.data import tokenization
from qed.data.needles import NOISE, PROMPT

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("lm_eval")
    pytest.importorskip("accelerate")


@pytest.fixture(scope="package")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = QEDConfig.tiny(vocab_size=1024, eos_token_id=0, bos_token_id=None, initializer_range=0.3)
    QEDForCausalLM(config).save_pretrained(folder)
    words = made_up.Words("tokenizer")
    texts = [words.sentence(20, 40) for _ in range(300)] + [NOISE, PROMPT] * 100  # what RULER's prompts are full of
    tokenization.train(texts, 1024).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is looked for on the hub, whether its package has read the environment already or not."""
    import datasets
    from huggingface_hub import constants

    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    for module in (constants, datasets.config):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", True)
