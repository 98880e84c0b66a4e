"""Finite groups as permutations: their elements, the letters that words are written in, and running products.

    word        g₁ g₂ … g_T, letters of the group, each drawn alike
    target      g₁, g₁g₂, …, g₁g₂…g_T: the product so far, at every place

A product applies its first factor first. Letters are the identity and the generators of the row: what a model has to do
for one token is then what it has to do for one generator.
"""

from __future__ import annotations

from functools import cached_property
from itertools import combinations
from typing import NamedTuple

import numpy as np

Permutation = tuple[int, ...]


def cycle(points: int, *moved: int) -> Permutation:
    """The permutation of range(points) that maps each of `moved` to the next one, and the last to the first."""
    images = list(range(points))
    for here, there in zip(moved, (*moved[1:], *moved[:1]), strict=True):
        images[here] = there
    return tuple(images)


def product(first: Permutation, second: Permutation) -> Permutation:
    """The permutation that applies `first`, then `second`."""
    return tuple(second[x] for x in first)


def written(permutation: Permutation) -> str:
    """A permutation in cycles of points from 1 on, such as "(12)(345)"; the identity is "e"."""
    left, text = set(range(len(permutation))), ""
    while left:
        here, orbit = min(left), ""
        while here in left:
            left.remove(here)
            orbit, here = f"{orbit}{here + 1}", permutation[here]
        text += f"({orbit})" if len(orbit) > 1 else ""
    return text or "e"


class Group(NamedTuple):
    """A row of the table: a group by its generators."""

    title: str
    generators: tuple[Permutation, ...]

    @property
    def identity(self) -> Permutation:
        """The permutation that moves nothing."""
        return tuple(range(len(self.generators[0])))

    @property
    def letters(self) -> tuple[Permutation, ...]:
        """What words are written in: the identity and the generators."""
        return (self.identity, *self.generators)


class Table:
    """A group's elements in order, the identity first, and what each becomes when a letter is multiplied to it."""

    def __init__(self, group: Group):
        self.group = group
        found, new = {group.identity}, {group.identity}
        while new:
            new = {product(x, g) for x in new for g in group.generators} - found
            found |= new
        self.elements = sorted(found)
        place = {x: i for i, x in enumerate(self.elements)}
        self.letters = np.array([place[x] for x in group.letters])
        self.times = np.array([[place[product(x, g)] for g in group.letters] for x in self.elements])

    @cached_property
    def names(self) -> list[str]:
        """The elements as texts."""
        return [written(x) for x in self.elements]

    def products(self, words: np.ndarray) -> np.ndarray:
        """Map words [B, T], numbers of letters, to the numbers of the elements that they have multiplied to so far."""
        so_far = np.zeros(words.shape[0], np.int64)  # the identity
        found = np.empty(words.shape, np.int64)
        for t in range(words.shape[1]):
            so_far = found[:, t] = self.times[so_far, words[:, t]]
        return found


def _swaps(points: int) -> tuple[Permutation, ...]:
    return tuple(cycle(points, *pair) for pair in combinations(range(points), 2))


def _cyclic(points: int) -> tuple[Permutation, ...]:
    return (cycle(points, *range(points)),)


GROUPS = {
    "z2": Group("Z2 (parity)", _cyclic(2)),
    "z3": Group("Z3", _cyclic(3)),
    "z5": Group("Z5", _cyclic(5)),
    "s3": Group("S3", (cycle(3, 0, 1), *_cyclic(3))),
    "s4": Group("S4", (cycle(4, 0, 1), *_cyclic(4))),
    "a5": Group("A5", (cycle(5, 0, 1, 2), *_cyclic(5))),
    "s5": Group("S5", (cycle(5, 0, 1), *_cyclic(5))),
    "s3_swaps": Group("S3 by swaps", _swaps(3)),
    "s5_swaps": Group("S5 by swaps", _swaps(5)),
}
