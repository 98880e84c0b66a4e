"""FDA, SWDE and SQuAD: is a value that stood in the text said again after its key?

| variant | prompt | gold |
|---|---|---|
| A0 (Based's harness, lm-eval to 0.4.12) | the text as it is | the value as it is |
| A1 (lm-eval 0.4.13) | stripped | stripped |
| B (JRT) | a window of C − 50 tokens about the first mention of key or value, then the cue anew | the value as it is |

The variants' figures are not comparable, and every result names its own. Correct: the gold is in the first line of 48
new tokens, in any case. Files in other shapes than Based's are taken too, and a result's `forms` say so: texts that do
not end in their cue get it ("cue added"), and SQuAD's questions are asked as questions ("question").
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

NEW_TOKENS = 48
ANSWER_TOKENS = 50
VARIANTS = ("A0", "A1", "B")
DATASETS = {
    "fda": "hazyresearch/based-fda",
    "swde": "hazyresearch/based-swde-v2",
    "squad_completion": "hazyresearch/based-squad",
}
FIELDS = {"fda": ("key", "value", "text"), "swde": ("key", "value", "text"), "squad_completion": ("value", "text")}
SUMMARY = "Summary of information above..."


@dataclass(frozen=True, kw_only=True)
class Example:
    prompt: str
    golds: tuple[str, ...]
    form: str  # "as given", "cue added" or "question"
    document: str  # examples of one document are not independent


def examples(
    task: str,
    rows: Iterable[tuple[int, dict[str, Any]]],
    *,
    variant: str,
    tokenizer: Tokenizer,
    context: int,
    where: str,
) -> Iterator[Example]:
    """`rows` with their numbers. `context`: C of variant B. `where` the rows come from, for errors."""
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
        golds = checked(tuple(answers), where)
        return f"{row['context']}\nQuestion: {row['question']}\nAnswer:", golds, None, "question"
    missing = [name for name in FIELDS[task] if not isinstance(row.get(name), str)]
    if missing:
        raise ValueError(f"{where}: expected {', '.join(FIELDS[task])} for {task}, got {sorted(row)}")
    checked((row["value"],), where)
    text, key = row["text"], row.get("key") if task != "squad_completion" else None
    if key and not text.rstrip().lower().endswith(f"{key}:".lower()):
        return f"{text.rstrip()}\n{key}:", (row["value"],), key, "cue added"
    return text, (row["value"],), key, "as given"


def checked(golds: tuple[Any, ...], where: str) -> tuple[str, ...]:
    """Golds with something to be said: an empty one stands in any prediction, and would count all as right."""
    if not golds:
        raise ValueError(f"{where}: expected an answer, got none")
    for gold in golds:
        if not isinstance(gold, str) or not gold.strip():
            raise ValueError(f"{where}: expected an answer with at least one character, got {gold!r}")
    return golds


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


def correct(prediction: str, golds: tuple[str, ...]) -> bool:
    line = prediction.split("\n")[0]
    return any(re.search(re.escape(gold), line, re.IGNORECASE) is not None for gold in golds)


def survives(prompt: str, golds: tuple[str, ...]) -> bool:
    """Whether there is anything to recall: a gold stands in the prompt."""
    return any(gold.lower() in prompt.lower() for gold in golds)
