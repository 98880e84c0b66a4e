"""Tables and charts as the template of the page wants them: what every cell and every panel shows, and how."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from . import svg
from .charts import Chart, Heat, Panel, Series
from .examples import Examples
from .markup import Table

# How an answer is coloured, by the word that it begins with.
TAGS = {"yes": "good", "contrary": "bad", "different": "bad", "undecided": "open"}


MINUS = re.compile(r"(?<!\w)-(?=\d)")  # a hyphen that stands for a minus sign
NUMBER = re.compile(r"[\[+\-−]?[\d.]+([ \],%]|$)")


def typeset(text: str) -> str:
    """The text with minus signs before numbers, where files have hyphens."""
    return MINUS.sub("−", text)


def tag(answer: str) -> str:
    """The class of an answer."""
    return TAGS.get(answer.split(",")[0], "none")


def table(shown: Table, examples: Examples, links: Iterable[str] = ()) -> dict[str, Any]:
    """A table for the template. Arm and seed are one column there, which stays in place while others are scrolled.

    Args:
        shown: the table.
        examples: to which those behind the table's cells are added.
        links: files of the table beside the page.
    """
    merged = set(shown.columns[:2]) == {"arm", "seed"}
    heads = [
        {"text": text, "kinds": " ".join(_kinds(shown, i)), "theirs": i in shown.theirs}
        for i, text in enumerate(shown.columns)
    ]
    rows = [[_cell(shown, i, j, examples) for j in range(len(row))] for i, row in enumerate(shown.rows)]
    if merged:
        arm, seed = shown.columns.index("arm"), shown.columns.index("seed")
        heads = [{"text": "arm and seed", "kinds": "", "theirs": False}, *heads[2:]]
        rows = [[row[arm] | {"text": f"{row[arm]['text']}, seed {row[seed]['text']}"}, *row[2:]] for row in rows]
    return {
        "name": shown.name,
        "title": shown.title,
        "heads": heads,
        "rows": rows,
        "note": shown.note,
        "links": list(links),
        "theirs": bool(shown.theirs),
        "examples": any(cell["examples"] is not None for row in rows for cell in row),
    }


def _kinds(shown: Table, column: int) -> list[str]:
    """The classes of a column: the paper's, sentences whose lines are broken, or words, which are aligned left."""
    texts = [row[column] for row in shown.rows if row[column]]
    words = sum(NUMBER.match(text) is None for text in texts if text) > len(texts) / 2
    kinds = {
        "theirs": column in shown.theirs,
        "prose": column in shown.prose,
        "mono": column in shown.verbatim,
        "words": words,
    }
    return [kind for kind, is_so in kinds.items() if is_so]


def _cell(shown: Table, row: int, column: int, examples: Examples) -> dict[str, Any]:
    text, source = shown.rows[row][column], shown.sources.get((row, column))
    kinds = _kinds(shown, column) + ([] if text else ["absent"])
    if column not in shown.verbatim:
        text = text and typeset(text)
    return {
        "text": shown.reason(row, column) if text is None else text or "does not apply",
        "kinds": " ".join(kinds),
        "tag": tag(text) if column == shown.answers and text else "",
        "examples": None if source is None else examples.behind(source),
        "unlike": shown.unlike.get((row, column)),
    }


def chart(name: str, shown: Chart, links: Iterable[str] = ()) -> dict[str, Any]:
    """A chart for the template.

    Args:
        name: of its files.
        shown: the chart.
        links: files of the chart beside the page.
    """
    return {
        "name": name,
        "title": shown.title,
        "caption": shown.caption,
        "wide": len(shown.panels) > 1,
        "panels": [_panel(panel) for panel in shown.panels],
        "key": shown.key,
        "legend": _legend(panel for panel in shown.panels if isinstance(panel, Panel)),
        "links": list(links),
    }


def _panel(panel: Panel | Heat) -> dict[str, Any]:
    if isinstance(panel, Panel):
        return {"title": panel.title, "svg": svg.drawn(panel), "heat": None}
    cells = [
        [_shaded(value, panel, text) for value, text in zip(values, said, strict=True)]
        for values, said in zip(panel.values, panel.said, strict=True)
    ]
    return {"title": panel.title, "svg": None, "heat": panel, "cells": list(zip(panel.rows, cells, strict=True))}


def _shaded(value: float | None, panel: Heat, said: str) -> dict[str, str]:
    if value is None:
        return {"text": "–", "style": "", "said": said}
    colour = svg.shade(value / panel.most)
    ground = "#{:02x}{:02x}{:02x}".format(*colour)
    text = f"{value:.{panel.digits}f}"
    return {
        "text": text.removeprefix("0") if panel.most <= 1 else text,
        "style": f"background:{ground};color:{svg.ink_on(colour)}",
        "said": said,
    }


def _legend(panels: Iterable[Panel]) -> list[dict[str, Any]]:
    """The names of all series that are listed, each once, with its look."""
    named: dict[str, Series] = {}
    for panel in panels:
        for series in panel.series:
            if series.listed:
                named.setdefault(series.name, series)
    return [{"name": name, "mark": svg.sample(series)} for name, series in named.items()] if len(named) > 1 else []
