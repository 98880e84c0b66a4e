"""Tables as text, CSV and markdown, and what the page says of single cells."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..analysis.results import Result

MISSING = "missing"
Place = tuple[int, int]  # of a cell: its row and its column


def beside(ours: Sequence[str], theirs: Sequence[str]) -> dict[str, Any]:
    """Return the arguments `columns` and `theirs` of a table whose last columns are the paper's."""
    return {"columns": [*ours, *theirs], "theirs": set(range(len(ours), len(ours) + len(theirs)))}


@dataclass(kw_only=True)
class Table:
    """A table with a title above it and a note below it. A cell that is None is shown as missing."""

    name: str  # of its files
    title: str
    columns: list[str]
    rows: list[list[str | None]]
    note: str = ""
    theirs: set[int] = field(default_factory=set)  # columns that are the paper's
    prose: set[int] = field(default_factory=set)  # columns of sentences, whose lines are broken on the page
    verbatim: set[int] = field(default_factory=set)  # columns of commands, which stay as they are
    answers: int | None = None  # the column of verdicts, which have colours on the page
    sources: dict[Place, Result] = field(default_factory=dict)  # results that cells were counted from
    why: dict[Place, str] = field(default_factory=dict)  # why cells are missing, where more is known than that
    absent: str = "not evaluated"  # why the others are missing
    unlike: dict[Place, str] = field(default_factory=dict)  # cells that are not comparable, with the reason

    def head(self) -> list[str]:
        """The titles of the columns; those of the paper's say so."""
        return [f"paper: {title}" if i in self.theirs else title for i, title in enumerate(self.columns)]

    def cells(self) -> list[list[str]]:
        """The rows, with a word for what is missing."""
        return [[MISSING if cell is None else cell for cell in row] for row in self.rows]

    def reason(self, row: int, column: int) -> str:
        """Why a cell has no value."""
        usual = "not in the paper" if column in self.theirs else self.absent
        return self.why.get((row, column), usual)

    def csv(self) -> str:
        """The table as CSV, without its title and note."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.head())
        writer.writerows(self.cells())
        return text.getvalue()

    def markdown(self) -> str:
        """The table as markdown."""
        lines = [f"**{self.title}**", "", "| " + " | ".join(self.head()) + " |", "|" + "---|" * len(self.columns)]
        lines += ["| " + " | ".join(row) + " |" for row in self.cells()]
        return "\n".join([*lines, *(["", self.note] if self.note else [])]) + "\n"
