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


def trained(corpus: str, out: Path, **changes: str) -> Path:
    from .test_loop import settings

    torch.set_num_threads(1)
    assert train(build("mini", settings(corpus, **changes)), out, device="cpu", console=Console(quiet=True)) == 0
    return out


@pytest.fixture(scope="module")
def whole(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happened to."""
    return trained(corpus, tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture(scope="module")
def muon_run(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with Muon."""
    return trained(corpus, tmp_path_factory.mktemp("muon") / "run", optimizer="muon")
