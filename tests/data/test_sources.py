"""Parts of a source: what is held out and the rest."""

import pytest

from qed.data.sources import SourceError, part
from qed.data.synthetic import documents


def test_parts_are_disjoint_and_everything() -> None:
    texts = list(documents(500))
    held, rest = list(part(iter(texts), "held:10")), list(part(iter(texts), "rest:10"))
    assert sorted(held + rest) == sorted(texts)
    assert not set(held) & set(rest)
    assert 20 < len(held) < 90
    for bad in ("held", "held:1", "some:3", "rest:x"):
        with pytest.raises(SourceError, match="--part: expected held:N or rest:N"):
            part(iter(texts), bad)
