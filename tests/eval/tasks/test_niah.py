"""Needles: the protocol's draws, keys and sizes."""

import hashlib
import json
from dataclasses import asdict
from itertools import product
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qed.data.needles import NOISE
from qed.eval.options import SIZINGS
from qed.eval.tasks import keys, niah
from qed.eval.tasks.niah import CONFIGURATIONS, Configuration, Haystack, correct, draw, first_correct, generate

ESSAY = Haystack(text="It rained. The road was long and nobody spoke! Why? " * 400)
SOME = keys.Keys(["red", "old"], ["fox", "owl", "cat"])
MANY = keys.Keys([f"a{i}" for i in range(1000)], [f"n{i}" for i in range(1000)])


def words(text: str) -> int:
    return len(text.split())


def counts(texts: list[str]) -> list[int]:
    return [words(text) for text in texts]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text("ab- ", min_size=1, max_size=4), min_size=1, max_size=8, unique=True), st.data())
def test_keys_are_the_sorted_list(adjectives: list[str], data: st.DataObject) -> None:
    nouns = data.draw(st.lists(st.text("ab- ", min_size=1, max_size=3), min_size=1, max_size=6))
    truth = sorted({f"{a}-{n}" for a, n in product(adjectives, nouns)})
    found = keys.Keys(adjectives, nouns)
    assert list(found) == truth
    assert [found[i] for i in range(len(found))] == truth


def test_wonderwords_keys() -> None:
    pytest.importorskip("wonderwords")
    found, all_keys = hashlib.sha256(), keys.load(None)
    assert len(all_keys) == 6_171_620
    for i, key in enumerate(all_keys):
        found.update((f"\n{key}" if i else key).encode())
    assert found.hexdigest().startswith("e5e6a09e")


@pytest.mark.parametrize(
    ("seed", "key", "number", "number_depth", "uuid", "uuid_depth"),
    [
        (42, "tenuous-thirst", "2867825", 3, "46685257-bdd6-40fb-8667-1ad11c80317f", 38),
        (0, "luxuriant-legitimacy", "8056020", 5, "0a5d2f34-6baa-4455-a3e7-0682c2094cac", 41),
    ],
)
def test_first_draws(seed: int, key: str, number: str, number_depth: int, uuid: str, uuid_depth: int) -> None:
    """Published vectors of RULER's generator with wonderwords 3.0.1."""
    pytest.importorskip("wonderwords")
    all_keys = keys.load(None)
    for kind, value, depth in (("numbers", number, number_depth), ("uuids", uuid, uuid_depth)):
        prompt, answer, found = draw(Configuration(haystack="essay", kind=kind), 200, all_keys, ESSAY, Random(seed))
        assert (answer, found) == (value, depth)
        assert f"One of the special magic {kind} for {key} is: {value}." in prompt
    prompt, answer, found = draw(CONFIGURATIONS["niah_single_1"], 5, all_keys, ESSAY, Random(42))
    if seed == 42:
        assert (answer, found) == (number, 0)


def test_depths() -> None:
    assert np.round(np.linspace(0, 100, 40)).astype(int).tolist() == niah.DEPTHS


def test_the_prompt_to_the_letter() -> None:
    prompt, answer, depth = draw(CONFIGURATIONS["niah_single_1"], 3, SOME, ESSAY, Random(1))
    key = prompt.split(" for ")[1].split(" ")[0]
    lines = [NOISE] * 3
    lines.insert(round(depth / 100 * 3), f"One of the special magic numbers for {key} is: {answer}.")
    assert prompt == (
        "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about "
        "the number afterwards.\n" + "\n".join(lines) + f"\nWhat is the special magic number for {key} mentioned in "
        f"the provided text? The special magic number for {key} mentioned in the provided text is"
    )


def test_essays_keep_their_sentences_and_get_the_needle_at_its_depth() -> None:
    for seed in range(20):
        prompt, answer, depth = draw(CONFIGURATIONS["niah_single_3"], 300, SOME, ESSAY, Random(seed))
        context = prompt.split("\n")[1]
        before, after = context.split(f"{answer}.")[0], context.split(f"{answer}.")[1]
        sentences = ESSAY.sentences(300)
        place = int(len(sentences) * depth / 100)
        assert before.startswith(" ".join(sentences[:place]))
        assert after.strip() == " ".join(sentences[place:])


def test_several_keys_one_asked() -> None:
    for seed in range(20):
        prompt, answer, _ = draw(CONFIGURATIONS["niah_multikey_1"], 300, MANY, ESSAY, Random(seed))
        needles = dict(x.split(" is: ") for x in prompt.split("One of the special magic numbers for ")[1:])
        assert len(needles) == 4
        asked = prompt.rsplit(" for ", 1)[1].split(" ")[0]
        assert needles[asked].startswith(answer)


@pytest.mark.parametrize("sizing", SIZINGS)
@pytest.mark.parametrize("task", CONFIGURATIONS)
def test_prompts_fit_and_are_counted(task: str, sizing: str) -> None:
    options = {"samples": 30, "keys": MANY, "haystack": ESSAY, "count": counts}
    made = list(generate(CONFIGURATIONS[task], 1024, sizing=sizing, **options))
    assert len(made) == 30
    for sample in made:
        assert sample.tokens == words(sample.prompt) <= 1024 - niah.NEW_TOKENS
        assert sample.answer in sample.prompt
        assert 0 <= sample.depth <= 100


def test_linear_stops_a_step_below_and_binary_at_the_brim() -> None:
    """Of noise, a line is 18 words and a prompt 50 without any: 846 of 896 are 47 lines."""
    task = CONFIGURATIONS["niah_single_1"]
    options = {"samples": 5, "keys": SOME, "haystack": ESSAY, "count": counts}
    lines = {s: next(iter(generate(task, 1024, sizing=s, **options))).prompt.count(NOISE) for s in SIZINGS}
    without = words(draw(task, 0, SOME, ESSAY, Random(0))[0])
    most = (1024 - niah.NEW_TOKENS - without) // words(NOISE)
    assert lines == {"linear": most // 5 * 5, "binary": most}


def test_counting_several_at_once_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Binary sizing ends at the brim, where many essays' samples do not fit and are drawn again."""
    options = {"samples": 60, "keys": MANY, "haystack": ESSAY, "count": counts, "sizing": "binary"}
    truth = {}
    for together in (1, 7, 60):
        monkeypatch.setattr(niah, "TOGETHER", together)
        truth[together] = list(generate(CONFIGURATIONS["niah_single_3"], 1024, **options))
    assert truth[1] == truth[7] == truth[60]
    jagged = Haystack(text=" ".join("word." if i % 7 else "a-b-c d e" for i in range(3000)))

    def uneven(texts: list[str]) -> list[int]:
        return [words(text) + sum(map(ord, text.split(" is: ")[1][:3])) % 60 for text in texts]

    for together in (1, 7, 60):
        monkeypatch.setattr(niah, "TOGETHER", together)
        truth[together] = list(
            generate(CONFIGURATIONS["niah_single_3"], 1024, **(options | {"haystack": jagged, "count": uneven}))
        )
    assert len({sample.tokens for sample in truth[1]}) > 20
    assert truth[1] == truth[7] == truth[60]


def test_the_same_seed_gives_the_same_samples() -> None:
    options = {"samples": 5, "keys": SOME, "haystack": ESSAY, "count": counts}
    first, again = (list(generate(CONFIGURATIONS["niah_single_2"], 1024, seed=7, **options)) for _ in range(2))
    assert first == again
    assert first != list(generate(CONFIGURATIONS["niah_single_2"], 1024, seed=8, **options))


@pytest.mark.parametrize(
    ("task", "digest"),
    [
        ("niah_single_1", "6e71bd982a74c3e553466931dd1b24070281446d516409420c18ea1385ec30ce"),
        ("niah_single_2", "a2376db96e8b1e2c7e5514b32558f88d97d0c429556a47b91eb759a980f959d3"),
        ("niah_single_3", "d77e295d6ca95dfba1581a8ce0ce01c29168b542b301ed8cbc8b36aabed3eb1e"),
        ("niah_multikey_1", "537707d7d47f2fa097ffdb4cbac5564f25409372befd378dd17a7cfc2cfea4b8"),
    ],
)
def test_samples_are_always_the_same(task: str, digest: str) -> None:
    """Results that are kept name sets of prompts by what decided them, and not by what they say."""
    made = generate(CONFIGURATIONS[task], 1024, samples=5, keys=MANY, haystack=ESSAY, count=counts)
    lines = "".join(json.dumps(asdict(sample)) + "\n" for sample in made)
    assert hashlib.sha256(lines.encode()).hexdigest() == digest


def test_what_is_correct() -> None:
    assert correct(" 1234567.", "1234567")
    assert correct("x\x00ABC-de", "abc-DE")
    assert not correct("123456", "1234567")


UUID = "baa80dd4-88bd-4407-abcf-be01a28defe3"


@pytest.mark.parametrize(
    ("prediction", "answer", "right"),
    [
        (" 1234567.", "1234567", True),
        (" 12345678.", "1234567", False),  # where RULER's would be right
        ("01234567", "1234567", False),
        ("7654321. The special magic number is 1234567", "1234567", False),
        ("123456 1234567", "1234567", False),
        ("the number is 1234567, not 7654321", "1234567", True),
        ("", "1234567", False),
        (f" {UUID.upper()}.", UUID, True),
        (f"for the-and is {UUID}", UUID, True),  # words without a digit are no answer
        (f"{UUID}0", UUID, False),
        (f"{UUID[:-2]}. {UUID}", UUID, False),  # cut short, and only then right
        (f"{UUID[:8]} {UUID}", UUID, False),
    ],
)
def test_what_is_first_correct(prediction: str, answer: str, right: bool) -> None:
    assert first_correct(prediction, answer) is right


def test_bad_input() -> None:
    options = {"samples": 1, "keys": SOME, "haystack": ESSAY, "count": counts}
    with pytest.raises(
        ValueError, match=r"--lengths: expected room for the question and 128 new tokens, \d+ without .*, got 150"
    ):
        list(generate(CONFIGURATIONS["niah_single_1"], 150, **options))
    with pytest.raises(ValueError, match="--essays: expected text for a haystack, got none"):
        list(generate(CONFIGURATIONS["niah_single_2"], 1024, **(options | {"haystack": Haystack()})))
    with pytest.raises(ValueError, match="--sizing: expected one of linear, binary, got 'cubic'"):
        list(generate(CONFIGURATIONS["niah_single_1"], 1024, sizing="cubic", **options))
    with pytest.raises(ValueError, match="--words: expected adjectives and nouns, got an empty list"):
        keys.Keys([], ["x"])
