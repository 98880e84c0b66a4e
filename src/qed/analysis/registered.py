"""The registered experiments: their arms and seeds, their tests in families, their looks, and what counts as an answer.

`results/PLAN.md` has them in words. The answer to a test is

    yes           if its p, after Holm's correction within its family, is below the look's level, and the difference is
                  positive
    contrary      if p is below that level and the difference is negative
    equivalent    if neither, and the 90 % interval lies within ±3 points (±0.25 octaves)
    undecided     otherwise

and a yes whose 90 % interval lies within that margin says so. Trainings without a plan get the same tests at a level of
.05, all trainings together. That is exploratory, and the report says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from . import paper
from .contrasts import Estimate, Permutation, contrast, mean_of, permutation, sign_flips, welch
from .names import name_of
from .results import Run
from .selection import arms_of
from .stats import holm
from .trainings import ENDPOINTS, Study, at_training_length, rate

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
FIRST_LOOK, SECOND_LOOK = 0.00305, 0.0490  # significance levels
SHORTENED = 0.0469  # the level of a second look at fewer seeds than planned
LEVEL = 0.05
LEARNED = 90.0  # per cent of S-NIAH-1 at the training length


class Test(NamedTuple):
    """A question to the trainings: whether a difference in an endpoint is 0."""

    endpoint: str
    name: str
    weights: Mapping[str, float]  # of arms' means; without any, the test is s = 1 minus s = 0 within trainings of QED

    @property
    def within(self) -> bool:
        """Whether the difference is taken within trainings."""
        return not self.weights


def _difference(first: str, second: str) -> tuple[str, dict[str, float]]:
    return f"{name_of(first)} − {name_of(second)}", {first: 1.0, second: -1.0}


MECHANISM, DIRECTION = (_difference(*paper.CONTRASTS[name]) for name in ("mechanism", "direction"))
CORRECTION: tuple[str, dict[str, float]] = ("QED at s = 1 − at s = 0", {})
# A line through the five means with scores −2 … 2 rises by 0.4 times their sum of products from its first to its last.
TREND = {"gdn2": -0.8, "qed@0.1": -0.4, "qed": 0.0, "qed@0.5": 0.4, "qed@1": 0.8}
PRIMARY = tuple(Test("R1", *x) for x in (MECHANISM, DIRECTION, CORRECTION))
SECONDARY = (
    *(Test(endpoint, *x) for endpoint in ("R2", "RM", "L50") for x in (MECHANISM, DIRECTION)),
    *(Test(endpoint, *CORRECTION) for endpoint in ("R2", "RM")),
)
BOUND = (
    Test("R1", "linear trend, λ_max from 0 to 1", TREND),
    *(Test("R1", *_difference(f"qed@{x}", "qed")) for x in ("0.1", "0.5", "1")),
)


class Experiment(NamedTuple):
    """Trainings that belong together, and the tests that are made of them."""

    name: str
    recipe: str  # what the name of its runs begins with; empty if the experiment is not registered
    arms: tuple[str, ...]
    seeds: int  # at which the last look is taken
    first_look: int | None
    families: Mapping[str, tuple[Test, ...]]
    known_before: tuple[int, ...] = ()  # seeds of which a training was known when the plan was registered

    @property
    def registered(self) -> bool:
        """Whether a plan names it; otherwise it is exploratory."""
        return bool(self.recipe)

    @property
    def tests(self) -> list[Test]:
        """The tests of all families."""
        return [test for family in self.families.values() for test in family]


THREE = ("gdn2", "qed", "qed-rand")
EXPERIMENTS = (
    Experiment("E1", "medium", THREE, 12, 6, {"E1 primary": PRIMARY, "E1 secondary": SECONDARY}, (0,)),
    Experiment("E2", "paper_short", THREE, 4, None, {"E2 primary": PRIMARY, "E2 secondary": SECONDARY}),
    Experiment("E3", "medium", tuple(TREND), 8, None, {"E3": BOUND}),
)


def recipe_of(run: Run) -> str:
    """The recipe that a run was trained with."""
    return str(run.config.get("name")).partition("-")[0]


def own_arms(experiment: Experiment) -> set[str]:
    """The arms that an experiment does not share with an earlier one."""
    before = [x for x in EXPERIMENTS if x.recipe == experiment.recipe and x.name < experiment.name]
    return set(experiment.arms) - {arm for x in before for arm in x.arms}


def experiments_in(runs: list[Run]) -> list[Experiment]:
    """The registered experiments of which there is a training that no earlier experiment asks for."""
    return [
        experiment
        for experiment in EXPERIMENTS
        if any(recipe_of(run) == experiment.recipe and run.arm in own_arms(experiment) for run in runs)
    ]


def exploratory(runs: list[Run]) -> Experiment:
    """An experiment of all arms there are, with those of the registered tests for which there are trainings."""
    arms, study = set(arms_of(runs)), Study(runs)

    def there(test: Test) -> bool:
        if test.within:
            return bool(study.switched(test.endpoint))
        return set(test.weights) <= arms and all(study.groups(test.endpoint)[arm] for arm in test.weights)

    asked = {"primary": PRIMARY, "secondary": SECONDARY, "bounds on λ": BOUND if set(TREND) <= arms else ()}
    kept = {name: tuple(test for test in tests if there(test)) for name, tests in asked.items()}
    return Experiment("", "", tuple(arms_of(runs)), 0, None, {name: tests for name, tests in kept.items() if tests})


def lacking(experiment: Experiment, run: Run, study: Study) -> list[str]:
    """The results that the tests of an experiment need from a run and that it does not have.

    Args:
        experiment: whose tests.
        run: the training.
        study: the trainings that it is compared with. In an exploratory experiment they decide what is needed.
    """
    tasks = {study.task(test.endpoint) for test in experiment.tests}
    if experiment.registered:
        wanted = {f"{task}-{n}" for task in tasks for n in LENGTHS}
    else:
        wanted = {name for x in study.runs for name in x.results if name.rpartition("-")[0] in tasks}
    missing = ["the end of its training"] if experiment.registered and not run.complete else []
    missing += sorted(wanted - run.results.keys())
    if experiment.registered and run.arm == "qed":
        for endpoint in dict.fromkeys(test.endpoint for test in experiment.tests if test.within):
            there = Study([run]).scaled_cells(endpoint)
            missing += [f"{name} at s = 0" for name in study.cells(endpoint, run) if name not in there]
    return missing


class Look(NamedTuple):
    """An analysis of the seeds there are, at its own significance level."""

    name: str
    seeds: int
    level: float
    open: bool = False  # whether it counts only if no more seeds come, which files do not tell


def looks(experiment: Experiment, complete: int) -> list[Look]:
    """The looks that a number of complete seeds allows.

    Files do not tell whether more seeds will come: a look at fewer seeds than planned counts only if none do.
    """
    last, ends = min(complete, experiment.seeds), "if the experiment ends with them"
    seeds, short = f"{last} seed{'s' if last != 1 else ''}", last < experiment.seeds
    if complete == 0:
        return []
    if experiment.first_look is None:
        fewer = f", of {experiment.seeds} planned, {ends}" if short else ""
        return [Look(f"one look, at {seeds}{fewer}", last, LEVEL, short)]
    if complete < experiment.first_look:
        return [Look(f"one look, at {seeds}, {ends}", last, LEVEL, short)]
    first = Look(f"first look, at {experiment.first_look} seeds", experiment.first_look, FIRST_LOOK)
    if short:
        return [first, Look(f"second look, at {seeds}, {ends}", last, SHORTENED, short)]
    return [first, Look(f"second look, at {seeds}", last, SECOND_LOOK)]


def verdict(estimate: Estimate, p_holm: float, level: float, endpoint: str) -> str:
    """The answer to a test, as the plan defines it.

    Args:
        estimate: the difference.
        p_holm: its p after Holm's correction.
        level: the look's significance level.
        endpoint: a key of ENDPOINTS, which gives the margin of equivalence.
    """
    margin, unit = ENDPOINTS[endpoint].margin, ENDPOINTS[endpoint].unit
    if p_holm < level:
        if estimate.value < 0:
            return "contrary"
        return f"yes, smaller than {margin:g} {unit}" if estimate.within(margin) else "yes"
    return "equivalent" if estimate.within(margin) else "undecided"


def unchanged(estimate: Estimate, margin: float) -> str:
    """The answer to a claim that nothing changes: "different" if the whole 90 % interval lies beyond the margin."""
    low, high = estimate.interval(0.9)
    return "equivalent" if estimate.within(margin) else "different" if low > margin or high < -margin else "undecided"


class Answer(NamedTuple):
    """What a test gave."""

    family: str
    test: Test
    estimate: Estimate | None  # None where there are no trainings to tell
    p: float
    p_holm: float
    verdict: str
    exact: bool = True  # False for a permutation test over random arrangements


AS_REGISTERED, ONLY_LEARNED, WELCH = "as registered", "without trainings that have not learned", "Welch's test"
PERMUTED, FIRST_ANSWERS = "permutation test", "first answers"
WAYS = (AS_REGISTERED, ONLY_LEARNED, WELCH, PERMUTED, FIRST_ANSWERS)


def estimated(study: Study, test: Test, way: str = AS_REGISTERED) -> Estimate | None:
    """The difference that a test is about; None where an arm has no trainings.

    Args:
        study: the trainings.
        test: the question.
        way: one of WAYS. Only Welch's test and first answers change the estimate itself.
    """
    first = way == FIRST_ANSWERS
    if test.within:
        differences = [on - off for on, off in study.switched(test.endpoint, first)]
        return mean_of(differences) if differences else None
    groups = study.groups(test.endpoint, first)
    if not all(groups.get(arm) for arm in test.weights):
        return None
    return (welch if way == WELCH else contrast)(groups, test.weights)


def permuted(study: Study, test: Test) -> Permutation:
    """The permutation test of the same question: over labels of trainings, or over signs of differences within them."""
    if test.within:
        return sign_flips([on - off for on, off in study.switched(test.endpoint)])
    return permutation(study.groups(test.endpoint), test.weights)


def answered(study: Study, family: str, tests: tuple[Test, ...], level: float, way: str) -> list[Answer]:
    """The answers to all tests of a family, in the registered way or in another that shows how much depends on it.

    Args:
        study: the trainings.
        family: the name of the family.
        tests: its tests, for whose number p is corrected.
        level: the look's significance level.
        way: one of WAYS.
    """
    if way == ONLY_LEARNED:
        study = study.without(not_learned(study))
    estimates = [estimated(study, test, way) for test in tests]
    tested = [
        Permutation(1.0, True) if x is None else permuted(study, test) if way == PERMUTED else Permutation(x.p, True)
        for x, test in zip(estimates, tests, strict=True)
    ]
    adjusted = holm([x.p for x in tested])
    return [
        Answer(
            family=family,
            test=test,
            estimate=estimate,
            p=p,
            p_holm=q,
            verdict="no trainings to tell" if estimate is None else verdict(estimate, q, level, test.endpoint),
            exact=exact,
        )
        for test, estimate, (p, exact), q in zip(tests, estimates, tested, adjusted, strict=True)
    ]


def not_learned(study: Study) -> list[Run]:
    """The trainings that retrieve too little at their training length for what they do past it to say much."""
    rates = {run.path: at_training_length(run, study.main) for run in study.runs}
    return [run for run in study.runs if (x := rates[run.path]) is not None and x < LEARNED]


@dataclass(frozen=True)
class Outcome:
    """An experiment with the trainings there are of it."""

    experiment: Experiment
    looks: list[tuple[Look, Study]]
    status: dict[str, str]  # by the name of a run's folder: "counts", or why it does not

    @property
    def suffix(self) -> str:
        """What the names of its files end with."""
        return f"_{self.experiment.name.lower()}" if self.experiment.registered else ""

    def answers(self, look: Look, study: Study) -> list[Answer]:
        """The answers to all tests at one look, as registered."""
        families = self.experiment.families.items()
        return [x for name, tests in families for x in answered(study, name, tests, look.level, AS_REGISTERED)]


def outcome(experiment: Experiment, runs: list[Run]) -> Outcome:
    """The looks that these trainings allow, and which of the trainings count."""
    if not experiment.registered:
        lacks = {run.path.name: lacking(experiment, run, Study(runs)) for run in runs}
        whole = [run for run in runs if not lacks[run.path.name]]
        status = {name: f"incomplete, without {some[0]}" if some else "counts" for name, some in lacks.items()}
        return Outcome(experiment, [(Look("all together", 0, LEVEL), Study(whole))] if whole else [], status)
    own = [run for run in runs if recipe_of(run) == experiment.recipe and run.arm in experiment.arms]
    begun = {run.seed for run in own if run.arm in own_arms(experiment)}  # another experiment may have had more seeds
    own = [run for run in own if run.seed in begun]
    study, known = Study(own), {(run.arm, run.seed): run for run in own}
    lacks = {run.path.name: lacking(experiment, run, study) for run in own}
    whole_seeds = [
        seed
        for seed in sorted(begun)
        if all((run := known.get((arm, seed))) and not lacks[run.path.name] for arm in experiment.arms)
    ]
    taken = [
        (look, Study([run for run in own if run.seed in whole_seeds[: look.seeds]]))
        for look in looks(experiment, len(whole_seeds))
    ]
    counting = whole_seeds[: experiment.seeds]
    status = {}
    for run in own:
        name = run.path.name
        if run.seed in counting:
            status[name] = "counts"
        elif run.seed in whole_seeds:
            status[name] = f"apart, beyond the {experiment.seeds} seeds of the plan"
        elif lacks[name]:
            status[name] = f"incomplete, without {lacks[name][0]}"
        else:
            status[name] = "of a seed that is not complete"
    return Outcome(experiment, taken, status)


def outcomes(runs: list[Run], registered: bool) -> list[Outcome]:
    """The outcomes of all registered experiments that have trainings; without a plan, of all trainings together."""
    asked = experiments_in(runs) if registered else [exploratory(runs)]
    return [outcome(experiment, runs) for experiment in asked]


class Split(NamedTuple):
    """QED's difference from GDN-2 in its two parts, over trainings, on the cells that were evaluated at s = 0 too."""

    cells: list[str]
    whole: Estimate  # QED − GDN-2
    training: Estimate  # QED at s = 0 − GDN-2: what training with the correction found
    correction: Estimate  # QED at s = 1 − at s = 0: what the correction does


def split(study: Study, endpoint: str) -> Split | None:
    """The split on one endpoint; None without trainings of both arms. Other arms only add to the pooled variance."""
    names, pairs = study.scaled_cells(endpoint), study.switched(endpoint)
    groups = {
        arm: [x for run in runs if (x := rate(run.results[n] for n in names if n in run.results)) is not None]
        for arm, runs in study.arms.items()
    }
    if not pairs or not groups.get("gdn2"):
        return None
    on, off = ({**groups, "qed": [pair[i] for pair in pairs]} for i in (0, 1))
    weights = MECHANISM[1]
    correction = mean_of([a - b for a, b in pairs])
    return Split(names, contrast(on, weights), contrast(off, weights), correction)
