"""Tables, lists and pictures as text: CSV, markdown and HTML."""

from __future__ import annotations

import base64
import csv
import io
from dataclasses import dataclass, field
from html import escape

MISSING = "missing"
STYLE = """
:root { color-scheme: light dark;
  --ink: #1b1d21; --page: #ffffff; --line: #d5d8de; --soft: #f3f4f7; --theirs: #7a5c00; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e6e6; --page: #16181c; --line: #3a3f47; --soft: #20242a; --theirs: #e0b84a; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page);
  margin: 0 auto; max-width: 68rem; padding: 1rem; }
h1 { line-height: 1.2; } h2 { margin-top: 2.2rem; border-bottom: 1px solid var(--line); } h3 { margin-bottom: .4rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .85rem; white-space: nowrap; }
th, td { border: 1px solid var(--line); padding: .25rem .5rem; text-align: right; } th { background: var(--soft); }
.paper { color: var(--theirs); font-style: italic; } .missing { opacity: .55; }
.note { font-size: .85rem; opacity: .8; }
img { max-width: 100%; height: auto; } li { margin: .35rem 0; }
"""


@dataclass(kw_only=True)
class Table:
    """A table with a title above it and a note below it. A cell that is None is shown as missing."""

    name: str  # of its files
    title: str
    columns: list[str]
    rows: list[list[str | None]]
    note: str = ""
    theirs: set[int] = field(default_factory=set)  # columns that are the paper's

    def head(self) -> list[str]:
        """The titles of the columns; those of the paper's say so."""
        return [f"paper: {title}" if i in self.theirs else title for i, title in enumerate(self.columns)]

    def cells(self) -> list[list[str]]:
        """The rows, with a word for what is missing."""
        return [[MISSING if cell is None else cell for cell in row] for row in self.rows]

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

    def html(self) -> str:
        """The table as HTML, with classes for the paper's columns and for missing cells."""

        def cell(tag: str, i: int, text: str) -> str:
            kinds = [k for k, is_so in (("paper", i in self.theirs), ("missing", text == MISSING)) if is_so]
            return f"<{tag}{' class=' + chr(34) + ' '.join(kinds) + chr(34) if kinds else ''}>{escape(text)}</{tag}>"

        head = "".join(cell("th", i, title) for i, title in enumerate(self.head()))
        body = "".join(
            "<tr>" + "".join(cell("td", i, text) for i, text in enumerate(row)) + "</tr>\n" for row in self.cells()
        )
        note = f"<p class='note'>{escape(self.note)}</p>" if self.note else ""
        return f"<h3>{escape(self.title)}</h3><div class='wide'><table><tr>{head}</tr>\n{body}</table></div>{note}"


def html_list(items: list[str]) -> str:
    """The items as an HTML list."""
    return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>"


def html_picture(title: str, light: bytes, dark: bytes) -> str:
    """A figure with its title, inside the page.

    Args:
        title: above the figure, and for those who do not see it.
        light: the figure as SVG for a light page.
        dark: the figure as SVG for a dark page.
    """
    on_light, on_dark = (base64.b64encode(svg).decode() for svg in (light, dark))
    return (
        f"<h3>{escape(title)}</h3><picture>"
        f"<source media='(prefers-color-scheme: dark)' srcset='data:image/svg+xml;base64,{on_dark}'>"
        f"<img alt='{escape(title)}' src='data:image/svg+xml;base64,{on_light}'></picture>"
    )


def html_page(sections: list[str]) -> str:
    """The whole page, which needs nothing from elsewhere."""
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<link rel='icon' href='data:,'><title>QED: results</title><style>{STYLE}</style></head>"
        "<body><h1>The Query Knows What to Forget: results</h1>"
        "<p>The paper's own numbers are in columns <span class='paper'>like this</span>.</p>"
        f"{chr(10).join(sections)}</body></html>\n"
    )
