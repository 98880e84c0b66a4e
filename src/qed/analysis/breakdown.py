"""Differences between two arms at one seed, example by example, and where a difference from GDN-2 comes from.

Every difference is in points of accuracy on the same examples. With λ set to 0 at inference (s = 0) an arm computes
what GDN-2 computes, on weights that were trained with the correction. What it is ahead by then is what training found.
The rest, s = 1 minus s = 0, is what the correction does to this checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import paper
from .names import NEEDLES
from .results import SHARED, Result, Run, discordant
from .selection import arms_of, by_arm_and_seed, distinct, needle_lengths, past_training, seeds_of
from .stats import Interval, across_seeds, mcnemar, paired_difference

Points = tuple[float, Interval, float]  # a difference in points, its paired interval, McNemar's p


def points(pairs: list[tuple[Result, Result]]) -> Points:
    """By how many points the first of each pair is ahead, over all examples: Tango's interval and McNemar's p."""
    b, c, n = (sum(counts) for counts in zip(*(discordant(*pair) for pair in pairs), strict=True))
    difference, interval = paired_difference(b, c, n)
    return 100 * difference, Interval(100 * interval.low, 100 * interval.high), mcnemar(b, c)


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """A difference between two arms in points, by seed, on all examples past the training length."""

    name: str
    first: str
    second: str
    seeds: dict[int, Points]
    overall: tuple[float, Interval] | None  # the mean over seeds, with Student's interval


def contrasts(runs: list[Run], task: str) -> list[Contrast]:
    """The paper's contrasts on one needle task. One that no seed has both arms of is there without seeds."""
    known = by_arm_and_seed(runs)
    made = []
    for name, (first, second) in paper.CONTRASTS.items():
        seeds = {}
        for seed in seeds_of(runs):
            if (first, seed) not in known or (second, seed) not in known:
                continue
            one, other = known[first, seed], known[second, seed]
            names = [f"{task}-{n}" for n in past_training([one, other], task)]
            both = [x for x in names if x in one.results and x in other.results]
            pairs = distinct((one.results[x], other.results[x]) for x in both)
            if pairs:
                seeds[seed] = points([(pair[0], pair[1]) for pair in pairs])
        overall = across_seeds([difference for difference, _, _ in seeds.values()]) if seeds else None
        made.append(Contrast(name=name, first=first, second=second, seeds=seeds, overall=overall))
    return made


@dataclass(frozen=True, kw_only=True)
class Split:
    """An arm's difference from GDN-2 in its two parts, by seed, over the lengths at which λ was scaled."""

    arm: str
    task: str
    lengths: list[int]
    whole: dict[int, Points]  # the arm − GDN-2
    training: dict[int, Points]  # the arm with λ = 0 at inference − GDN-2
    correction: dict[int, Points]  # the arm − the arm with λ = 0 at inference


def splits(runs: list[Run]) -> list[Split]:
    """The splits of all arms and needle tasks that were evaluated at s = 1 and s = 0 on GDN-2's prompts."""
    known = by_arm_and_seed(runs)
    made: dict[tuple[str, str, tuple[int, ...]], Split] = {}
    for arm, seed in ((arm, seed) for arm in arms_of(runs) for seed in seeds_of(runs)):
        run, base = known.get((arm, seed)), known.get(("gdn2", seed))
        if run is None or base is None:
            continue
        for task in NEEDLES:
            triples = _on_off_and_base(run, base, task)
            if triples:
                key = (arm, task, tuple(triples))
                new = Split(arm=arm, task=task, lengths=list(triples), whole={}, training={}, correction={})
                split, counted = made.setdefault(key, new), distinct(triples.values())
                split.whole[seed] = points([(on, gdn2) for on, _, gdn2 in counted])
                split.training[seed] = points([(off, gdn2) for _, off, gdn2 in counted])
                split.correction[seed] = points([(on, off) for on, off, _ in counted])
    return list(made.values())


def _on_off_and_base(run: Run, base: Run, task: str) -> dict[int, tuple[Result, Result, Result]]:
    """By length: a run's result at s = 1, that at s = 0 and the base's, where all three are of the same prompts."""
    on, off = run.strengths.get(1.0, {}), run.strengths.get(0.0, {})
    triples = {
        n: (on[name], off[name], base.results[name])
        for n in needle_lengths([base], task)
        if (name := f"{task}-{n}") in on and name in off
    }
    return {n: triple for n, triple in triples.items() if _same_questions(*triple)}


def _same_questions(*results: Result) -> bool:
    """Whether all results are of the same prompts: a sweep may have had fewer examples than the evaluation."""
    return all(x.about.get(name) == results[0].about.get(name) for x in results for name in SHARED)
