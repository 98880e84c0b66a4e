"""Loss by position: the model's own, every position in one bin, in windows what a window alone gives, bytes of text."""

import math

import pytest
import torch

from qed import QEDConfig, QEDForCausalLM
from qed.data import tokenization
from qed.eval import scoring
from qed.eval.tasks import positions

TEXTS = ["Ein schöner Tag — naïve café, übermäßig größer.", "a b c d e f g the lamp, the wall"] * 20
WORDS = tokenization.train(TEXTS, 300)


class Tokens:
    """A corpus of numbers in order."""

    def __init__(self, ids: list[int] | None = None):
        self.ids = torch.tensor(list(range(1001)) if ids is None else ids)

    def __len__(self) -> int:
        return len(self.ids)

    def read(self, start: int, count: int) -> object:
        return self.ids[start : start + count].numpy()


def model() -> QEDForCausalLM:
    torch.manual_seed(0)
    return QEDForCausalLM(QEDConfig.tiny(initializer_range=0.3)).eval()


def truth(tiny: QEDForCausalLM, ids: list[int]) -> torch.Tensor:
    """The losses of all tokens but the first, as the model itself gives them."""
    given = torch.tensor([ids])
    logits = tiny(given[:, :-1]).logits.detach()
    return torch.nn.functional.cross_entropy(logits.mT, given[:, 1:], reduction="none")[0]


def test_losses_in_pieces_are_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny, ids = model(), torch.randint(256, (102,)).tolist()
    monkeypatch.setattr(scoring, "PIECE_TOKENS", 40)
    assert torch.allclose(positions.losses(tiny, ids), truth(tiny, ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [21, 40, 57, 61])
def test_a_window_sees_half_of_itself_or_more_and_nothing_before(length: int) -> None:
    """Token t past the first window is predicted from what stands since the window that ends at or after it began."""
    tiny, ids, window = model(), torch.randint(256, (length,)).tolist(), 20
    found = positions.losses(tiny, ids, window)
    assert len(found) == length - 1
    for t in range(1, length):
        start = 0 if t <= window else 10 * math.ceil((t - window) / 10)
        assert float(found[t - 1]) == pytest.approx(float(truth(tiny, ids[start : t + 1])[-1]), abs=1e-4, rel=1e-4)


def test_bins_cover_every_position_once(monkeypatch: pytest.MonkeyPatch) -> None:
    given = torch.rand(3, 300)
    monkeypatch.setattr(positions, "losses", lambda model, ids, window: given[ids[0] // 300])
    monkeypatch.setattr(positions, "bytes_before", lambda tokenizer, ids, edges: [2 * x for x in edges])
    options = {"length": 300, "rows": 10, "tokenizer": WORDS}
    found = positions.by_position(None, Tokens(), **options)  # type: ignore[arg-type]
    assert [(x["from"], x["to"]) for x in found["bins"]] == [(0, 64), (64, 128), (128, 256), (256, 300)]
    assert found["rows"] == 3
    assert found["loss"] == pytest.approx(float(given.mean()), rel=1e-6)
    assert found["bins"][1]["loss"] == pytest.approx(float(given[:, 64:128].mean()), rel=1e-6)
    bits = float(given[:, 64:128].mean()) / math.log(2) / 2  # two bytes a token
    assert found["bins"][1]["bits_per_byte"] == pytest.approx(bits, rel=1e-6)
    with pytest.raises(ValueError, match="--data: expected more than 2000 tokens for one row, got 1001"):
        positions.by_position(None, Tokens(), **(options | {"length": 2000}))  # type: ignore[arg-type]


def test_bits_a_byte_are_of_the_text() -> None:
    """Over the whole row: the sum of all losses, by the bytes of the text without its first token."""
    ids = WORDS.encode(" ".join(TEXTS)).ids[:201]
    torch.manual_seed(0)
    tiny = QEDForCausalLM(QEDConfig.tiny(vocab_size=300)).eval()
    found = positions.by_position(tiny, Tokens(ids), length=200, rows=1, tokenizer=WORDS)  # type: ignore[arg-type]
    text = len(WORDS.decode(ids).encode()) - len(WORDS.decode(ids[:1]).encode())
    assert found["bits_per_byte"] == pytest.approx(float(truth(tiny, ids).sum()) / math.log(2) / text, rel=1e-4)


def test_bytes_of_unknown_words_are_not_known() -> None:
    words = tokenization.words(["the lamp and the wall"] * 3, 16)
    assert positions.bytes_before(words, words.encode("the lamp").ids, [0, 1, 2]) == [0, 3, 8]
    assert positions.bytes_before(words, words.encode("the zebra").ids, [0, 1, 2]) is None
