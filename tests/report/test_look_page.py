"""The page of `qed look` in a real browser: what it holds is shown, by mouse, keyboard and touch, without a message."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qed.report.look import write_look
from tests.browser import Tab, opened
from tests.report.test_look import QUIET, TEXT, checkpoint, restored, shown, thinned, unpacked

TOKENS = 18
STYLES = """
[...document.querySelectorAll('#text .token')].map(x => ({
  read: Number(x.style.getPropertyValue('--size')), lost: Number(x.style.getPropertyValue('--bar')),
  negative: x.classList.contains('negative'), gained: x.classList.contains('gained'),
  chosen: x.classList.contains('chosen'), after: x.classList.contains('after'),
}))
"""
DRAWN = """
[...document.querySelectorAll('canvas')].filter(x => x.getClientRects().length).map(x => {
  const data = x.getContext('2d').getImageData(0, 0, x.width, x.height).data;
  return data.some((value, i) => i % 4 === 3 && value > 0);
})
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages of a model with λ and of one without."""
    base, made = tmp_path_factory.mktemp("pages"), {}
    for rule in ("qed", "gdn2"):
        made[rule] = base / f"{rule}.html"
        folder = checkpoint(base / rule, rule=rule)
        write_look(folder, TEXT, made[rule], tokenizer=None, device="cpu", console=QUIET)
    return made


def chosen(tab: Tab) -> int:
    (found,) = [i for i, x in enumerate(tab.run(STYLES)) if x["chosen"]]
    return found


def check(tab: Tab, head: dict[str, Any], token: int) -> None:
    """The text is marked as the maps say, for the chosen token of a head."""
    styles = tab.run(STYLES)
    read = restored(thinned(head["read"], TOKENS), TOKENS)[token]
    assert np.allclose([x["read"] for x in styles], abs(read) / abs(read).max(), atol=1e-6)
    assert [x["negative"] for x in styles] == [bool(x < 0) for x in read]
    assert [x["after"] for x in styles] == [i > token for i in range(TOKENS)]
    if head["lost"] is None:
        assert not any(x["lost"] for x in styles)
        return
    lost = restored(thinned(head["lost"], TOKENS), TOKENS)[token]
    assert np.allclose([x["lost"] for x in styles], abs(lost) / max(abs(lost).max(), 1e-30), atol=1e-6)
    strongest = tab.run("[...document.querySelectorAll('#reads tbody tr')].map(x => Number(x.dataset.token))")
    assert strongest == thinned(head["read"], TOKENS).index[token][:6].tolist()[: len(strongest)]
    changed = tab.run("[...document.querySelectorAll('#losses tbody tr')].map(x => Number(x.dataset.token))")
    assert changed == thinned(head["lost"], TOKENS).index[token][:6].tolist()[: len(changed)]
    assert (len(strongest), len(changed)) == tuple(min(6, np.count_nonzero(x)) for x in (read, lost))


def test_the_mouse_shows_what_a_token_reads_and_what_was_erased(pages: dict[str, Path]) -> None:
    data = shown(pages["qed"])
    with opened(pages["qed"]) as tab:
        assert chosen(tab) == TOKENS - 1
        check(tab, data["heads"][0], TOKENS - 1)
        tab.point("#token-11")
        assert chosen(tab) == 11
        check(tab, data["heads"][0], 11)
        tab.point("#token-8", click=True)  # held: the mouse may go elsewhere
        tab.point("#token-3")
        assert chosen(tab) == 8
        check(tab, data["heads"][0], 8)
        tab.point("#token-8", click=True)
        tab.point("#token-0")
        assert chosen(tab) == 0
        check(tab, data["heads"][0], 0)
        assert "Nothing: there is nothing before it." in tab.run("document.getElementById('detail').textContent")
        tab.point("#heads label:nth-child(3)", click=True)
        tab.point("#token-16")
        check(tab, data["heads"][2], 16)
        tab.point("#most", click=True)
        erased = unpacked(data["heads"][2]["erased"]["values"], "uint16")
        assert chosen(tab) == int(erased.argmax())
    assert tab.messages == []
    assert tab.requests == [pages["qed"].resolve().as_uri()]


def test_the_keyboard_does_the_same(pages: dict[str, Path]) -> None:
    data = shown(pages["qed"])
    with opened(pages["qed"], width=620) as tab:  # so that the text has several lines
        for _ in range(20):
            tab.press("Tab")
            if tab.run("document.activeElement.name") == "head":
                break
        tab.press("ArrowRight")
        assert tab.run("document.querySelector('#heads input:checked').value") == "1"
        for _ in range(4):
            tab.press("Tab")
            if tab.run("document.activeElement.id") == "text":
                break
        tab.press("ArrowLeft", 5)
        assert chosen(tab) == TOKENS - 6
        check(tab, data["heads"][1], TOKENS - 6)
        assert tab.run("document.getElementById('text').getAttribute('aria-activedescendant')") == f"token-{TOKENS - 6}"
        tab.press("ArrowRight", 7)  # there is nothing after the last token
        above = [tab.run(f"document.getElementById('token-{i}').offsetTop") for i in range(TOKENS)]
        assert above[0] < above[-1]
        tab.press("ArrowUp")
        assert above[0] <= above[chosen(tab)] < above[-1]
        tab.press("ArrowDown")
        assert above[chosen(tab)] == above[-1]
        tab.press("Enter")
        held = chosen(tab)
        tab.point("#token-2")
        assert chosen(tab) == held
        tab.press("Escape")
        tab.point("#token-2")
        tab.point("#token-3")
        assert chosen(tab) == 3
    assert tab.messages == []


@pytest.mark.parametrize("rule", ["qed", "gdn2"])
@pytest.mark.parametrize(("dark", "width"), [(False, 1280), (True, 1280), (False, 390), (True, 390)])
def test_it_is_readable_everywhere(pages: dict[str, Path], rule: str, dark: bool, width: int) -> None:
    with opened(pages[rule], dark=dark, width=width) as tab:
        for token in (17, 9, 0):
            tab.run(f"document.getElementById('token-{token}').click()")
            assert min(tab.contrasts())[0] >= 4.5
        tab.run("new Promise(requestAnimationFrame)")
        assert tab.overflow() == 0
        drawn = tab.run(DRAWN)
        assert all(drawn)
        # The sources, the state, the map or maps, and a strip for b, w and the decay; λ adds three.
        assert len(drawn) == (10 if rule == "qed" else 6)
        check(tab, shown(pages[rule])["heads"][0], 0)
    assert tab.messages == []


def test_a_finger_chooses_a_token(pages: dict[str, Path]) -> None:
    with opened(pages["qed"], width=390, height=800) as tab:
        tab.send("Emulation.setTouchEmulationEnabled", enabled=True)
        tab.run("document.getElementById('token-6').scrollIntoView({block: 'center'})")
        box = "document.getElementById('token-6').getBoundingClientRect()"
        x, y = tab.run(f"[{box}.x + {box}.width / 2, {box}.y + {box}.height / 2]")
        tab.send("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        tab.send("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        tab.run("new Promise(done => setTimeout(done, 300))")
        assert chosen(tab) == 6
        check(tab, shown(pages["qed"])["heads"][0], 6)
    assert tab.messages == []
