"""Keys of needles, "adjective-noun": any string of the sorted list of all different ones, without making that list.

With wonderwords' 912 adjectives and 6,782 nouns it has six million strings. Those of one adjective stand together in
it, in the order of the nouns, unless another adjective begins with the first and a hyphen; those few are sorted whole.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from importlib import resources
from itertools import accumulate
from pathlib import Path

FILES = ("adjectivelist.txt", "nounlist.txt")


class Keys(Sequence[str]):
    """The list, as `random.choice` needs it: a length and the string at any place."""

    def __init__(self, adjectives: list[str], nouns: list[str]):
        if not adjectives or not nouns:
            raise ValueError("--words: expected adjectives and nouns, got an empty list")
        self.nouns = sorted(set(nouns))
        stems = sorted({f"{x}-" for x in adjectives})
        self.blocks: list[tuple[str, list[str]]] = []  # what all strings of a block begin with, and their endings
        while stems:
            stem = stems.pop(0)
            within = [x for x in stems if x.startswith(stem)]
            if within:
                stems = [x for x in stems if not x.startswith(stem)]
                self.blocks.append(("", sorted({x + noun for x in (stem, *within) for noun in self.nouns})))
            else:
                self.blocks.append((stem, self.nouns))
        self.ends = list(accumulate(len(endings) for _, endings in self.blocks))

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, place: int) -> str:  # type: ignore[override]
        if not 0 <= place < len(self):
            raise IndexError(place)
        block = bisect_right(self.ends, place)
        stem, endings = self.blocks[block]
        return stem + endings[place - (self.ends[block - 1] if block else 0)]

    def __iter__(self) -> Iterator[str]:
        for stem, endings in self.blocks:
            for ending in endings:
                yield stem + ending

    def identity(self) -> str:
        """The sha256 of what the list is made of."""
        digest = hashlib.sha256()
        for stem, endings in self.blocks:
            digest.update("\n".join((stem, *(endings if endings is not self.nouns else ()))).encode())
        digest.update("\n".join(self.nouns).encode())
        return digest.hexdigest()


def load(folder: Path | None) -> Keys:
    """The keys of a folder with the two lists, or of the wonderwords package."""
    if folder is None:
        try:
            assets = resources.files("wonderwords") / "assets"
        except ModuleNotFoundError as error:
            said = "--words: expected a folder of word lists or the wonderwords package, got neither"
            raise ImportError(said, name="wonderwords") from error
        return Keys(*(_words((assets / name).read_text("utf-8")) for name in FILES))
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"--words: expected {' and '.join(FILES)} in {folder}, got no {missing[0]}")
    try:
        return Keys(*(_words((folder / name).read_text("utf-8")) for name in FILES))
    except UnicodeDecodeError as error:
        raise ValueError(f"--words: expected text in UTF-8 in {folder}, got: {error}") from error


def _words(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]
