"""Registered experiments: looks, verdicts and families as the plan has them, from folders of results to the page."""

import csv
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

from qed.analysis import results
from qed.analysis.claims import claims, papers
from qed.analysis.contrasts import Estimate, contrast, pooled
from qed.analysis.registered import (
    BOUND,
    EXPERIMENTS,
    MECHANISM,
    PRIMARY,
    SECONDARY,
    TREND,
    WAYS,
    answered,
    experiments_in,
    looks,
    outcome,
    outcomes,
    unchanged,
    verdict,
)
from qed.analysis.results import Run, runs
from qed.analysis.stats import holm
from qed.cli import app
from qed.report import conclusions, training_tables
from qed.report.training_figures import last_strengths

from .synthetic import plan_file, unit

E1, E2, E3 = EXPERIMENTS
SEEDS = 7


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """E1 with seven seeds, and E3 with two beside it."""
    place = tmp_path_factory.mktemp("registered")
    for seed in range(SEEDS):
        for arm, shift in (("gdn2", 0.0), ("qed", 1.0), ("qed-rand", 0.0)):
            unit(place / "medium", arm, seed, shift=shift, samples=20)
    for seed in range(2):
        for arm in ("qed@0.1", "qed@0.5", "qed@1"):
            unit(place / "bounds", arm, seed, samples=20, tasks=("niah_single_1",))
    plan_file(place / "PLAN.md")
    yield place
    shutil.rmtree(place)


def test_families_are_the_plans() -> None:
    assert [(x.endpoint, x.name) for x in PRIMARY] == [
        ("R1", "QED − GDN-2"),
        ("R1", "QED − QED-rand"),
        ("R1", "QED at s = 1 − at s = 0"),
    ]
    assert len(SECONDARY) == 8
    assert [x.endpoint for x in SECONDARY if x.within] == ["R2", "RM"]
    assert len(BOUND) == 4
    assert [x.arms for x in EXPERIMENTS[:2]] == [("gdn2", "qed", "qed-rand")] * 2


@pytest.mark.parametrize(
    ("complete", "found"),
    [
        (0, []),
        (5, [(5, 0.05)]),
        (6, [(6, 0.00305), (6, 0.0469)]),
        (9, [(6, 0.00305), (9, 0.0469)]),
        (11, [(6, 0.00305), (11, 0.0469)]),
        (12, [(6, 0.00305), (12, 0.0490)]),
        (14, [(6, 0.00305), (12, 0.0490)]),
    ],
)
def test_looks_of_e1(complete: int, found: list[tuple[int, float]]) -> None:
    assert [(x.seeds, x.level) for x in looks(E1, complete)] == found


def test_looks_of_the_others() -> None:
    assert [(x.seeds, x.level) for x in looks(E2, 6)] == [(4, 0.05)]
    assert [(x.seeds, x.level) for x in looks(E2, 3)] == [(3, 0.05)]
    assert [(x.seeds, x.level) for x in looks(E3, 8)] == [(8, 0.05)]
    assert looks(E3, 0) == []
    assert "if the experiment ends" in looks(E1, 9)[-1].name
    assert "if" not in looks(E1, 12)[-1].name
    assert looks(E2, 3)[0].name == "one look, at 3 seeds, of 4 planned, if the experiment ends with them"
    assert [x.open for n in (5, 6, 9, 12) for x in looks(E1, n)] == [True, False, True, False, True, False, False]
    assert [x.open for n in (3, 4) for x in looks(E2, n)] == [True, False]


NARROW = stats.t.ppf(0.95, 30)  # half of the 90 % interval, in standard errors


@pytest.mark.parametrize(
    ("value", "error", "p", "said"),
    [
        (5.0, 1.0, 0.0489, "yes"),
        (5.0, 1.0, 0.0490, "undecided"),  # the level itself is not below the level
        (-5.0, 1.0, 0.0489, "contrary"),
        (2.0, 0.99 / NARROW, 0.01, "yes, smaller than 3 points"),
        (2.0, 1.01 / NARROW, 0.01, "yes"),
        (2.0, 0.99 / NARROW, 0.05, "equivalent"),
        (2.0, 1.01 / NARROW, 0.05, "undecided"),
        (-2.0, 0.99 / NARROW, 0.05, "equivalent"),
        (-2.0, 0.99 / NARROW, 0.01, "contrary"),
    ],
)
def test_verdicts(value: float, error: float, p: float, said: str) -> None:
    assert verdict(Estimate(value, error, 30), p, 0.049, "R1") == said


def test_margins_are_the_endpoints() -> None:
    """0.2 ± 0.04 octaves are within a quarter of one; as points they are too, with ±3 about them."""
    small = Estimate(0.2, 0.04 / NARROW, 30)
    assert verdict(small, 1.0, 0.05, "L50") == "equivalent"
    assert verdict(small._replace(value=0.22), 1.0, 0.05, "L50") == "undecided"
    assert verdict(small._replace(value=0.22), 0.01, 0.05, "R1") == "yes, smaller than 3 points"
    nats = Estimate(0.005, 0.0049 / NARROW, 30)
    assert unchanged(nats, 0.01) == "equivalent"
    assert unchanged(nats._replace(value=0.006), 0.01) == "undecided"
    assert unchanged(nats._replace(value=-0.016), 0.01) == "different"


def test_the_trend_is_a_line_through_the_means() -> None:
    """The contrast is how far a least-squares line over the scores rises from the first bound to the last."""
    groups = {arm: [float(x), float(x) + 1] for arm, x in zip(TREND, (3, 7, 4, 9, 12), strict=True)}
    means = [np.mean(x) for x in groups.values()]
    slope = np.polyfit([-2, -1, 0, 1, 2], means, 1)[0]
    assert contrast(groups, TREND).value == pytest.approx(4 * slope)


def test_answers_of_a_family(made: Path) -> None:
    """By scipy alone, from the endpoints of the first six seeds."""
    found = outcome(E1, runs(made / "medium"))
    assert [x[0].seeds for x in found.looks] == [6, 7]
    look, study = found.looks[0]
    assert {run.seed for run in study.runs} == set(range(6))
    values = study.groups("R1")
    deviation, freedom = pooled(values)
    assert freedom == 15
    t = [(np.mean(values["qed"]) - np.mean(values[x])) / (deviation * np.sqrt(2 / 6)) for x in ("gdn2", "qed-rand")]
    own = stats.ttest_1samp([on - off for on, off in study.switched("R1")], 0).pvalue
    expected = [*(2 * stats.t.sf(abs(x), 15) for x in t), own]
    answers = [x for x in found.answers(look, study) if x.family == "E1 primary"]
    assert [x.p for x in answers] == pytest.approx(expected)
    assert [x.p_holm for x in answers] == pytest.approx(holm(expected))
    assert [x.verdict for x in answers[:2]] == ["yes", "yes"]  # an octave further, by construction
    assert len(found.answers(look, study)) == 3 + 8


def test_the_headline_says_which_look_it_is(made: Path) -> None:
    """Before the last seed is there, the answer is no more than what it would be."""
    found = runs(made / "medium")
    said = conclusions.verdict(outcomes(found, registered=True), found)
    assert said.word == "Yes so far"
    assert "; registered, second look, at 7 seeds, if the experiment ends with them)." in said.said
    alone = conclusions.verdict(outcomes(found, registered=False), found)
    assert alone.word == "Yes"
    assert "; exploratory)." in alone.said


def test_other_ways(made: Path) -> None:
    _, study = outcome(E1, runs(made / "medium")).looks[-1]
    by_way = {way: answered(study, "E1 primary", PRIMARY, 0.0469, way) for way in WAYS}
    assert by_way["Welch's test"][0].p == pytest.approx(
        stats.ttest_ind(study.groups("R1")["qed"], study.groups("R1")["gdn2"], equal_var=False).pvalue
    )
    assert by_way["permutation test"][0].p == pytest.approx(2 / 3432)  # C(14, 7): all of QED's are ahead
    first = by_way["first answers"][0].estimate
    assert first is not None
    groups = study.groups("R1", first=True)
    assert first.value == pytest.approx(np.mean(groups["qed"]) - np.mean(groups["gdn2"]))
    assert groups != study.groups("R1")


def test_trainings_that_have_not_learned(made: Path, tmp_path: Path) -> None:
    """They stay in the registered test, and the sensitivity check is without them."""
    shutil.copytree(made / "medium", tmp_path / "runs")
    path = tmp_path / "runs" / "gdn2-2" / "eval" / "niah_single_1-2048.jsonl"
    rows = [json.loads(line) | {"correct": 0} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = json.loads(path.with_suffix(".json").read_text())
    summary["result"] |= {"correct": 0, "accuracy": 0.0}
    path.with_suffix(".json").write_text(json.dumps(summary))
    found = outcome(E1, runs(tmp_path / "runs"))
    look, study = found.looks[-1]
    registered, only_learned = (answered(study, "E1 primary", PRIMARY, look.level, way)[0] for way in WAYS[:2])
    assert registered.estimate is not None
    assert only_learned.estimate is not None
    assert (registered.estimate.freedom, only_learned.estimate.freedom) == (18, 17)
    assert "They are GDN-2 seed 2." in training_tables.sensitivity(found).note


def test_a_seed_that_is_not_complete(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "medium", tmp_path / "runs")
    (tmp_path / "runs" / "qed-1" / "strength" / "0" / "niah_single_2-8192.json").unlink()
    (tmp_path / "runs" / "qed-rand-4" / "eval" / "niah_multikey_1-1024.json").unlink()
    metrics = tmp_path / "runs" / "qed-6" / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:6]))
    found = outcome(E1, runs(tmp_path / "runs"))
    assert found.status["qed-1"] == "incomplete, without niah_single_2-8192 at s = 0"
    assert found.status["qed-rand-4"] == "incomplete, without niah_multikey_1-1024"
    assert found.status["gdn2-4"] == "of a seed that is not complete"
    assert found.status["qed-6"] == "incomplete, without the end of its training"
    assert [(look.seeds, look.level) for look, _ in found.looks] == [(4, 0.05)]
    assert {run.seed for run in found.looks[0][1].runs} == {0, 2, 3, 5}


def test_seeds_beyond_the_plans_stand_apart(tmp_path: Path) -> None:
    for seed in range(5):
        for arm in E2.arms:
            unit(tmp_path, arm, seed, recipe="paper_short", samples=3)
    unit(tmp_path, "qed-nogate", 0, recipe="paper_short", samples=3)
    found = runs(tmp_path)
    (result,) = outcomes(found, registered=True)
    assert result.experiment is E2
    assert result.status["qed-4"] == "apart, beyond the 4 seeds of the plan"
    assert {run.seed for run in result.looks[0][1].runs} == {0, 1, 2, 3}
    table = training_tables.endpoints([result], found)
    assert ["QED-nogate", "0", "in no experiment: exploratory"] in [row[:3] for row in table.rows]


def test_e3_takes_its_ends_from_e1(made: Path) -> None:
    found = [*runs(made / "bounds"), *runs(made / "medium")]
    assert experiments_in(found) == [E1, E3]
    assert experiments_in(runs(made / "medium")) == [E1]
    bounds = outcome(E3, found)
    ((look, study),) = bounds.looks
    assert (look.seeds, look.level) == (2, 0.05)
    assert {arm: len(some) for arm, some in study.arms.items()} == dict.fromkeys(TREND, 2)
    answers = bounds.answers(look, study)
    assert [x.test.name for x in answers][1:] == ["qed@0.1 − QED", "qed@0.5 − QED", "qed@1 − QED"]
    assert all(x.estimate is not None and x.estimate.freedom == 5 for x in answers)
    assert "gdn2-6" not in bounds.status  # a seed at which E3 has not begun


def test_the_papers_own_numbers() -> None:
    """+21.4 with a standard deviation of 12.6, p ≈ .15 over its trainings, as the audit has them."""
    deviation, freedom = pooled(papers("R1"))
    assert (round(deviation, 1), freedom) == (12.6, 5)
    found = contrast(papers("R1"), MECHANISM[1])
    assert (round(found.value, 1), round(found.p, 2)) == (21.4, 0.15)
    assert contrast(papers("fda"), MECHANISM[1]).value == pytest.approx((7.80 - 4.45 + 7.99 - 4.26) / 2)
    assert contrast(papers("loss"), MECHANISM[1]).value == pytest.approx((0.0005 - 0.0011) / 2)


def test_claims(made: Path) -> None:
    found = claims(outcome(E1, runs(made / "medium")))
    assert {x.name for x in found} >= {"mechanism", "direction", "gate", "projection", "strength", "validation loss"}
    assert {x.name for x in found} >= {"FDA", "SQuAD", "SWDE", "eigenvalues"}
    by = {(x.name, x.about.split(":")[0]): x for x in found}
    assert by["mechanism", "R1"].verdict == "yes"
    assert by["mechanism", "R1"].registered
    assert by["mechanism", "R1"].theirs == "+21.4 [-11.1, +53.8]"
    assert by["gate", "R1"].verdict == "not trained here"
    assert not by["gate", "R1"].registered


def report(*words: object) -> str:
    done = CliRunner().invoke(app, ["report", *map(str, words)], env={"COLUMNS": "4000"})
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.slow
def test_the_page_of_a_plan(made: Path, tmp_path: Path) -> None:
    """A unit of another code is named and left out; the others are tested, of two folders together."""
    shutil.copytree(made / "medium", tmp_path / "runs")
    config = tmp_path / "runs" / "gdn2-0" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"code": "d" * 64}))
    options = ("--plan", made / "PLAN.md", "--out", tmp_path / "out")
    said = report(tmp_path / "runs", made / "bounds", *options)
    why = "gdn2-0: its results are of several codes: dddddddddddd in config.json, cccccccccccc in"
    page = (tmp_path / "out" / "report.md").read_text()
    assert f"left out: {why}" in said
    assert f"Left out of this page: {why}" in page
    assert "E1: second look, at 6 seeds, if the experiment ends with them, level 0.0469." in page
    assert "E3: one look, at 1 seed, of 8 planned" in page
    with (tmp_path / "out" / "tables" / "trainings_tests_e1.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 11
    assert {row["df"] for row in rows if "QED − GDN-2" in row["difference"]} == {"15"}
    with (tmp_path / "out" / "tables" / "trainings_sensitivity_e1.csv").open() as file:
        ways = [row["way"] for row in csv.DictReader(file)]
    assert ways.count("without seed 0") == 3
    with (tmp_path / "out" / "tables" / "trainings_endpoints.csv").open() as file:
        assert not [row for row in csv.DictReader(file) if row["arm"] == "GDN-2" and row["seed"] == "0"]
    claims_of = (tmp_path / "out" / "tables" / "trainings_claims_e1.csv").read_text().splitlines()
    assert claims_of[0].count("paper: ") == 3
    for name in ("depth_niah_single_1", "distance", "strength_by_head", "trainings_half", "trainings_niah_single_1"):
        assert (tmp_path / "out" / "figures" / f"{name}.png").stat().st_size > 5000


def test_the_page_without_a_plan_is_exploratory(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qed.report.drawing.drawn", lambda _, kinds, **__: dict.fromkeys(kinds, b""))
    report(made / "medium", "--out", tmp_path / "out")
    page = (tmp_path / "out" / "report.md").read_text()
    assert "## Over trainings: exploratory, no plan was given" in page
    assert "| registered |" not in page
    assert "first look" not in page
    with (tmp_path / "out" / "tables" / "trainings_tests.csv").open() as file:
        assert {row["level"] for row in csv.DictReader(file)} == {"0.05"}


def test_trainings_of_no_plan_are_refused(made: Path, tmp_path: Path) -> None:
    plan = plan_file(tmp_path / "PLAN.md")
    plan.write_text(plan.read_text().replace("all experiments", "all the experiments"))
    done = CliRunner().invoke(
        app, ["report", str(made / "medium"), "--plan", str(plan), "--out", str(tmp_path / "out")]
    )
    assert done.exit_code == 1
    assert "--plan: expected trainings of this plan, got none; gdn2-0: its plan is" in " ".join(done.output.split())
    done = CliRunner().invoke(
        app, ["report", str(made / "medium"), str(made / "medium"), "--out", str(tmp_path / "out")]
    )
    assert done.exit_code == 1
    assert "are the same arm and seed" in " ".join(done.output.split())
    assert not (tmp_path / "out").exists()


def test_runs_are_read_once(made: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """However many tables and figures there are."""
    monkeypatch.setattr("qed.report.drawing.drawn", lambda draw, kinds, **__: dict.fromkeys(kinds, b""))
    read: list[Path] = []
    lines = results.by_index
    monkeypatch.setattr(results, "by_index", lambda path: read.append(path) or lines(path))  # type: ignore[func-returns-value]
    report(made / "medium", "--plan", made / "PLAN.md", "--out", tmp_path / "out")
    assert len(read) == len(set(read)) == len(list((made / "medium").rglob("niah*.jsonl")))


def test_lambda_by_head(made: Path) -> None:
    found = last_strengths(Run(made / "medium" / "qed-0"))
    assert {int(x) for x in found} == set(range(12))
    assert {len(x) for x in found.values()} == {4}
    assert last_strengths(Run(made / "medium" / "gdn2-0")) == {}
