"""Tables over trainings: endpoints of each, means of arms, registered tests with their answers, how firm these are."""

from __future__ import annotations

import math

from scipy.stats import chi2

from .claims import between, by_length, claims_table, shown
from .contrasts import contrast, detectable, pooled
from .registered import (
    AS_REGISTERED,
    FIRST_ANSWERS,
    LEARNED,
    MECHANISM,
    ONLY_LEARNED,
    PERMUTED,
    WAYS,
    Answer,
    Outcome,
    answered,
    not_learned,
    split,
)
from .results import Run
from .tables import NEEDLES, TITLES, Table, length_title, name_of
from .trainings import ENDPOINTS, Study, at_training_length

PAST = "Past the training length are cells whose shortest prompt has more tokens than a row of training."


def answer_tables(outcomes: list[Outcome]) -> list[Table]:
    """What a reader looks for first: the paper's claims, and the tests."""
    made = []
    for x in outcomes:
        asked = {test.name for test in x.experiment.tests}
        made += [*([claims_table(x)] if MECHANISM[0] in asked else []), tests(x)]
    return [table for table in made if table.rows]


def other_tables(outcomes: list[Outcome], runs: list[Run]) -> list[Table]:
    """What the answers rest on."""
    made = [y for x in outcomes for y in (means(x), splits(x), sensitivity(x), seen(x), lengths(x))]
    made += [endpoints(outcomes, runs)] if outcomes else []
    return [table for table in made if table.rows]


def _heading(outcome: Outcome) -> str:
    return f"{outcome.experiment.name}: " if outcome.experiment.registered else "Exploratory: "


def title_of(endpoint: str, study: Study) -> str:
    """In words, with the short name."""
    if endpoint == "loss":
        return "validation loss"
    task = TITLES.get(study.task(endpoint), study.task(endpoint))
    return f"{task}, one half crossed (L50)" if endpoint == "L50" else f"{task} past training ({endpoint})"


def endpoints(outcomes: list[Outcome], runs: list[Run]) -> Table:
    """Every training, whether it counts or not."""
    study = Study(runs)
    names = [x for x in ENDPOINTS if any(study.groups(x).values())]
    retrieved = [x for x in names if x != "loss"]
    scaled = [x for x in retrieved if any(study.scaled_value(x, run) is not None for run in runs)]
    rows: list[list[str | None]] = []
    for run in sorted(runs, key=lambda run: (list(study.arms).index(run.arm), run.seed)):
        own = [(x.experiment.name, x.status[run.path.name]) for x in outcomes if run.path.name in x.status]
        stands = "; ".join(f"{name} {status}".strip() for name, status in own)
        row: list[str | None] = [name_of(run.arm), str(run.seed), stands or "in no experiment: exploratory"]
        row.append(_cell("R1", at_training_length(run, study.main)))
        row += [_cell(x, study.value(x, run)) for x in names]
        row += [_cell(x, study.value(x, run, first=True)) for x in retrieved]
        row += [_cell(x, study.scaled_value(x, run)) for x in scaled]
        rows.append(row)
    columns = ["arm", "seed", "counts", f"{TITLES[study.main]} at the training length", *names]
    columns += [f"{x}, first answers" for x in retrieved] + [f"{x} at s = 0" for x in scaled]
    units = {"points": "per cent"}
    meaning = [f"{title_of(x, study)}, {units.get(ENDPOINTS[x].unit, ENDPOINTS[x].unit)}" for x in names]
    return Table(
        name="trainings_endpoints",
        title="Endpoints of every training",
        columns=columns,
        rows=rows,
        note=f"{'; '.join(meaning)}. {PAST} An octave is a doubling: L50 is log2 of prompt tokens.",
    )


def _cell(endpoint: str, value: float | None) -> str | None:
    return None if value is None else ENDPOINTS[endpoint].shown(value, sign=False)


def tests(outcome: Outcome) -> Table:
    rows: list[list[str | None]] = []
    for look, study in outcome.looks:
        for x in outcome.answers(look, study):
            row: list[str | None] = [look.name, x.family, title_of(x.test.endpoint, study), x.test.name]
            *ps, said = _decided(x)
            rows.append([*row, said, *_estimate(x), f"{look.level:g}", *ps])
    counted = "; ".join(f"{look.name}: {len(study.runs)} trainings" for look, study in outcome.looks)
    return Table(
        name=f"trainings_tests{outcome.suffix}",
        title=_heading(outcome) + ("registered tests" if outcome.experiment.registered else "the plan's tests"),
        columns=[
            *("look", "family", "endpoint", "difference", "answer", "estimate [95 %]", "90 %"),
            *("df", "level", "p", "p, Holm"),
        ],
        rows=rows,
        note="Points of accuracy, octaves for L50. The unit is a training: variances within arms pooled over all arms, "
        "Student's t; s = 1 less s = 0 within trainings. Holm's correction within a family. Yes: Holm's p below the "
        "level, a positive difference; contrary: a negative one; equivalent: neither, and the 90 % interval within "
        f"±3 points (±0.25 octaves); else undecided. {counted}." + _kind(outcome),
    )


def _kind(outcome: Outcome) -> str:
    return "" if outcome.experiment.registered else " No plan was given: nothing here is registered."


def _estimate(x: Answer) -> list[str | None]:
    endpoint = ENDPOINTS[x.test.endpoint]
    if x.estimate is None:
        return [None, None, None]
    return [shown(x.estimate, endpoint), between(x.estimate.interval(0.9), endpoint), f"{x.estimate.freedom:g}"]


def means(outcome: Outcome) -> Table:
    rows: list[list[str | None]] = []
    study = outcome.looks[-1][1] if outcome.looks else Study([])
    asked = [x for x in ENDPOINTS if any(study.groups(x).values())]
    for arm in study.arms:
        row: list[str | None] = [name_of(arm), str(len(study.arms[arm]))]
        for endpoint in asked:
            groups = study.groups(endpoint)
            if not groups[arm]:
                row.append(None)
                continue
            mean = contrast(groups, {arm: 1.0})
            row.append(shown(mean, ENDPOINTS[endpoint]).replace("+", ""))
        rows.append(row)
    return Table(
        name=f"trainings_means{outcome.suffix}",
        title=f"{_heading(outcome)}means of arms over trainings",
        columns=["arm", "trainings", *(title_of(x, study) for x in asked)],
        rows=rows,
        note="In brackets: 95 % intervals over trainings, variances pooled over arms.",
    )


def splits(outcome: Outcome) -> Table:
    rows: list[list[str | None]] = []
    asked = [test.endpoint for test in outcome.experiment.tests if test.within]
    for endpoint in asked:
        for look, study in outcome.looks[-1:]:
            found = split(study, endpoint)
            if found is not None:
                where = ", ".join(length_title(int(n.rsplit("-", 1)[1])) for n in found.cells)
                parts = (found.whole, found.training, found.correction)
                values = [shown(x, ENDPOINTS[endpoint]) for x in parts]
                rows.append([look.name, title_of(endpoint, study), where, *values])
    return Table(
        name=f"trainings_split{outcome.suffix}",
        title=f"{_heading(outcome)}QED less GDN-2: what training with the correction found, and what it does",
        columns=["look", "endpoint", "lengths", "QED − GDN-2", "QED at s = 0 − GDN-2", "QED at s = 1 − at s = 0"],
        rows=rows,
        note="The first is the sum of the other two. 95 % intervals over trainings: of the first two with variances "
        "pooled over arms, of the third over trainings of QED.",
    )


def sensitivity(outcome: Outcome) -> Table:
    """Of the primary tests."""
    rows: list[list[str | None]] = []
    left_out: list[str] = []
    family, tests = next(iter(outcome.experiment.families.items()), ("", ()))
    for look, study in outcome.looks[-1:] if tests else []:
        left_out = [f"{name_of(run.arm)} seed {run.seed}" for run in not_learned(study)]
        found = {way: answered(study, family, tests, look.level, way) for way in WAYS}
        if known := outcome.experiment.known_before:
            others = study.without(run for run in study.runs if run.seed in known)
            way = f"without seed {', '.join(map(str, known))}"
            found[way] = answered(others, family, tests, look.level, AS_REGISTERED)
        for i, test in enumerate(tests):
            for way, x in ((way, answers[i]) for way, answers in found.items()):
                how = way if x.exact else f"{way} (100,000 draws)"
                rows.append([f"{test.endpoint}: {test.name}", how, _estimate(x)[0], *_decided(x)])
                if way == PERMUTED and x.estimate is not None:
                    rows[-1][2] = ENDPOINTS[test.endpoint].shown(x.estimate.value)  # it has no interval of its own
    gone = f"They are {', '.join(left_out)}" if left_out else "There is none"
    return Table(
        name=f"trainings_sensitivity{outcome.suffix}",
        title=f"{_heading(outcome)}the primary tests in other ways",
        columns=["test", "way", "estimate [95 %]", "p", "p, Holm", "answer"],
        rows=rows,
        note=f"{AS_REGISTERED.capitalize()}: pooled variance, RULER's scoring. {ONLY_LEARNED.capitalize()}: under "
        f"{LEARNED:g} % at the training length. {gone}. Welch's test takes each arm's own variance; a difference "
        f"within trainings is Student's either way. {PERMUTED.capitalize()}: of the trainings' labels, of signs for "
        f"a difference within trainings. {FIRST_ANSWERS.capitalize()}: only the first number generated counts.",
    )


def _decided(x: Answer) -> list[str | None]:
    return [f"{x.p:.3g}", f"{x.p_holm:.3g}", x.verdict]


def seen(outcome: Outcome) -> Table:
    """What these trainings could have seen, from how much they differ."""
    rows: list[list[str | None]] = []
    for look, study in outcome.looks[-1:]:
        for x in outcome.answers(look, study):
            name, known = x.test.endpoint, ENDPOINTS[x.test.endpoint]
            groups = {"": [a - b for a, b in study.switched(name)]} if x.test.within else study.groups(name)
            deviation, freedom = pooled(groups)
            if x.estimate is None or not freedom:
                continue
            ends = [deviation * math.sqrt(freedom / float(chi2.ppf(tail, freedom))) for tail in (0.975, 0.025)]
            spread = [f"{y:.{known.digits + 1}f}" for y in (deviation, *ends)]
            levels = (look.level, look.level / len(outcome.experiment.families[x.family]))
            least = [known.shown(detectable(x.estimate.error, freedom, level), sign=False) for level in levels]
            row: list[str | None] = [title_of(name, study), x.test.name, f"{spread[0]} [{spread[1]}, {spread[2]}]"]
            rows.append([*row, str(freedom), *least, known.unit])
    return Table(
        name=f"trainings_power{outcome.suffix}",
        title=f"{_heading(outcome)}differences that these trainings could have seen with a probability of .8",
        columns=["endpoint", "difference", "standard deviation [95 %]", "df", "alone", "first of its family", "unit"],
        rows=rows,
        note="The standard deviation is that between trainings of an arm, pooled over arms, or that of differences "
        "within trainings. Alone: one test at the look's level. First of its family: at that level divided by the "
        "number of tests, which Holm's correction asks of the smallest p.",
    )


def lengths(outcome: Outcome) -> Table:
    rows: list[list[str | None]] = []
    asked = {test.name: test.weights for test in outcome.experiment.tests if len(test.weights) == 2}
    for _, study in outcome.looks[-1:]:
        for task in NEEDLES:
            found = [by_length(study, task, weights) for weights in asked.values()]
            for n in sorted({n for x in found for n in x}):
                differences = [shown(x[n], ENDPOINTS["R1"]) if n in x else None for x in found]
                rows.append([TITLES[task], length_title(n), *differences])
    return Table(
        name=f"trainings_lengths{outcome.suffix}",
        title=f"{_heading(outcome)}differences at single lengths, points (exploratory)",
        columns=["task", "nominal length", *asked],
        rows=rows,
        note="95 % intervals over trainings, each by itself, not corrected for their number.",
    )


def sentences(outcomes: list[Outcome], left_out: list[str]) -> list[str]:
    """The answers in short, and which trainings did not count."""
    said = []
    for outcome in outcomes:
        name = outcome.experiment.name
        if not outcome.looks:
            said.append(f"{name or 'Trainings'}: no complete seed, so that no test can be made.")
        for look, study in outcome.looks:
            for x in outcome.answers(look, study):
                if x.estimate is not None and x.family == next(iter(outcome.experiment.families)):
                    endpoint = ENDPOINTS[x.test.endpoint]
                    said.append(
                        f"{_heading(outcome)}{look.name}, level {look.level:g}. {title_of(x.test.endpoint, study)}, "
                        f"{x.test.name}: {shown(x.estimate, endpoint)} {endpoint.unit}, p {x.p:.2g}, Holm "
                        f"{x.p_holm:.2g}: {x.verdict}."
                    )
        for why in dict.fromkeys(why for why in outcome.status.values() if why != "counts"):
            units = ", ".join(unit for unit, status in outcome.status.items() if status == why)
            said.append(f"{_heading(outcome)}not in these tests: {units} ({why}).")
    return said + [f"Left out of this page: {x}." for x in left_out]
