"""Examples with the fields and about the lengths of real data sets, of made-up words: for timing and for tests.

Nothing can be learned from scores on them. They are drawn from a seed, and need no network.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from ..eval.records import write_lines
from ..files import write_json

CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
Row = dict[str, Any]


class Words:
    """Made-up words, sentences and choices, drawn from a seed."""

    def __init__(self, seed: str):
        self.random = Random(seed)

    def text(self, least: int, most: int) -> str:
        """So many words, without an end."""
        count = self.random.randint(least, most)
        return " ".join(
            "".join(
                self.random.choice(CONSONANTS) + self.random.choice(VOWELS) for _ in range(self.random.randint(1, 3))
            )
            for _ in range(count)
        )

    def sentence(self, least: int, most: int) -> str:
        """A sentence of so many words."""
        return f"{self.text(least, most).capitalize()}."

    def number(self, count: int) -> int:
        """A number from 0, less than `count`."""
        return self.random.randrange(count)

    def choices(self, count: int, least: int, most: int) -> Row:
        """Choices as ARC has them, and the letter of the right one.

        Args:
            count: how many choices.
            least: words of each, at least.
            most: words of each, at most.
        """
        labels = [*"ABCDE"][:count]
        texts = [self.text(least, most) for _ in labels]
        return {"choices": {"text": texts, "label": labels}, "answerKey": labels[self.number(count)]}


ROWS: dict[str, Callable[[Words], Row]] = {
    "wikitext": lambda x: {"page": f" = {x.text(1, 3)} = \n\n {' '.join(x.sentence(8, 30) for _ in range(60))} \n"},
    "lambada_openai": lambda x: {"text": f"{' '.join(x.sentence(8, 20) for _ in range(5))} {x.text(6, 12)}"},
    "piqa": lambda x: {
        "goal": x.sentence(4, 10), "sol1": x.sentence(8, 24), "sol2": x.sentence(8, 24), "label": x.number(2)
    },
    "hellaswag": lambda x: {
        "activity_label": x.text(1, 3).capitalize(),
        "ctx_a": x.sentence(20, 50),
        "ctx_b": x.text(1, 5),
        "endings": [x.text(10, 30) for _ in range(4)],
        "label": str(x.number(4)),
    },
    "winogrande": lambda x: {
        "sentence": f"{x.text(10, 14).capitalize()} _ {x.text(3, 6)}.",
        "option1": x.text(1, 1), "option2": x.text(1, 1), "answer": str(1 + x.number(2)),
    },
    "arc_easy": lambda x: {"question": f"{x.text(12, 30).capitalize()}?", **x.choices(4, 1, 8)},
    "arc_challenge": lambda x: {"question": f"{x.text(15, 35).capitalize()}?", **x.choices(4, 2, 10)},
    "boolq": lambda x: {"passage": x.sentence(80, 160), "question": x.text(6, 10), "label": x.number(2)},
    "sciq": lambda x: {
        "support": x.sentence(50, 110),
        "question": f"{x.text(10, 18).capitalize()}?",
        **{name: x.text(1, 2) for name in ("distractor1", "distractor2", "distractor3", "correct_answer")},
    },
    "copa": lambda x: {
        "premise": x.sentence(5, 8),
        "question": ("cause", "effect")[x.number(2)],
        "choice1": x.sentence(4, 7), "choice2": x.sentence(4, 7), "label": x.number(2),
    },
    "openbookqa": lambda x: {"question_stem": x.text(8, 14).capitalize(), **x.choices(4, 1, 5)},
}  # fmt: skip


# Examples of the real data sets that lm-eval asks. A small benchmark keeps their proportions.
SIZES = {
    "wikitext": 62, "lambada_openai": 5153, "piqa": 1838, "hellaswag": 10042, "winogrande": 1267, "arc_easy": 2376,
    "arc_challenge": 1172, "boolq": 3270, "sciq": 1000, "copa": 100, "openbookqa": 500,
}  # fmt: skip


def rows(task: str, count: int, seed: int = 0) -> list[Row]:
    """Examples of a task of the suite "commonsense".

    Args:
        task: its name in lm-eval.
        count: how many.
        seed: of everything random.
    """
    words = Words(f"{task}/{seed}")
    return [ROWS[task](words) for _ in range(count)]


def squad(count: int, paragraphs: int = 4, seed: int = 0) -> Row:
    """Articles with questions in the form of SQuAD's dev-v2.0.json.

    Args:
        count: how many articles.
        paragraphs: of each, with a question each.
        seed: of everything random.
    """
    words, articles = Words(f"squad/{seed}"), []
    for _ in range(count):
        parts = []
        for _ in range(paragraphs):
            context = words.sentence(60, 120)
            answer = " ".join(context.split()[10:12])
            asked = {"question": f"{words.text(6, 12).capitalize()}?", "answers": [{"text": answer}]}
            parts.append({"context": context, "qas": [asked | {"is_impossible": False}]})
        articles.append({"paragraphs": parts})
    return {"data": articles}


def hotpot(count: int, seed: int = 0) -> list[Row]:
    """Questions in the form of HotpotQA's hotpot_dev_distractor_v1.json.

    Args:
        count: how many.
        seed: of everything random.
    """
    words = Words(f"hotpot/{seed}")
    return [
        {
            "question": f"{words.text(8, 16).capitalize()}?",
            "answer": words.text(1, 2),
            "context": [[words.text(1, 2), [words.sentence(5, 10), words.sentence(5, 10)]] for _ in range(2)],
        }
        for _ in range(count)
    ]


def write(folder: Path, tasks: list[str], count: int, *, in_proportion: bool = False) -> dict[str, Path]:
    """Writes a file for every one of these tasks that reads one, and returns the files by task.

    Args:
        folder: where to write; names of files are those of tasks.
        tasks: of any suite.
        count: examples of each; articles of SQuAD.
        in_proportion: that many of the largest task, and of others in proportion to their real data sets.
    """
    files = {}
    for task in tasks:
        if task in ROWS:
            files[task] = folder / f"{task}.jsonl"
            share = SIZES[task] / max(SIZES.values()) if in_proportion else 1
            write_lines(files[task], rows(task, math.ceil(count * share)))
        elif task in ("ruler_qa_squad", "ruler_qa_hotpot"):
            files[task] = folder / f"{task}.json"
            write_json(files[task], squad(count) if task == "ruler_qa_squad" else hotpot(4 * count))
    return files


def essays(folder: Path, count: int = 40_000) -> Path:
    """Writes an essay of about so many words, and returns its file."""
    words, file = Words("essays"), folder / "essays.json"
    file.write_text(json.dumps({"text": " ".join(words.sentence(8, 20) for _ in range(count // 14))}))
    return file
