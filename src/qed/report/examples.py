"""The examples behind a cell of an accuracy table: the needle, the question, the answer, and what the model said.

The haystack is not among them. Examples that many cells share are kept once.
"""

from __future__ import annotations

from typing import Any

from ..analysis.names import name_of, result_title
from ..analysis.results import Result, Run

WRONG, RIGHT = 3, 2  # examples of each kind behind a cell, where there are so many
LONGEST = 400  # characters of a text


class Examples:
    """The examples of all cells of a page."""

    def __init__(self, runs: list[Run]):
        self._runs = runs
        self._cells: dict[str, tuple[int, dict[str, Any]]] = {}  # by the path of the result, with its number
        self._prompts: dict[tuple[str, int], tuple[int, dict[str, Any]]] = {}

    def behind(self, result: Result) -> int | None:
        """The number by which a cell refers to its examples; None where no answers were kept."""
        key = str(result.path)
        if key not in self._cells:
            chosen = picked(result)
            if not chosen:
                return None
            answers = [[self._prompt(result, row), _text(row["prediction"]), bool(row["correct"])] for row in chosen]
            cell = {"title": self._title(result), "said": _introduced(result, chosen), "examples": answers}
            self._cells[key] = (len(self._cells), cell)
        return self._cells[key][0]

    def _title(self, result: Result) -> str:
        run = next(x for x in self._runs if result.path.is_relative_to(x.path))
        scale = result.about.get("strength", 1.0)
        scaled = "" if scale == 1 else f", λ scaled by {scale:g}"
        return f"{name_of(run.arm)}, seed {run.seed}{scaled}: {result_title(result.path.stem, [result])}"

    def _prompt(self, result: Result, row: dict[str, Any]) -> int:
        """The place of an example's prompt among all prompts."""
        gold = row.get("gold")
        said = {
            "example": row["index"],
            "needle": row.get("needle"),
            "question": row.get("question"),
            "answer": " or ".join(map(str, gold)) if isinstance(gold, list) else gold,
            "tokens": row.get("tokens"),
            "depth": row.get("depth"),
            "document": row.get("document"),
        }
        key = (str(result.about.get("prompts")), row["index"])
        kept = {name: _text(x) for name, x in said.items() if x is not None}
        return self._prompts.setdefault(key, (len(self._prompts), kept))[0]

    def data(self) -> dict[str, Any]:
        """All that the page needs to show them."""
        return {
            name: [x for _, x in some.values()] for name, some in (("cells", self._cells), ("prompts", self._prompts))
        }


def _introduced(result: Result, chosen: list[dict[str, Any]]) -> str:
    """What is said above the examples: how many there are, which are shown, and what was not kept of them."""
    said = f"{result.result['correct']} of {result.result['samples']} are right. "
    kinds = [
        kind for kind, right in (("wrong", False), ("right", True)) if any(bool(x["correct"]) is right for x in chosen)
    ]
    said += f"Here are the first {' ones and the first '.join(kinds)} ones."
    parts = {"needle": "the needle", "question": "the question", "gold": "the right answer"}
    lost = [name for part, name in parts.items() if not any(part in row for row in chosen)]
    return f"{said} The result files do not have {' and '.join(lost)}." if lost else said


def picked(result: Result) -> list[dict[str, Any]]:
    """The first wrong and the first right answers of a result, the wrong ones first; none where none were kept."""
    rows = sorted((row for row in result.rows if isinstance(row.get("prediction"), str)), key=lambda row: row["index"])
    wrong, right = ([row for row in rows if bool(row["correct"]) is kind] for kind in (False, True))
    return [*wrong[: WRONG + max(0, RIGHT - len(right))], *right[: RIGHT + max(0, WRONG - len(wrong))]]


def _text(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 1)
    return f"{value[:LONGEST]}…" if isinstance(value, str) and len(value) > LONGEST else value
