"""The variants of FDA, SWDE and SQuAD-completion, each as its own harness would have it."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from qed.eval.prompts import survives
from qed.eval.tasks.recall import correct, examples


@pytest.fixture
def letters() -> Tokenizer:
    """One token a character."""
    made = Tokenizer(models.WordLevel({chr(i): i for i in range(128)}, unk_token="\x00"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")

    class Joined:
        encode = made.encode

        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            return "".join(map(chr, ids))

    return Joined()  # type: ignore[return-value]


def one(
    task: str, row: dict[str, object], letters: Tokenizer, variant: str, context: int = 2048
) -> tuple[str, tuple[str, ...], str]:
    (found,) = examples(task, [(1, row)], variant=variant, tokenizer=letters, context=context, where="file")
    return found.prompt, found.golds, found.form


ROW = {
    "key": "applicant",
    "value": " Acme Co ",
    "text": "The applicant: Acme Co makes valves.\n applicant: ",
    "doc_id": 3,
}


def test_as_it_is_and_stripped(letters: Tokenizer) -> None:
    assert one("fda", ROW, letters, "A0") == (ROW["text"], (" Acme Co ",), "as given")
    assert one("fda", ROW, letters, "A1") == (ROW["text"].strip(), ("Acme Co",), "as given")


def test_a_text_without_its_cue_gets_it(letters: Tokenizer) -> None:
    bare = ROW | {"text": "The applicant: Acme Co makes valves. "}
    assert one("fda", bare, letters, "A1") == (
        "The applicant: Acme Co makes valves.\napplicant:",
        ("Acme Co",),
        "cue added",
    )


def test_the_window_about_the_first_mention(letters: Tokenizer) -> None:
    row = {"key": "maker", "value": "Zeta", "text": "x" * 300 + " Maker: ZETA " + "y" * 300 + " maker:"}
    prompt, golds, _ = one("fda", row, letters, "B", context=150)  # 100 tokens: 50 before " Maker"
    assert prompt == "x" * 49 + " Maker: ZETA " + "y" * 38 + ". Maker:"
    assert golds == ("Zeta",)


def test_swde_ends_before_its_summary(letters: Tokenizer) -> None:
    row = {
        "key": "director",
        "value": "Ann Lee",
        "text": "A film. director Ann Lee.\n\nSummary of information above...\nyear: 1999\ndirector:",
    }
    assert one("swde", row, letters, "B")[0] == "A film. director Ann Lee. Director:"
    assert one("swde", row, letters, "A1")[0].endswith("year: 1999\ndirector:")


def test_short_strings_are_dropped_by_b_alone(letters: Tokenizer) -> None:
    row = {"key": "k", "value": "valve", "text": "k: valve\nk:"}
    assert list(examples("fda", [(1, row)], variant="B", tokenizer=letters, context=100, where="file")) == []
    assert len(list(examples("fda", [(1, row)], variant="A0", tokenizer=letters, context=100, where="file"))) == 1


def test_squad_as_completion_and_as_question(letters: Tokenizer) -> None:
    assert one("squad_completion", {"value": "42", "text": " The answer is "}, letters, "A1")[0] == "The answer is"
    asked = {"context": "It is 42.", "question": "What is it?", "answers": {"text": ["42", "forty-two"]}, "id": "q"}
    prompt, golds, form = one("squad_completion", asked, letters, "A1")
    assert (prompt, golds, form) == ("It is 42.\nQuestion: What is it?\nAnswer:", ("42", "forty-two"), "question")


def test_what_is_correct() -> None:
    assert correct(" the ACME co. Ltd\nno", "Acme Co")
    assert not correct("no\nAcme Co", "Acme Co")
    assert correct("a+b", "A+B")
    assert survives("by acme co", ("Acme Co",))


def test_bad_rows_name_their_line(letters: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"file:1: expected key, value, text for fda, got \['text'\]"):
        one("fda", {"text": "x"}, letters, "A1")
    with pytest.raises(ValueError, match="--variant: expected one of A0, A1, B, got 'C'"):
        one("fda", ROW, letters, "C")


@pytest.mark.parametrize("answers", ["42", ["42"], {"text": "42"}, {"text": ["42"]}])
def test_an_answer_is_not_its_letters(letters: Tokenizer, answers: object) -> None:
    """A gold "4" would be right nearly always."""
    asked = {"context": "It is 42.", "question": "What is it?", "answers": answers}
    assert one("squad_completion", asked, letters, "A1")[1] == ("42",)
