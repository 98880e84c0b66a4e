"""Scores of texts: those of each text alone, whatever is packed, shared, cut into pieces or left out."""

import pytest
import torch

from qed import QEDConfig, QEDForCausalLM
from qed.eval import answers, scoring
from qed.eval.scoring import Text, groups, scores


def model_of(kinds: list[str]) -> QEDForCausalLM:
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": len(kinds), "layer_types": kinds, "sliding_window": 32, "initializer_range": 0.3}
    return QEDForCausalLM(QEDConfig.tiny(**sizes)).eval()


def some_texts() -> list[Text]:
    """Texts alone, with a shared context, with one shared in part, the same twice, and scored from the start."""
    draw = torch.Generator().manual_seed(1)

    def tokens(n: int) -> list[int]:
        return torch.randint(3, 256, (n,), generator=draw).tolist()

    question, sentence = tokens(40), tokens(30)
    texts = [Text([*question, *tokens(n)], 40) for n in (3, 9, 1, 5)]
    texts += [Text([*sentence, *tokens(2), *tokens(6)], 32) for _ in range(2)]
    texts += [texts[0], Text(tokens(70), 1), Text(tokens(2), 1), Text(tokens(150), 149)]
    return texts


@pytest.mark.parametrize("kinds", [["qed"] * 2, ["qed", "sliding_attention"]], ids=["recurrent", "hybrid"])
@pytest.mark.parametrize("piece", [answers.PIECE_TOKENS, 64])
def test_scores_are_those_of_each_text_alone(kinds: list[str], piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, texts = model_of(kinds), some_texts()
    for module in (scoring, answers):
        monkeypatch.setattr(module, "PIECE_TOKENS", piece)
    monkeypatch.setitem(scoring.LOGITS, "cpu", 256 * 7)  # seven rows of logits at once
    found = dict(scores(model, texts, batch=2))
    assert sorted(found) == list(range(len(texts)))
    for i, text in enumerate(texts):
        with torch.no_grad():
            logits = model(torch.tensor([text.ids[:-1]])).logits[0, text.first - 1 :].log_softmax(-1)
        wanted = torch.tensor(text.ids[text.first :])
        truth = logits.gather(1, wanted[:, None])[:, 0]
        assert torch.allclose(found[i].log_probability, truth, rtol=1e-4, atol=1e-4)
        assert found[i].likeliest.tolist() == (logits.argmax(-1) == wanted).tolist()


def test_what_is_shared_is_read_once() -> None:
    found = {tuple(sorted(x.members)): x.shared for x in groups(some_texts(), most=8)}
    assert found == {(0, 1, 2, 3, 6): 39, (4, 5): 30, (7,): 0, (8,): 0, (9,): 0}
    assert sorted(len(x.members) for x in groups(some_texts(), most=2)) == [1, 1, 1, 1, 2, 2, 2]


def test_what_is_known_is_left_out_and_the_rest_is_the_same() -> None:
    """Bit for bit: batches do not depend on what is missing."""
    model, texts = model_of(["qed"]), some_texts()
    whole = dict(scores(model, texts, batch=2))
    for missing in ({1}, {0, 8}, {4, 9}, set()):
        some = dict(scores(model, texts, batch=2, wanted=missing))
        assert some.keys() == missing
        assert all(torch.equal(some[i].log_probability, whole[i].log_probability) for i in missing)


@pytest.mark.parametrize("text", [Text([1, 2], 0), Text([1, 2], 2), Text([1], 1)])
def test_a_text_without_a_token_to_score_is_refused(text: Text) -> None:
    with pytest.raises(ValueError, match="first: expected 1 to"):
        list(scores(model_of(["qed"]), [text], batch=1))
