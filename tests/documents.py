"""The pages that people read, and the blocks of code in them."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.S | re.M)
INLINE = re.compile(r"`(qed [a-z][^`]*)`")


class Block(NamedTuple):
    """A block between fences."""

    language: str
    code: str


def name(page: Path) -> str:
    """What a page is called in the names of tests."""
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[Block]:
    """All blocks of a page, in their order."""
    return [Block(x["language"], x["code"]) for x in BLOCK.finditer(page.read_text())]


def commands(code: str) -> Iterator[list[str]]:
    """The commands of a block, word by word, without comments."""
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words


def inline(page: Path) -> list[str]:
    """The commands that stand in a page's sentences, which may be cut short."""
    return [" ".join(x.split()) for x in INLINE.findall(BLOCK.sub("", page.read_text()))]
