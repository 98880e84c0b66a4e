"""The page in a real browser: light and dark, wide and narrow, by mouse and by keyboard."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import Tab, opened

pytestmark = pytest.mark.slow

LOOKS = {"light": (False, 1280), "dark": (True, 1280), "phone": (False, 390), "dark phone": (True, 390)}
READABLE = 4.5  # WCAG AA
CELL = "document.activeElement.matches('#table-table3_niah_single_1 button')"
OPEN = "document.querySelector('#examples').open"


@pytest.fixture
def tab(page: Path) -> Iterator[Tab]:
    with opened(page) as tab:
        yield tab
    assert tab.messages == []


@pytest.mark.parametrize("look", LOOKS)
def test_it_fits_and_is_readable(page: Path, look: str) -> None:
    """Nothing is said on the console, nothing loaded, the page never scrolls sideways, and text has enough contrast."""
    dark, width = LOOKS[look]
    with opened(page, dark=dark, width=width) as tab:
        assert tab.overflow() <= 0
        assert tab.contrasts()[0][0] >= READABLE, tab.contrasts()[:5]
        assert len(tab.contrasts()) > 500
        tab.point("#table-table3_niah_single_1 button", click=True)
        assert tab.run(OPEN)
        assert tab.overflow() <= 0
        assert tab.contrasts()[0][0] >= READABLE, tab.contrasts()[:5]
        ground = tab.run("getComputedStyle(document.body).backgroundColor")
        assert ground == ("rgb(22, 24, 28)" if dark else "rgb(255, 255, 255)")
    assert tab.messages == []
    assert tab.requests == [page.resolve().as_uri()]


def test_examples_by_keyboard(tab: Tab) -> None:
    """Tab reaches a cell, Enter opens its examples, Escape closes them and gives the focus back."""
    for _ in range(200):
        tab.press("Tab")
        if tab.run(CELL):
            break
    tab.press("Tab", 5)  # past GDN-2's four lengths and its recall
    assert tab.run("document.activeElement.closest('tr').cells[0].textContent.trim()") == "QED, seed 0"
    tab.press("Tab")
    assert tab.run("document.activeElement.textContent") == "95.0 [88.7, 98.4]"
    tab.press("Enter")
    assert tab.run(OPEN)
    assert tab.run("document.querySelector('#examples h2').textContent") == "QED, seed 0: S-NIAH-1 1K"
    assert tab.run("document.querySelector('#examples').contains(document.activeElement)")
    shown = tab.run("document.querySelector('#examples .body').innerText")
    assert "One of the numbers for key-95 is: 95." in shown
    assert "What is the number for key-95? It is" in shown
    assert "</script><script>alert('x')</script>" in shown  # as text
    tab.press("Escape")
    assert not tab.run(OPEN)
    assert tab.run("document.activeElement.textContent") == "95.0 [88.7, 98.4]"


def test_values_under_the_pointer_and_by_arrow_keys(tab: Tab) -> None:
    told = "document.getElementById('tip').hidden ? '' : document.getElementById('tip').textContent"
    figure = "#figure-figure1_niah_single_1"
    assert tab.run(told) == ""
    tab.point(f"{figure} .panel:nth-child(2) g[data-name='QED'] .mark:nth-of-type(5)")  # of 1K
    assert tab.run(told) == "QED · 1,024 tokens: 95.0 % [88.8 %, 97.8 %]"
    tab.point("h1")
    assert tab.run(told) == ""
    tab.run(f"document.querySelector('{figure} .chart').focus()")
    tab.settle()
    tab.press("ArrowRight", 2)
    assert tab.run(told) == "GDN-2 · 1,024 tokens: 80.0 % [71.1 %, 86.7 %]"
    tab.press("ArrowLeft")
    assert tab.run(told).startswith("GDN-2 · 512 tokens: 100.0 %")
    tab.press("Escape")
    assert tab.run(told) == ""
    tab.point("#figure-depth_niah_single_1 td[data-said*='GDN-2, 4K, depth 0–10']")
    assert tab.run(told) == "GDN-2, 4K, depth 0–10 %: 20 of 20 right"


def test_the_first_column_stays_while_a_table_is_scrolled(page: Path) -> None:
    with opened(page, width=390) as tab:
        box = "document.querySelector('#table-table3_niah_single_1 .scroll')"
        cell = f"{box}.querySelector('tbody tr th').getBoundingClientRect().left"
        before = tab.run(cell)
        other = tab.run(f"{box}.querySelector('tbody td').getBoundingClientRect().left")
        tab.run(f"{box}.scrollLeft = 200")
        assert tab.run(f"{box}.scrollLeft") == 200
        assert tab.run(cell) == before
        assert tab.run(f"{box}.querySelector('tbody td').getBoundingClientRect().left") == other - 200
