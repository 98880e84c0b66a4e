"""Templates are filled in with everything escaped, nothing forgotten and nothing from elsewhere."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from jinja2 import UndefinedError

from qed import pages
from tests.browser import opened


@pytest.fixture
def template(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    for path in pages.FOLDER.glob("*.*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    title, content = "{% block title %}{{ name }}{% endblock %}", "{% block content %}<p>{{ text }}</p>{% endblock %}"
    (tmp_path / "mine.html").write_text(f'{{% extends "base.html" %}}{title}{content}')
    monkeypatch.setattr(pages, "FOLDER", tmp_path)
    pages._environment.cache_clear()
    yield "mine.html"
    pages._environment.cache_clear()


def test_what_is_shown_is_escaped(template: str) -> None:
    page = pages.render(template, name="a < b", text="<script>alert('x')</script>")
    assert "<title>a &lt; b</title>" in page
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


def test_a_value_that_is_not_given_is_an_error(template: str) -> None:
    with pytest.raises(UndefinedError, match="'text' is undefined"):
        pages.render(template, name="a")


def test_the_style_sheet_is_inside_and_nothing_comes_from_elsewhere(template: str) -> None:
    page = pages.render(template, name="a", text="b")
    assert (pages.FOLDER / "style.css").read_text() in page
    assert "default-src 'none'" in page
    assert re.findall(r"(?:src|href)=\"(?!#|data:)[^\"]*\"|url\(|@import", page) == []


@pytest.mark.slow
def test_the_browser_helper_sees_what_is_wrong(tmp_path: Path) -> None:
    """A message, a picture from elsewhere, a page that is too wide and a text too pale are all noticed."""
    page = tmp_path / "bad.html"
    page.write_text(
        "<!doctype html><body style='background:#fff'><p style='color:#bbb'>pale</p><p style='width:2000px'>wide</p>"
        "<button id='b' onclick='document.title=\"pressed\"'>b</button><script>console.log('said')</script>"
        "<script>nothing.there</script>"
    )
    with opened(page, width=400) as tab:
        assert tab.overflow() > 1000
        assert tab.contrasts()[0][1] == "pale"
        assert tab.contrasts()[0][0] == pytest.approx(1.92, abs=0.01)
        tab.press("Tab")
        assert tab.run("document.activeElement.id") == "b"
        tab.press("Enter")
        assert tab.run("document.title") == "pressed"
    assert tab.messages[0] == "said"
    assert "ReferenceError" in tab.messages[1]
    with opened(page, dark=True) as tab:
        assert tab.run("matchMedia('(prefers-color-scheme: dark)').matches")
