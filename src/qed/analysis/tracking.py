"""What a training can follow: the share of right products by place in the word, and what theory forbids.

Theory is about one layer with one step a token and the words that repeat one generator of order m. After the first
letters every step of such a word is the same, S ← A S + B. If all eigenvalues of A are real and none is negative, S
ends up along one direction and the answer stays what it is; if they are real, answers end up alternating between two at
most. Neither follows a product that has m different values by turns, unless m is 1, or 2 with negative eigenvalues.

    A = (I − k aᵀ) Diag(α),  a = s⊙k with s ≥ 0   is similar to a symmetric matrix: its eigenvalues are real,
                                                  and none is negative where 1 − aᵀk ≥ 0, that is where b ≤ 1

which is linear attention (a = 0), DeltaNet, GDN, KDA and GDN-2. A second direction in a, or a second step, is not
covered.
"""

from __future__ import annotations

from typing import NamedTuple

from ..data.groups import GROUPS, product
from ..recipes.arms import Arm
from ..rules import RULES
from .results import Run

SOLVED = 0.9  # share of right answers from which on a word problem counts as followed


class Share(NamedTuple):
    """Right answers among those that were asked for."""

    right: int
    asked: int

    @property
    def value(self) -> float:
        """The share that is right."""
        return self.right / self.asked


def by_place(run: Run, part: str = "bins") -> dict[tuple[int, int], Share]:
    """The right answers of a training's tracking result by places (from, to); of the words, or of the powers."""
    for name, result in run.results.items():
        if name.startswith("tracking_"):
            return {(x["from"], x["to"]): Share(x["right"], x["asked"]) for x in result.result[part]}
    return {}


def farthest(run: Run, part: str = "bins") -> Share | None:
    """The right answers in the last bin of places, farthest past training; None without a result."""
    return next(reversed(by_place(run, part).values()), None)


def reach(run: Run) -> int:
    """The number of letters up to which every bin has 90 % right."""
    reached = 0
    for (_, end), share in by_place(run).items():
        if share.value < SOLVED:
            break
        reached = end
    return reached


def order(group: str) -> int:
    """The largest order of a generator of a group."""
    row = GROUPS[group]
    orders = []
    for generator in row.generators:
        power, count = generator, 1
        while power != row.identity:
            power, count = product(power, generator), count + 1
        orders.append(count)
    return max(orders)


def forbidden(arm: str, group: str) -> str | None:
    """Why one layer of an arm cannot follow a group's words of any length, by theory; None where theory is silent."""
    parsed = Arm.parse(arm)
    rule = RULES[parsed.rule]
    if rule.strength or rule.substeps > 1 or parsed.rule not in ("linear", "deltanet", "gdn", "kda", "gdn2"):
        return None
    if (parsed.erase or 1.0) <= 1:
        return "no eigenvalue is negative"
    return "all eigenvalues are real" if order(group) > 2 else None
