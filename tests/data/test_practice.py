"""Documents that practise: what they ask for is what they told, in the share that was asked for."""

import hashlib
import re
from itertools import islice

import pytest

from qed.data.practice import Practice
from qed.data.synthetic import documents

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


def test_the_documents_are_always_the_same() -> None:
    """Corpora of results that are kept were made with them."""
    made = "\n".join(Practice(share=0.6)(iter(TALK)))
    assert (
        hashlib.sha256(made.encode()).hexdigest() == "b0977d92ed80d239b9700165163c5fc2ce3ddb61f1ecf4b77206306a948e664b"
    )
