"""FDA, SWDE and SQuAD: is a value that stood in the text said again after its key?

| variant | prompt | gold |
|---|---|---|
| A0 (Based's harness, lm-eval to 0.4.12) | the text as it is | the value as it is |
| A1 (lm-eval 0.4.13) | stripped | stripped |
| B (JRT) | a window of C − 50 tokens about the first mention of key or value, then the cue anew | the value as it is |

The variants' figures are not comparable, and every result names its own. An answer is correct if the gold is in the
first line of 48 new tokens, in any case. Files in other shapes than Based's are taken too, and a result's `forms` say
so: texts that do not end in their cue get it ("cue added"), and SQuAD's questions are asked as questions ("question").
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from ..options import VARIANTS
from ..task import Example, RecallTask, checked_golds

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NEW_TOKENS = 48
ANSWER_TOKENS = 50
FIELDS = {"fda": ("key", "value", "text"), "swde": ("key", "value", "text"), "squad_completion": ("value", "text")}
SUMMARY = "Summary of information above..."


def examples(
    task: str,
    rows: Iterable[tuple[int, dict[str, Any]]],
    *,
    variant: str,
    tokenizer: Tokenizer,
    context: int,
    where: str,
) -> Iterator[Example]:
    """The examples of a file.

    Args:
        task: which one the file is of; that decides its fields, and how its cue is set anew.
        rows: of the file, with their numbers.
        variant: A0, A1 or B.
        tokenizer: for the window of variant B.
        context: C of variant B, in tokens.
        where: what the rows come from, for errors.
    """
    if variant not in VARIANTS:
        raise ValueError(f"--variant: expected one of {', '.join(VARIANTS)}, got {variant!r}")
    for number, row in rows:
        text, golds, key, form = _parts(task, row, f"{where}:{number}")
        document = str(row.get("doc_id", row.get("file_name", row.get("id", number))))
        if variant == "B":
            searched = [*([key] if key else []), golds[0]]
            if any(len(x) <= 1 for x in searched):
                continue  # JRT drops them
            text = _window(text.strip(), searched, tokenizer, context - ANSWER_TOKENS)
            text = _cue_again(task, text, key)
        elif variant == "A1":
            text, golds = text.strip(), tuple(x.strip() for x in golds)
        yield Example(prompt=text, golds=golds, form=form, document=document)


def _parts(task: str, row: dict[str, Any], where: str) -> tuple[str, tuple[str, ...], str | None, str]:
    """Text with its cue, golds, key, and the form it came in."""
    if task == "squad_completion" and "question" in row and "text" not in row:
        answers = row.get("answers")
        answers = answers.get("text") if isinstance(answers, dict) else answers
        answers = [answers] if isinstance(answers, str) else answers  # one answer, not its letters
        asked = isinstance(row["question"], str) and isinstance(row.get("context"), str)
        if not asked or not isinstance(answers, list | tuple):
            raise ValueError(f"{where}: expected context, question and answers, got {sorted(row)}")
        golds = checked_golds(answers, where)
        return f"{row['context']}\nQuestion: {row['question']}\nAnswer:", golds, None, "question"
    missing = [name for name in FIELDS[task] if not isinstance(row.get(name), str)]
    if missing:
        raise ValueError(f"{where}: expected {', '.join(FIELDS[task])} for {task}, got {sorted(row)}")
    checked_golds((row["value"],), where)
    text, key = row["text"], row.get("key") if task != "squad_completion" else None
    if key and not text.rstrip().lower().endswith(f"{key}:".lower()):
        return f"{text.rstrip()}\n{key}:", (row["value"],), key, "cue added"
    return text, (row["value"],), key, "as given"


def _window(text: str, searched: list[str], tokenizer: Tokenizer, width: int) -> str:
    """`width` tokens, half of them before the earliest mention of any string."""
    places = [text.lower().find(x.lower()) for x in searched]
    place = min((x for x in places if x >= 0), default=-1)
    before = len(tokenizer.encode(text[:place]).ids)
    ids = tokenizer.encode(text).ids
    start = max(0, before - width // 2)
    end = min(len(ids), before + width - (before - start))
    return str(tokenizer.decode(ids[start:end], skip_special_tokens=True))


def _cue_again(task: str, text: str, key: str | None) -> str:
    if key is None:
        return text.strip()
    if task == "swde":
        text = text.split(SUMMARY)[0]
    cue = f"{key}:".lower()
    text = text.strip()
    while text.lower().endswith(cue):
        text = text[: -len(cue)].strip()
    text = (text.strip("\n") if task == "fda" else text.strip()).strip(".")
    return f"{text}. {key[0].upper()}{key[1:]}:"


def correct(prediction: str, gold: str) -> bool:
    """Whether the gold is in the first line of what was generated, in any case."""
    return re.search(re.escape(gold), prediction.split("\n")[0], re.IGNORECASE) is not None


def _row(name: str, title: str, dataset: str) -> RecallTask:
    return RecallTask(
        name=name,
        title=title,
        dataset=dataset,
        examples=partial(examples, name),
        new_tokens=NEW_TOKENS,
        correct=correct,
    )


TASKS = (
    _row("fda", "FDA", "hazyresearch/based-fda"),
    _row("swde", "SWDE", "hazyresearch/based-swde-v2"),
    _row("squad_completion", "SQuAD", "hazyresearch/based-squad"),
)
