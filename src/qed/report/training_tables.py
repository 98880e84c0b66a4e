"""Tables over trainings: the paper's claims, the tests and their answers, how firm these are, what they rest on."""

from __future__ import annotations

import math

from scipy.stats import chi2

from ..analysis import registered
from ..analysis.claims import by_length, claims
from ..analysis.contrasts import contrast, detectable, pooled
from ..analysis.names import NEEDLES, TITLES, length_title, name_of
from ..analysis.registered import Answer, Outcome, answered, not_learned, split
from ..analysis.results import Run
from ..analysis.trainings import ENDPOINTS, Study, at_training_length
from .markup import Table

PAST = "Past the training length are cells whose shortest prompt has more tokens than a row of training."


def answer_tables(outcomes: list[Outcome]) -> list[Table]:
    """What a reader looks for first: the paper's claims, and the tests."""
    tables = []
    for outcome in outcomes:
        asked = {test.name for test in outcome.experiment.tests}
        tables += [*([claims_table(outcome)] if registered.MECHANISM[0] in asked else []), tests(outcome)]
    return [table for table in tables if table.rows]


def other_tables(outcomes: list[Outcome], runs: list[Run]) -> list[Table]:
    """What the answers rest on."""
    makers = (means, splits, sensitivity, detectable_differences, lengths)
    tables = [make(outcome) for outcome in outcomes for make in makers]
    tables += [endpoints(outcomes, runs)] if outcomes else []
    return [table for table in tables if table.rows]


def heading(outcome: Outcome) -> str:
    """What titles and sentences about an experiment begin with."""
    return f"{outcome.experiment.name}: " if outcome.experiment.registered else "Exploratory: "


def title_of(endpoint: str, study: Study) -> str:
    """An endpoint in words, with its short name."""
    if endpoint == "loss":
        return "validation loss"
    task = TITLES.get(study.task(endpoint), study.task(endpoint))
    return f"{task}, one half crossed (L50)" if endpoint == "L50" else f"{task} past training ({endpoint})"


def claims_table(outcome: Outcome) -> Table:
    """The paper's claims, what these trainings say about each, and what the paper's own trainings say."""
    rows: list[list[str | None]] = [
        [
            claim.name,
            claim.about,
            claim.verdict,
            claim.ours,
            claim.trainings,
            "registered" if claim.registered else "exploratory",
            claim.says,
            claim.theirs,
            claim.theirs_p,
        ]
        for claim in claims(outcome)
    ]
    look = f", {outcome.looks[-1][0].name}" if outcome.looks else ""
    why = {(i, j): str(row[2]) for i, row in enumerate(rows) for j, cell in enumerate(row) if cell is None}
    return Table(
        name=f"trainings_claims{outcome.suffix}",
        title=f"{heading(outcome)}the paper's claims over trainings{look}",
        columns=[
            *("claim", "here", "answer", "over trainings [95 %]", "trainings", "kind"),
            *("says", "over its trainings [95 %]", "p"),
        ],
        rows=rows,
        theirs={6, 7, 8},
        prose={1, 3, 6},
        answers=2,
        why=why,
        note="Answers to tests of the plan are corrected for the number of tests in their family and are given at the "
        "look's level. Other answers are those of single tests at .05. The paper's columns are computed from its "
        "tables with the same pooled variance, over five arms of two trainings.",
    )


def tests(outcome: Outcome) -> Table:
    """Every test of an experiment at every look, with its answer."""
    rows: list[list[str | None]] = []
    for look, study in outcome.looks:
        for answer in outcome.answers(look, study):
            test = answer.test
            row: list[str | None] = [look.name, answer.family, title_of(test.endpoint, study), test.name]
            *ps, said = _decided(answer)
            rows.append([*row, said, *_estimate(answer), f"{look.level:g}", *ps])
    counted = " ".join(f"The {look.name}, has {len(study.runs)} trainings." for look, study in outcome.looks)
    if not outcome.experiment.registered:
        counted = f"{sum(len(study.runs) for _, study in outcome.looks)} trainings are taken together. "
        counted += "No plan was given, so that nothing here is registered."
    return Table(
        name=f"trainings_tests{outcome.suffix}",
        title=heading(outcome) + ("registered tests" if outcome.experiment.registered else "the plan's tests"),
        columns=[
            *("look", "family", "endpoint", "difference", "answer", "estimate [95 %]", "90 % interval"),
            *("df", "level", "p", "p, Holm"),
        ],
        rows=rows,
        answers=4,
        note="Estimates are in points of accuracy, for L50 in octaves. The unit is a training. Student's t is used "
        "with the variances within arms pooled over all arms. The difference between s = 1 and s = 0 is taken within "
        "trainings. Holm's correction is made within a family. The answer is yes if Holm's p is below the level and "
        "the difference is positive, contrary if p is below the level and the difference is negative, equivalent if "
        "neither holds and the 90 % interval lies within ±3 points (±0.25 octaves), and undecided otherwise. "
        f"{counted}",
    )


def _estimate(answer: Answer) -> list[str | None]:
    """The estimate with its 95 % interval, the 90 % interval, and the degrees of freedom."""
    endpoint, estimate = ENDPOINTS[answer.test.endpoint], answer.estimate
    if estimate is None:
        return [None, None, None]
    narrow = endpoint.shown_interval(estimate.interval(0.9))
    return [endpoint.shown_estimate(estimate), narrow, f"{estimate.freedom:g}"]


def _decided(answer: Answer) -> list[str | None]:
    """p, p after Holm's correction, and the answer."""
    return [f"{answer.p:.3g}", f"{answer.p_holm:.3g}", answer.verdict]


def means(outcome: Outcome) -> Table:
    """The mean of every arm over its trainings, for every endpoint."""
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
            row.append(ENDPOINTS[endpoint].shown_estimate(mean).replace("+", ""))
        rows.append(row)
    return Table(
        name=f"trainings_means{outcome.suffix}",
        title=f"{heading(outcome)}means of arms over trainings",
        columns=["arm", "trainings", *(title_of(x, study) for x in asked)],
        rows=rows,
        note="In brackets are 95 % intervals over trainings, with variances pooled over arms.",
    )


def splits(outcome: Outcome) -> Table:
    """QED's difference from GDN-2, split into what training found and what the correction does."""
    rows: list[list[str | None]] = []
    asked = [test.endpoint for test in outcome.experiment.tests if test.within]
    for endpoint in asked:
        for look, study in outcome.looks[-1:]:
            divided = split(study, endpoint)
            if divided is not None:
                where = ", ".join(length_title(int(n.rsplit("-", 1)[1])) for n in divided.cells)
                differences = (divided.whole, divided.training, divided.correction)
                values = [ENDPOINTS[endpoint].shown_estimate(x) for x in differences]
                rows.append([look.name, title_of(endpoint, study), where, *values])
    return Table(
        name=f"trainings_split{outcome.suffix}",
        title=f"{heading(outcome)}QED − GDN-2: what training with the correction found, and what the correction does",
        columns=["look", "endpoint", "lengths", "QED − GDN-2", "QED at s = 0 − GDN-2", "QED at s = 1 − at s = 0"],
        rows=rows,
        note="The first difference is the sum of the other two. In brackets are 95 % intervals over trainings: the "
        "first two with variances pooled over arms, the third from trainings of QED alone.",
    )


def sensitivity(outcome: Outcome) -> Table:
    """The primary tests in the registered way and in others."""
    rows: list[list[str | None]] = []
    left_out: list[str] = []
    family, primary = next(iter(outcome.experiment.families.items()), ("", ()))
    for look, study in outcome.looks[-1:] if primary else []:
        left_out = [f"{name_of(run.arm)} seed {run.seed}" for run in not_learned(study)]
        answers = {way: answered(study, family, primary, look.level, way) for way in registered.WAYS}
        if known := outcome.experiment.known_before:
            others = study.without(run for run in study.runs if run.seed in known)
            way = f"without seed {', '.join(map(str, known))}"
            answers[way] = answered(others, family, primary, look.level, registered.AS_REGISTERED)
        for i, test in enumerate(primary):
            for way, answer in ((way, answers[way][i]) for way in answers):
                how = way if answer.exact else f"{way} (100,000 draws)"
                rows.append([f"{test.endpoint}: {test.name}", how, _estimate(answer)[0], *_decided(answer)])
                if way == registered.PERMUTED and answer.estimate is not None:
                    rows[-1][2] = ENDPOINTS[test.endpoint].shown(answer.estimate.value)  # it has no interval of its own
    gone = f"They are {', '.join(left_out)}." if left_out else "There are none."
    return Table(
        name=f"trainings_sensitivity{outcome.suffix}",
        title=f"{heading(outcome)}the primary tests in other ways",
        columns=["test", "way", "estimate [95 %]", "p", "p, Holm", "answer"],
        rows=rows,
        answers=5,
        note=f"{registered.AS_REGISTERED.capitalize()}: the variance is pooled and the scoring is RULER's. "
        f"{registered.ONLY_LEARNED.capitalize()}: those under {registered.LEARNED:g} % at the training length are "
        f"left out. {gone} Welch's test takes each arm's own variance; a difference within trainings has Student's "
        f"test either way. {registered.PERMUTED.capitalize()}: labels of trainings are exchanged, or signs of "
        "differences within trainings. "
        f"{registered.FIRST_ANSWERS.capitalize()}: only the first number generated counts.",
    )


def detectable_differences(outcome: Outcome) -> Table:
    """The differences that these trainings could have detected, from how much they differ."""
    rows: list[list[str | None]] = []
    for look, study in outcome.looks[-1:]:
        for answer in outcome.answers(look, study):
            test, endpoint = answer.test, ENDPOINTS[answer.test.endpoint]
            switched = {"": [on - off for on, off in study.switched(test.endpoint)]} if test.within else {}
            deviation, freedom = pooled(switched or study.groups(test.endpoint))
            if answer.estimate is None or not freedom:
                continue
            ends = [deviation * math.sqrt(freedom / float(chi2.ppf(tail, freedom))) for tail in (0.975, 0.025)]
            spread = [f"{x:.{endpoint.digits + 1}f}" for x in (deviation, *ends)]
            levels = (look.level, look.level / len(outcome.experiment.families[answer.family]))
            error = answer.estimate.error
            least = [endpoint.shown(detectable(error, freedom, level), sign=False) for level in levels]
            row: list[str | None] = [title_of(test.endpoint, study), test.name]
            rows.append([*row, f"{spread[0]} [{spread[1]}, {spread[2]}]", str(freedom), *least, endpoint.unit])
    return Table(
        name=f"trainings_power{outcome.suffix}",
        title=f"{heading(outcome)}differences that these trainings could have detected with a probability of .8",
        columns=[
            *("endpoint", "difference", "standard deviation [95 %]", "df"),
            *("as a single test", "as the first of its family", "unit"),
        ],
        rows=rows,
        note="The standard deviation is that between trainings of an arm, pooled over arms, or that of differences "
        "within trainings. A single test has the look's level. The first of its family has that level divided by the "
        "number of tests, which Holm's correction asks of the smallest p.",
    )


def lengths(outcome: Outcome) -> Table:
    """The differences between two arms at single lengths."""
    rows: list[list[str | None]] = []
    asked = {test.name: test.weights for test in outcome.experiment.tests if len(test.weights) == 2}
    for _, study in outcome.looks[-1:]:
        for task in NEEDLES:
            estimates = [by_length(study, task, weights) for weights in asked.values()]
            for n in sorted({n for by_n in estimates for n in by_n}):
                differences = [ENDPOINTS["R1"].shown_estimate(x[n]) if n in x else None for x in estimates]
                rows.append([TITLES[task], length_title(n), *differences])
    return Table(
        name=f"trainings_lengths{outcome.suffix}",
        title=f"{heading(outcome)}differences at single lengths, in points (exploratory)",
        columns=["task", "nominal length", *asked],
        rows=rows,
        note="In brackets are 95 % intervals over trainings, each by itself and not corrected for their number.",
    )


def endpoints(outcomes: list[Outcome], runs: list[Run]) -> Table:
    """The endpoints of every training, whether it counts or not."""
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
    meaning = [f"{title_of(x, study)} is in {units.get(ENDPOINTS[x].unit, ENDPOINTS[x].unit)}" for x in names]
    return Table(
        name="trainings_endpoints",
        title="Endpoints of every training",
        columns=columns,
        rows=rows,
        note=f"{'; '.join(meaning)}. {PAST} An octave is a doubling: L50 is log2 of prompt tokens.",
    )


def _cell(endpoint: str, value: float | None) -> str | None:
    return None if value is None else ENDPOINTS[endpoint].shown(value, sign=False)
