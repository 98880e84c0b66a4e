"""Results packed to be kept: a folder's answers in one file, and what all runs say alike of their prompts in another.

    BASE/runs/NAME/eval/answers.jsonl.xz    a line for each result: name, summary, every prediction and its score
    BASE/examples.jsonl.xz                  a line for each set of prompts: all else that results say of its examples

A line of TASK-LENGTH.jsonl is the two put together, and `qed report` reads either form. Many trainings answer the same
prompts, so that most of what their lines say is the same: packed like this they take less than a third.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from .records import lines

ANSWERS, EXAMPLES = "answers.jsonl.xz", "examples.jsonl.xz"
OWN = ("index", "prediction", "correct", "finite")  # fields of a line that are not about its prompt
LEVELS = 5  # folders above the answers in which the examples may be
Rows = list[dict[str, Any]]


def compressed(rows: Iterable[dict[str, Any]]) -> bytes:
    """Objects as the content of a .jsonl.xz."""
    text = "".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n" for row in rows)
    return lzma.compress(text.encode(), preset=9)


class Examples:
    """What is said of the prompts of all results under a folder, once for each set of prompts."""

    def __init__(self, base: Path):
        self.path = base / EXAMPLES
        self.known = dict(_read(self.path, self.path.stat().st_mtime_ns)) if self.path.exists() else {}

    def add(self, prompts: str, rows: Rows) -> None:
        """Adds what a run's lines say of a set of prompts; ValueError if another run said something else of it."""
        said = [{name: x for name, x in row.items() if name not in OWN} for row in rows]
        if self.known.setdefault(prompts, said) != said:
            raise ValueError(f"{self.path}: expected the same of prompts {prompts} from every run, got something else")

    def compressed(self) -> bytes:
        """The content of the file of examples."""
        return compressed({"prompts": name, "examples": x} for name, x in sorted(self.known.items()))


@lru_cache
def _read(path: Path, changed: int) -> dict[str, Rows]:
    """The examples in a file. `changed` is the time of its last change, so that a changed file is read again."""
    del changed
    return {row["prompts"]: row["examples"] for row in lines(path)}


def packable(summary: dict[str, Any], rows: Rows) -> bool:
    """Whether a result is finished, and its lines are of all examples from the first to the last."""
    return "result" in summary and sorted(row["index"] for row in rows) == list(range(len(rows)))


def packed(name: str, summary: dict[str, Any], rows: Rows, examples: Examples) -> dict[str, Any]:
    """The line of a result in a folder's file of answers.

    Args:
        name: of the result, such as "niah_single_1-4096".
        summary: the content of its .json.
        rows: the lines of its .jsonl, in any order.
        examples: to which is added what the lines say of the prompts.
    """
    ordered = sorted(rows, key=lambda row: row["index"])
    examples.add(summary["about"]["prompts"], ordered)
    answers = [[row["prediction"], row["correct"], *([False] if "finite" in row else [])] for row in ordered]
    return {"name": name, "summary": summary, "answers": answers}


def unpacked(folder: Path) -> dict[str, tuple[dict[str, Any], Rows]]:
    """The summaries and lines of all packed results of a folder, by name."""
    path = folder / ANSWERS
    if not path.exists():
        return {}
    base = next((x for x in list(folder.parents)[:LEVELS] if (x / EXAMPLES).exists()), None)
    if base is None:
        raise ValueError(f"{path}: expected {EXAMPLES} in a folder above it, got none")
    examples = Examples(base).known
    results = {}
    for row in lines(path):
        try:
            name, summary, answers = row["name"], row["summary"], row["answers"]
            said = examples[summary["about"]["prompts"]]
            results[name] = (
                summary,
                [
                    {"index": i, "prediction": text, "correct": score} | ({"finite": False} if more else {}) | about
                    for i, ((text, score, *more), about) in enumerate(zip(answers, said, strict=True))
                ],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: expected results and their answers, got: {error!r}") from error
    return results
