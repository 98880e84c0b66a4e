"""Recall among many pairs: prompts fit, and have one answer."""

import re

import pytest

from qed.data import tokenization
from qed.data.synthetic import documents
from qed.eval.tasks import pairs


@pytest.mark.parametrize("length", [32, 64, 500, 3000])
def test_pairs_fit_their_length_and_have_one_answer(length: int) -> None:
    encoder = tokenization.load("words:512", documents(3000))
    count = lambda texts: [len(encoder.encode(x).ids) for x in texts]  # noqa: E731
    for sample in pairs.generate(length, samples=20, count=count):
        assert length - 12 <= sample.tokens + pairs.NEW_TOKENS <= length
        key = sample.prompt.split()[-1]
        assert re.findall(rf"Remember {key} (\w+)\.", sample.prompt) == [sample.answer]
        assert encoder.decode(encoder.encode(sample.prompt).ids) == sample.prompt
        assert pairs.correct(f" {sample.answer}. The", sample.answer)
        assert not pairs.correct(f"the {sample.answer}", sample.answer)
    letters = tokenization.load("bpe:300", documents(100))
    with pytest.raises(ValueError, match="pairs expects one token a word"):
        list(pairs.generate(64, samples=1, count=lambda texts: [len(letters.encode(x).ids) for x in texts]))
