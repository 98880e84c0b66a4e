"""Documents that practise: what they ask for is what they told, in the share that was asked for."""

import re
from itertools import islice
from random import Random

import pytest

from qed.data import tokenization
from qed.data.sources import SourceError, part
from qed.data.synthetic import KEYS, VALUES, documents, question
from qed.eval import pairs
from qed.eval.practice import Practice

TALK = [" ".join(islice(documents(400, seed), 30)) for seed in range(20)]


@pytest.mark.parametrize("share", [0.2, 0.6])
def test_the_share_is_kept_and_every_answer_was_told(share: float) -> None:
    made = list(Practice(share=share)(iter(TALK)))
    practice = [x for x in made if x.startswith("A special magic")]
    assert [x for x in made if x not in practice] == TALK
    assert sum(map(len, practice)) / sum(map(len, made)) == pytest.approx(share, abs=0.02)
    several = 0
    for text in practice:
        told = dict(re.findall(r"One of the special magic \w+ for (\S+) is: (\S+)\.", text))
        asked = re.findall(r"for (\S+) mentioned in the provided text is (\S+)\.", text)
        assert dict(asked) == told
        assert len(asked) == len(told) >= 1
        several += len(told) > 1
    assert several > len(practice) / 4
    assert made == list(Practice(share=share)(iter(TALK)))


def test_a_share_must_be_one() -> None:
    with pytest.raises(ValueError, match=r"--practice: expected a share between 0 and 1, got 1\.5"):
        Practice(share=1.5)


def test_parts_are_disjoint_and_everything() -> None:
    texts = list(documents(500))
    held, rest = list(part(iter(texts), "held:10")), list(part(iter(texts), "rest:10"))
    assert sorted(held + rest) == sorted(texts)
    assert not set(held) & set(rest)
    assert 20 < len(held) < 90
    for bad in ("held", "held:1", "some:3", "rest:x"):
        with pytest.raises(SourceError, match="--part: expected held:N or rest:N"):
            part(iter(texts), bad)


def test_questions_of_a_document_are_answered_by_its_facts() -> None:
    for text in documents(200):
        told: dict[str, str] = {}
        for sentence in text.rstrip(".").split(". "):
            kind, *words = sentence.split()
            if kind == "Remember":
                assert words[0] not in told
                told[words[0]] = words[1]
            elif kind == "Recall":
                assert told[words[0]] == words[1]


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


def test_keys_and_values_are_apart() -> None:
    assert not set(KEYS) & set(VALUES)
    assert len({question(Random(i), 100) for i in range(50)}) == 50
