"""Rows that are made: exact answers, and a pure function of source, stream and number."""

from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch

from qed.data import Generated, Loader
from qed.data.generated import given_and_wanted
from qed.data.groups import GROUPS, Table, cycle, product, written
from qed.recipes import build
from qed.train.inputs import open_inputs

ORDERS = {"z2": 2, "z3": 3, "z5": 5, "s3": 6, "s4": 24, "a5": 60, "s5": 120, "s3_swaps": 6, "s5_swaps": 120}


def matrix(permutation: tuple[int, ...]) -> np.ndarray:
    """The permutation of unit vectors, eᵢ → e_{p(i)}, as a matrix that row vectors are multiplied by."""
    return np.eye(len(permutation))[list(permutation)]


@pytest.mark.parametrize("name", GROUPS)
def test_targets_are_products_of_matrices(name: str) -> None:
    """The running product, computed again as a product of matrices and read off where it puts every unit vector."""
    table = Table(GROUPS[name])
    assert len(table.elements) == ORDERS[name]
    source = Generated(f"generated:tracking:{name}")
    given, wanted = given_and_wanted(source.rows(range(3), 50))
    named = dict(zip(table.names, table.elements, strict=True))
    for letters, targets in zip(given, wanted, strict=True):
        so_far = np.eye(len(table.elements[0]))
        for letter, target in zip(letters.tolist(), targets.tolist(), strict=True):
            so_far = so_far @ matrix(named[source.tokenizer.id_to_token(letter)])
            answer = named[source.tokenizer.id_to_token(target)]
            assert np.array_equal(so_far, matrix(answer))
    if name == "a5":
        assert all(np.linalg.det(matrix(x)) > 0 for x in table.elements)
    assert {written(x) for x in table.elements} == {*table.names}
    assert len({*given.flatten().tolist()}) == len(GROUPS[name].letters)


def test_permutations() -> None:
    assert product(cycle(3, 0, 1), cycle(3, 1, 2)) == (2, 0, 1)  # 1 → 2 → 3, 2 → 1, 3 → 2
    assert [written(x) for x in ((0, 1, 2), (1, 0, 2), (1, 2, 0), (1, 0, 3, 2))] == ["e", "(12)", "(123)", "(12)(34)"]
    with pytest.raises(ValueError, match=r"expected one of z2, .*, got 's6'"):
        Generated("generated:tracking:s6")
    with pytest.raises(ValueError, match="expected generated:recall:WORDS, an even number of 4 or more, got '5'"):
        Generated("generated:recall:5")
    with pytest.raises(ValueError, match="expected one of tracking, recall, got 'sorting'"):
        Generated("generated:sorting:5")


@pytest.mark.parametrize("name", ["tracking:s4", "recall:32"])
def test_a_row_is_a_function_of_its_number(name: str) -> None:
    held, other = Generated(f"generated:{name}"), Generated(f"generated:{name}", "training at seed 0")
    whole = held.rows(range(12), 64)
    assert torch.equal(held.rows([7], 64)[0], whole[7])
    assert not torch.equal(other.rows([7], 64)[0], whole[7])
    assert held.identity == other.identity  # of the task, whoever trains on it
    one = Loader(other, tokens=64, batch=12)
    parts = [Loader(other, tokens=64, batch=12, rank=rank, world=2) for rank in (0, 1)]
    for step in (0, 5):
        assert torch.equal(torch.cat([part.step(step) for part in parts]), one.step(step))
        assert one.targets == int((given_and_wanted(one.step(step))[1] != -100).sum())
    assert not torch.equal(one.step(0), one.step(1))


def test_recall_asks_for_what_was_told() -> None:
    """A dictionary that is filled as the row tells answers every question, and nothing else is asked."""
    given, wanted = given_and_wanted(Generated("generated:recall:64").rows(range(5), 64))
    asked_first = 0
    for tokens, targets in zip(given.tolist(), wanted.tolist(), strict=True):
        told: dict[int, int] = {}
        for t in range(0, 64, 4):
            key, value, *asked = tokens[t : t + 4]
            assert key not in told
            assert value not in told.values()
            told[key] = value
            assert targets[t : t + 4] == [-100, -100, *(told[x] for x in asked)]
            asked_first += sum(x == tokens[0] for x in asked)
    assert asked_first > 5  # the first pair is asked for long after it was told


def test_what_cannot_be_made_is_refused_first() -> None:
    few = {"width": "32", "data": "generated:recall:64", "validation": "generated:recall:64"}
    with pytest.raises(ValueError, match="sequence: expected a multiple of 4 tokens, at most 128, got 256"):
        open_inputs(build("recall", few))
    with pytest.raises(ValueError, match=r"model.vocab_size: expected at least the corpus's 122, got 100"):
        open_inputs(build("tracking", {"group": "s5", "model.vocab_size": "100"}))
    with pytest.raises(ValueError, match="width: expected one of 16, 32, 64, 128, got '24'"):
        build("recall", {"width": "24"})


def test_the_tokenizer_reads_back_what_it_writes(tmp_path: Path) -> None:
    tokenizer = Generated("generated:tracking:s5").tokenizer
    text = "e (12) (12345) (12)(345)"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert prod(tokenizer.encode(text).ids) > 0  # none of them is the end of a document
