"""What is committed under results/ follows from the answers committed with it, and README says the same."""

import csv
import json
import math
import re
from pathlib import Path

import pytest

from qed.analysis.breakdown import splits
from qed.analysis.results import runs, survey
from qed.analysis.units import counting, read_registration
from qed.eval.tasks.niah import correct
from qed.report import tables
from qed.report.conclusions import conclusions
from qed.report.page import write
from qed.report.tables import all_tables
from qed.reproduce.collecting import PREDICTION_CHARACTERS

ROOT = Path(__file__).parents[2]
SMALL = ROOT / "results" / "small"
MEDIUM = ROOT / "results" / "medium"
NEEDLES = ("niah_single_1", "niah_single_2", "niah_single_3")


@pytest.mark.parametrize("task", NEEDLES)
def test_accuracies_are_counted_from_answers(task: str) -> None:
    found = runs(SMALL / "runs")
    for run in found:
        for name, result in run.results.items():
            if name.startswith(task):
                assert sum(result.right.values()) == result.result["correct"], result.path
    assert tables.retrieval(found, task).csv() == (SMALL / "tables" / f"table3_{task}.csv").read_text()


def test_every_table() -> None:
    made = {table.name: table.csv() for table in all_tables(runs(SMALL / "runs"))}
    assert made == {path.stem: path.read_text() for path in (SMALL / "tables").glob("*.csv")}


def test_what_is_concluded() -> None:
    said = (SMALL / "report.md").read_text().split("## What this run can and cannot conclude\n\n")[1].split("\n\n")[0]
    assert said.splitlines() == [f"- {x}" for x in conclusions(runs(SMALL / "runs"))]


def test_kept_predictions_are_long_enough_for_the_first_answer() -> None:
    """Of a prediction the beginning is kept: its first value begins and ends there."""
    found = [(name, x) for run in runs(SMALL / "runs") for name, x in run.results.items() if name.startswith("niah")]
    assert len(found) == 10 * 3 * 11
    for name, result in found:
        for row in result.rows:
            value = re.search(r"[a-z\d-]*\d[a-z\d-]*", row["prediction"])
            assert value is not None, name
            assert value.end() < PREDICTION_CHARACTERS, name


def test_scores_follow_from_the_answers() -> None:
    """As far as they are kept: what is right beyond the kept characters cannot be seen, and nothing else differs."""
    beyond = 0
    for run in runs(MEDIUM / "runs"):
        for result in (*run.results.values(), *run.strengths.get(0.0, {}).values()):
            for row in result.rows if "correct" in result.result else ():
                seen = correct(row["prediction"], row["gold"])
                if seen != row["correct"]:
                    assert not seen, result.path
                    assert len(row["prediction"]) == PREDICTION_CHARACTERS, result.path
                    beyond += 1
    assert beyond > 0


def test_first_answers_and_parts() -> None:
    """Two facts that were found independently of this code."""
    with (SMALL / "tables" / "first_answer.csv").open() as file:
        found = {(x["seed"], x["arm"], x["counted"]): x["S-NIAH-1 8K"] for x in csv.DictReader(file)}
    assert found["1", "QED-rand", "anywhere (RULER)"] == "73.6"
    assert found["1", "QED-rand", "first answer"] == "66.8"
    (split,) = splits(runs(SMALL / "runs"))
    assert split.lengths == [4096, 8192, 16384, 32768]
    assert [x[0] for x in split.whole.values()] == pytest.approx([-9.6, -22.85])
    assert [x[0] for x in split.training.values()] == pytest.approx([-10.95, -22.25])
    assert [x[0] for x in split.correction.values()] == pytest.approx([1.35, -0.6])


def test_contrasts_on_the_page() -> None:
    with (SMALL / "tables" / "figure2_contrasts.csv").open() as file:
        rows = ["| " + " | ".join(row) + " |" for row in csv.reader(file)]
    page = (SMALL / "RESULTS.md").read_text().splitlines()
    assert len(rows) == 13
    assert all(row in page for row in rows)


@pytest.mark.parametrize("page", ["docs/evidence.md", "results/small/RESULTS.md"])
def test_pages_show_these_numbers(page: str) -> None:
    """Every row of a page's tables that begins with an arm's name, or a seed and an arm's name, by its columns."""
    with (SMALL / "tables" / "table3_niah_single_1.csv").open() as file:
        rows = list(csv.DictReader(file))
    lines = (
        (ROOT / page)
        .read_text()
        .split("S-NIAH-1, per cent right of 500" if page == "docs/evidence.md" else "### S-NIAH-1\n")[1]
    )
    columns: list[str] = []
    checked = 0
    for line in lines.splitlines():
        cells = [x.strip() for x in line.strip("|").split("|")]
        if not line.startswith("|"):
            if checked:
                break
            continue
        if not columns:
            columns = cells
        elif cells[0] and not cells[0].startswith("---"):
            named = dict(zip(columns, cells, strict=True))
            arm = named.get("arm") or named[""]
            mine = [x for x in rows if x["arm"] == arm and x["seed"] == named.get("seed", x["seed"])]
            for column in set(columns) - {"", "arm", "seed"}:
                shown = [x[column].split(" [")[0] for x in mine]
                assert [
                    x.split(" [")[0] for x in named[column].split(", ")[:: 2 if "[" in named[column] else 1]
                ] == shown
                checked += 1
    assert checked >= 20


@pytest.mark.parametrize("name", ["medium"])
def test_units_of_registered_experiments_count(name: str) -> None:
    """Every result was made by the code and under the plan that were registered, and nothing of it is damaged."""
    found, problems = survey(ROOT / "results" / name / "runs")
    assert not problems
    assert counting(found, read_registration(ROOT / "results" / "PLAN.md")) == (found, [])


def test_the_page_of_results_says_what_is_there() -> None:
    """How many trainings are done, and the means of arms, are those of the committed answers."""
    page = (ROOT / "results" / "README.md").read_text()
    found = runs(MEDIUM / "runs")
    assert f"**Where this stands: {len(found)} of the 36 trainings" in page
    assert f"12 seeds an arm | {len(found)} of 36 |" in page
    with (MEDIUM / "tables" / "trainings_means_e1.csv").open() as file:
        for row in csv.reader(file):
            assert "| " + " | ".join(row) + " |" in page.splitlines()


@pytest.mark.slow
def test_the_registered_report_follows_from_its_answers(tmp_path: Path) -> None:
    write(MEDIUM / "runs", tmp_path, plan=ROOT / "results" / "PLAN.md")
    made, kept = ({path.name: path.read_text() for path in (x / "tables").iterdir()} for x in (tmp_path, MEDIUM))
    assert made == kept
    assert (tmp_path / "report.md").read_text() == (MEDIUM / "report.md").read_text()


def test_one_state_of_qed_seed_3_and_one_of_gdn2_seed_4_grow_along_the_noise() -> None:
    """As often as the pages say, and no other one of those that were looked at."""
    growing = {}
    for name, points in json.loads((MEDIUM / "state_norms.json").read_text())["trainings"].items():
        first, later = points[0], points[4]  # 2K and 10K tokens, where all norms are numbers
        for layer, norms in first["norms"].items():
            for head, norm in enumerate(norms):
                doublings = math.log2(later["norms"][layer][head] / norm)
                if doublings > 2:
                    growing[name, layer, head] = (later["tokens"] - first["tokens"]) / doublings
        assert points[-1]["finite"] == (name != "qed-3 s=1")
    assert growing.keys() == {("qed-3 s=1", "0", 0), ("gdn2-4 s=1", "0", 3), ("gdn2-4 s=0", "0", 3)}
    assert round(growing["qed-3 s=1", "0", 0]) == 254
    page = (ROOT / "results" / "README.md").read_text()
    assert all(f"every {x} tokens" in " ".join(page.split()) for x in ("254", "2,900"))
    whole = json.loads((MEDIUM / "state_norms.json").read_text())["trainings"]["gdn2-4 s=1"]
    slope = math.log2(whole[-1]["norms"]["0"][3] / whole[0]["norms"]["0"][3]) / (whole[-1]["tokens"] - 2048)
    assert round(1 / slope, -2) == 2900


def test_results_stay_small_enough_to_travel() -> None:
    assert sum(x.stat().st_size for x in (ROOT / "results").rglob("*") if x.is_file()) < 18e6
