import pytest
from rich.console import Console

from qed.data.prepare import prepare


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("corpus")
    prepare("synthetic:100", tokenizer="bpe:300", out=folder, console=Console(quiet=True))
    return str(folder)
