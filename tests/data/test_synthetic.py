"""The built-in corpus: questions are answered by facts that were told."""

from random import Random

from qed.data.synthetic import KEYS, VALUES, documents, question


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


def test_keys_and_values_are_apart() -> None:
    assert not set(KEYS) & set(VALUES)
    assert len({question(Random(i), 100) for i in range(50)}) == 50
