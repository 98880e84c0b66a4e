from pathlib import Path

import pytest
import torch
from rich.console import Console

from qed.data.prepare import prepare
from qed.recipes import build
from qed.train.loop import train


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("corpus")
    prepare("synthetic:100", tokenizer="bpe:300", out=folder, console=Console(quiet=True))
    return str(folder)


@pytest.fixture(scope="module")
def whole(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happened to."""
    from .test_loop import settings

    out = tmp_path_factory.mktemp("whole") / "run"
    torch.set_num_threads(1)
    assert train(build("mini", settings(corpus)), out, device="cpu", console=Console(quiet=True)) == 0
    return out
