"""The paper's claims one by one: what these trainings say about each, and what the paper's own trainings say.

The paper's estimates are computed from its tables in the same way as ours: a training is the unit, and the variance is
pooled over its five arms of two trainings each. They are the paper's numbers over trainings, not its words.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..recipes.paper import ARMS
from . import paper
from .contrasts import Estimate, contrast, mean_of
from .names import TITLES, length_title, name_of, recall_title
from .registered import CORRECTION, LEVEL, MECHANISM, Answer, Outcome, estimated, unchanged, verdict
from .registered import Test as Question
from .selection import needle_lengths, recall_names, results_of
from .trainings import ENDPOINTS, Study, half, rate

NOT_HERE, NOT_ASKED = "not trained here", "not evaluated here"
POINTS = ENDPOINTS["R1"]
# A contrast, an endpoint, and what the paper says about it.
CONTRASTS = (
    ("mechanism", "R1", "QED retrieves more past the training length"),
    ("mechanism", "L50", "QED about doubles the usable context (one octave)"),
    ("direction", "R1", "the query's direction retrieves more than a random one"),
    ("gate", "R1", "the gate's effect is undecided"),
    ("projection", "R1", "the projection's effect is undecided"),
)
# A task, what the paper says about it, and whether that is that nothing changes.
RECALL = (
    ("fda", "QED improves FDA, by 3.4 and 3.7 points", False),
    ("squad_completion", "SQuAD-completion does not change", True),
    ("swde", "SWDE gives a null result", True),
)


def papers(endpoint: str) -> dict[str, list[float]]:
    """The values of the paper's own trainings by arm, for an endpoint of ours or the name of a recall task."""
    if endpoint == "loss":
        return {arm: [losses[arm] for losses in paper.VALIDATION_LOSS.values()] for arm in ARMS}
    place = len(paper.LENGTHS) + paper.RECALL.index(endpoint) if endpoint in paper.RECALL else 0
    values: dict[str, list[float]] = {}
    for arm in ARMS:
        rows = [table[arm] for table in paper.NIAH_1.values()]
        if endpoint == "R1":
            past = [i for i, n in enumerate(paper.LENGTHS) if n > paper.TRAIN_LENGTH]
            values[arm] = [sum(row[i] for i in past) / len(past) for row in rows]
        elif endpoint == "L50":
            values[arm] = [half([(math.log2(n), row[i] / 100) for i, n in enumerate(paper.LENGTHS)]) for row in rows]
        else:
            values[arm] = [row[place] for row in rows]
    return values


def papers_scaling(scale: float) -> Estimate:
    """S-NIAH-1 at this s minus that at s = 1 in the paper's sweep, over its two trainings."""
    end = 1 + len(paper.STRENGTH_LENGTHS)
    means = [{s: sum(row[1:end]) / (end - 1) for s, row in table.items()} for table in paper.STRENGTH.values()]
    return mean_of([x[scale] - x[1.0] for x in means])


class Claim(NamedTuple):
    """One claim of the paper beside what these trainings say about it."""

    name: str
    about: str  # what is compared here
    verdict: str
    ours: str | None  # our estimate; None where there is none
    trainings: str  # how many of which arms
    registered: bool  # whether a registered test answers it
    says: str  # what the paper says
    theirs: str | None = None  # the paper's estimate over its own trainings
    theirs_p: str | None = ""


def claims(outcome: Outcome) -> list[Claim]:
    """All claims, answered by the last look there is. Those that no registered test answers are exploratory."""
    if not outcome.looks:
        return []
    look, study = outcome.looks[-1]
    answers = {(x.test.endpoint, x.test.name): x for x in outcome.answers(look, study)}
    judged = [_contrast(study, answers, name, endpoint, says) for name, endpoint, says in CONTRASTS]
    judged += [_every_length(study), _correction(study, answers), _doubled(study), _loss(study, outcome)]
    judged += [_recall(study, *x) for x in RECALL] + _eigenvalues(study)
    return judged if outcome.experiment.registered else [x._replace(registered=False) for x in judged]


def _lacking(study: Study, *arms: str) -> str:
    """Why there is no answer: an arm was not trained, or the trainings were not evaluated where it is asked for."""
    return NOT_ASKED if all(study.arms.get(arm) for arm in arms) else NOT_HERE


def _counts(groups: dict[str, list[float]], arms: Sequence[str]) -> str:
    return ", ".join(f"{len(groups[arm])} {name_of(arm)}" for arm in arms)


def _contrast(
    study: Study, answers: dict[tuple[str, str], Answer], contrast_name: str, endpoint: str, says: str
) -> Claim:
    first, second = paper.CONTRASTS[contrast_name]
    weights = {first: 1.0, second: -1.0}
    test = Question(endpoint, f"{name_of(first)} − {name_of(second)}", weights)
    theirs = contrast(papers(endpoint), weights)
    about, groups = f"{endpoint}: {test.name}", study.groups(endpoint)
    answer, estimate = answers.get((endpoint, test.name)), estimated(study, test)
    paper_said = (says, ENDPOINTS[endpoint].shown_estimate(theirs), f"{theirs.p:.2g}")
    if estimate is None:
        return Claim(contrast_name, about, _lacking(study, first, second), None, "", False, *paper_said)
    said = verdict(estimate, estimate.p, LEVEL, endpoint) if answer is None else answer.verdict
    ours = ENDPOINTS[endpoint].shown_estimate(estimate)
    return Claim(contrast_name, about, said, ours, _counts(groups, (first, second)), answer is not None, *paper_said)


def by_length(study: Study, task: str, weights: Mapping[str, float]) -> dict[int, Estimate]:
    """A contrast of per cent right at every nominal length at which each of its arms has a training.

    Args:
        study: the trainings.
        task: a needle task.
        weights: of the arms' means.
    """
    estimates = {}
    for n in needle_lengths(study.runs, task):
        name = f"{task}-{n}"
        groups = {
            arm: [x for run in runs if name in run.results and (x := rate([run.results[name]])) is not None]
            for arm, runs in study.arms.items()
        }
        if all(groups.get(arm) for arm in weights):
            estimates[n] = contrast(groups, weights)
    return estimates


def _every_length(study: Study) -> Claim:
    past = {int(n.rsplit("-", 1)[1]) for run in study.runs for n in study.cells("R1", run)}
    estimates = {n: x for n, x in by_length(study, study.main, MECHANISM[1]).items() if n in past}
    intervals = {n: x.interval() for n, x in estimates.items()}
    ahead = [n for n, x in estimates.items() if x.value > 0]
    if not estimates:
        said = _lacking(study, *MECHANISM[1])
    elif any(x.high < 0 for x in intervals.values()):
        said = "contrary"
    else:
        said = "yes" if all(x.low > 0 for x in intervals.values()) else "undecided"
    theirs = [
        contrast({arm: [table[arm][i] for table in paper.NIAH_1.values()] for arm in ARMS}, MECHANISM[1])
        for i, n in enumerate(paper.LENGTHS)
        if n > paper.TRAIN_LENGTH
    ]
    return Claim(
        "every length",
        f"QED − {name_of('gdn2')} at each length",
        said,
        f"ahead at {len(ahead)} of {len(estimates)}; interval above 0 at "
        f"{', '.join(length_title(n) for n, x in intervals.items() if x.low > 0) or 'none'}"
        if estimates
        else None,
        "",
        False,
        "QED retrieves more at every length past the training length, at both seeds",
        f"ahead at {sum(x.value > 0 for x in theirs)} of {len(theirs)}; interval above 0 at "
        f"{sum(x.interval().low > 0 for x in theirs) or 'none'}",
    )


def _correction(study: Study, answers: dict[tuple[str, str], Answer]) -> Claim:
    test, theirs = Question("R1", *CORRECTION), papers_scaling(0.0)
    theirs = Estimate(-theirs.value, theirs.error, theirs.freedom)
    says = "one checkpoint uses the correction, the other does not"
    paper_said = (says, POINTS.shown_estimate(theirs), f"{theirs.p:.2g}")
    estimate, answer = estimated(study, test), answers.get((test.endpoint, test.name))
    if estimate is None:
        return Claim("strength", f"R1: {test.name}", _lacking(study, "qed"), None, "", False, *paper_said)
    said = verdict(estimate, estimate.p, LEVEL, "R1") if answer is None else answer.verdict
    ours, n = POINTS.shown_estimate(estimate), f"{len(study.switched('R1'))} QED"
    return Claim("strength", f"R1: {test.name}", said, ours, n, answer is not None, *paper_said)


def _doubled(study: Study) -> Claim:
    theirs, pairs = papers_scaling(2.0), study.switched("R1", scale=2.0)
    paper_said = ("doubling λ at inference helps one checkpoint", POINTS.shown_estimate(theirs), f"{theirs.p:.2g}")
    about = "R1: QED at s = 2 − at s = 1"
    if not pairs:
        return Claim("strength", about, NOT_ASKED, None, "", False, *paper_said)
    ours = mean_of([scaled - trained for trained, scaled in pairs])
    said = verdict(ours, ours.p, LEVEL, "R1")
    return Claim("strength", about, said, POINTS.shown_estimate(ours), f"{len(pairs)} QED", False, *paper_said)


def _loss(study: Study, outcome: Outcome) -> Claim:
    theirs, groups, endpoint = contrast(papers("loss"), MECHANISM[1]), study.groups("loss"), ENDPOINTS["loss"]
    says = "QED does not change the validation loss"
    about = f"validation loss: {MECHANISM[0]}, equivalent within ±{endpoint.margin:g} nats"
    paper_said = (says, endpoint.shown_estimate(theirs), f"{theirs.p:.2g}")
    if not all(groups.get(arm) for arm in MECHANISM[1]):
        return Claim("validation loss", about, _lacking(study, *MECHANISM[1]), None, "", False, *paper_said)
    ours = contrast(groups, MECHANISM[1])
    registered = outcome.experiment.registered and set(MECHANISM[1]) <= set(outcome.experiment.arms)
    n = _counts(groups, tuple(MECHANISM[1]))
    said = unchanged(ours, endpoint.margin)
    return Claim("validation loss", about, said, endpoint.shown_estimate(ours), n, registered, *paper_said)


def _recall(study: Study, task: str, says: str, same: bool) -> Claim:
    theirs = contrast(papers(task), MECHANISM[1])
    paper_said = (says, POINTS.shown_estimate(theirs), f"{theirs.p:.2g}")
    name = next((x for x in recall_names(study.runs) if x.split("-")[0] == task), None)
    groups: dict[str, list[float]] = {}
    if name is not None:
        groups = {
            arm: [100 * run.results[name].result["accuracy"] for run in runs if name in run.results]
            for arm, runs in study.arms.items()
        }
    if name is None or not all(groups.get(arm) for arm in MECHANISM[1]):
        return Claim(TITLES[task], MECHANISM[0], NOT_ASKED, None, "", False, *paper_said)
    ours, title = contrast(groups, MECHANISM[1]), recall_title(name, results_of(study.runs, name))
    said = unchanged(ours, POINTS.margin) if same else verdict(ours, ours.p, LEVEL, "R1")
    n = _counts(groups, tuple(MECHANISM[1]))
    means = " and ".join(f"{name_of(arm)} {sum(groups[arm]) / len(groups[arm]):.1f} %" for arm in MECHANISM[1])
    difference = f"{POINTS.shown_estimate(ours)} ({means})"
    return Claim(TITLES[task], f"{title}: {MECHANISM[0]}", said, difference, n, False, *paper_said)


def _eigenvalues(study: Study) -> list[Claim]:
    rule, least, most, change = (paper.EIGENVALUES[x] for x in ("rule", "least", "most", "change"))
    measured = [run.eigenvalues["all"] for run in study.arms.get(str(rule), []) if run.eigenvalues]
    ends = [x["eigenvalue"]["quantiles"] for x in measured]
    changes = [x["change"]["quantiles"]["1.0"] for x in measured if "change" in x]
    says = f"without projection e stays within [{least}, {most}]", f"[{least}, {most}]"
    also = f"projecting would change e by less than {change:g}", f"below {change:g}"
    n = f"{len(measured)} {name_of(str(rule))}"
    if not ends or not changes:
        where = f"eigenvalues of {name_of(str(rule))}"
        return [Claim("eigenvalues", where, _lacking(study, str(rule)), None, "", False, *x) for x in (says, also)]
    low, high, largest = min(x["0.0"] for x in ends), max(x["1.0"] for x in ends), max(changes)
    return [
        Claim(
            "eigenvalues",
            "smallest and largest e of all trainings",
            "yes" if least <= low and high <= most else "contrary",
            f"[{low:.3f}, {high:.3f}]",
            n,
            False,
            *says,
        ),
        Claim(
            "eigenvalues",
            "largest change of e by projecting",
            "yes" if largest < change else "contrary",
            f"{largest:.2g}",
            n,
            False,
            *also,
        ),
    ]
