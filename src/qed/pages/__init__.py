"""Pages: self-contained HTML from Jinja2 templates. All templates, the style sheet and the scripts lie in this folder.

A page extends `base.html`, which has the style sheet inlined and forbids the browser to load anything from elsewhere.
Everything that a template shows is escaped.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

FOLDER = Path(__file__).parent


@lru_cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals["file"] = file
    return environment


def file(name: str) -> Markup:
    """The text of a style sheet or script of this folder, as it stands, to be inlined by a template."""
    return Markup((FOLDER / name).read_text(encoding="utf-8"))  # it is ours, and not escaped


def render(template: str, **values: Any) -> str:
    """Return a template with these values filled in, as the text of a page.

    Args:
        template: the name of a template of this folder, such as "report.html".
        values: what the template shows, by name. A name that the template uses and that is not given is an error.
    """
    return _environment().get_template(template).render(**values)
