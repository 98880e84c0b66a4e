"""Behind an accuracy: which of several answers counts. Behind a difference from GDN-2: training, or the correction."""

from __future__ import annotations

from dataclasses import dataclass

from ..eval.task import NeedleTask
from ..eval.tasks import of_kind
from . import paper
from .results import SHARED, Result, Run
from .stats import Interval
from .tables import (
    NEEDLES,
    PAST_TRAINING,
    TITLES,
    Table,
    arms_of,
    brackets,
    by_arm_and_seed,
    distinct,
    length_title,
    main_task,
    name_of,
    needle_lengths,
    past_training,
    points,
    seeds_of,
)

Points = tuple[float, Interval, float]  # a difference in points, its paired interval, McNemar's p


def first_answers(runs: list[Run]) -> Table:
    """Accuracy as RULER counts it and by the first answer: the main task by length, every task past training."""
    tasks = [name for name, task in of_kind(NeedleTask).items() if task.first_correct and needle_lengths(runs, name)]
    main = [task for task in tasks if task == main_task(runs)]
    lengths = [(task, n) for task in main for n in needle_lengths(runs, task)]
    rows: list[list[str | None]] = []
    for run in sorted(runs, key=lambda run: (run.seed, arms_of(runs).index(run.arm))):
        cells = [[run.results.get(f"{task}-{n}")] for task, n in lengths]
        cells += [_past_training(run, task) for task in tasks]
        whole = [[x for x in some if x is not None] for some in cells]
        if not any(x.first_right is not None for some in whole for x in some):
            continue
        name = [str(run.seed), name_of(run.arm)]
        rows.append([*name, "anywhere (RULER)", *(_share([x.right for x in some]) for some in whole)])
        rows.append([*name, "first answer", *(_share([x.first_right for x in some]) for some in whole)])
    columns = ["seed", "arm", "counted", *(f"{TITLES[task]} {length_title(n)}" for task, n in lengths)]
    columns += [f"{TITLES[task]} past training" for task in tasks]
    return Table(
        name="first_answer",
        title="Needles found (%), as RULER counts them and by the first answer",
        columns=columns,
        rows=rows,
        note="RULER counts an answer that stands anywhere in what was generated, and so later guesses too. First "
        f"answer: the first number or uuid generated is the right one, whole. {PAST_TRAINING.capitalize()}; all such "
        "lengths together, each prompt once.",
    )


def _past_training(run: Run, task: str) -> list[Result | None]:
    return [x for (x,) in distinct((run.results[f"{task}-{n}"],) for n in past_training([run], task))]


def _share(found: list[dict[int, bool] | None]) -> str | None:
    """Over all examples together."""
    whole = [x for x in found if x is not None]
    if not whole or len(whole) < len(found):
        return None
    return f"{100 * sum(sum(x.values()) for x in whole) / sum(map(len, whole)):.1f}"


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
    """With λ set to 0 at inference (s = 0) an arm is a GDN-2 that was trained with the correction: what it is ahead by
    is what training found, and the rest, s = 1 less s = 0, is what the correction does to this checkpoint."""
    known = by_arm_and_seed(runs)
    found: dict[tuple[str, str, tuple[int, ...]], Split] = {}
    for arm, seed in ((arm, seed) for arm in arms_of(runs) for seed in seeds_of(runs)):
        run, base = known.get((arm, seed)), known.get(("gdn2", seed))
        if run is None or base is None:
            continue
        with_it, without = run.strengths.get(1.0, {}), run.strengths.get(0.0, {})
        for task in NEEDLES:
            three = {
                n: (with_it[name], without[name], base.results[name])
                for n in needle_lengths([base], task)
                if (name := f"{task}-{n}") in with_it and name in without
            }
            three = {n: some for n, some in three.items() if _same_questions(*some)}
            if three:
                key = (arm, task, tuple(three))
                new = Split(arm=arm, task=task, lengths=list(three), whole={}, training={}, correction={})
                split, whole = found.setdefault(key, new), distinct(three.values())
                split.whole[seed] = points([(x[0], x[2]) for x in whole])
                split.training[seed] = points([(x[1], x[2]) for x in whole])
                split.correction[seed] = points([(x[0], x[1]) for x in whole])
    return list(found.values())


def _same_questions(*results: Result) -> bool:
    """A sweep may have had fewer examples than the evaluation."""
    return all(x.about.get(name) == results[0].about.get(name) for x in results for name in SHARED)


def split_table(runs: list[Run]) -> Table:
    rows: list[list[str | None]] = []
    for x in splits(runs):
        for seed in x.whole:
            row: list[str | None] = [name_of(x.arm), str(seed), TITLES[x.task]]
            row.append(", ".join(length_title(n) for n in x.lengths))
            parts = (x.whole[seed], x.training[seed], x.correction[seed])
            row += [f"{part[0]:+.2f} {brackets(part[1])}" for part in parts]
            theirs = _of_the_paper(seed) if x.arm == "qed" and x.task == "niah_single_1" else None
            row += [None] * 3 if theirs is None else [f"{y:+.2f}" for y in theirs]
            rows.append(row)
    names = ["arm − GDN-2", "arm at s = 0 − GDN-2 (training)", "arm at s = 1 − at s = 0 (correction)"]
    columns = ["arm", "seed", "task", "lengths", *names, *names]
    ends = [length_title(n) for n in (paper.STRENGTH_LENGTHS[0], paper.STRENGTH_LENGTHS[-1])]
    return Table(
        name="split",
        title="Points ahead of GDN-2: what training found, and what the correction does",
        columns=columns,
        rows=rows,
        theirs=set(range(7, 10)),
        note="At s = 0 λ is 0 at inference, on weights trained with the correction. Tango's paired 95 % intervals on "
        f"the same examples. The paper's: QED from its Table 4, GDN-2 from its Table 3, {'–'.join(ends)} of S-NIAH-1.",
    )


def _of_the_paper(seed: int) -> tuple[float, float, float] | None:
    if seed not in paper.STRENGTH:
        return None
    count = len(paper.STRENGTH_LENGTHS)
    base = sum(paper.NIAH_1[seed]["gdn2"][paper.LENGTHS.index(n)] for n in paper.STRENGTH_LENGTHS) / count
    with_it, without = (sum(paper.STRENGTH[seed][s][1 : 1 + count]) / count for s in (1.0, 0.0))
    return with_it - base, without - base, with_it - without
