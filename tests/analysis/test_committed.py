"""What is committed under results/ follows from the answers committed with it, and README says the same."""

import csv
from pathlib import Path

import pytest

from qed.analysis import tables
from qed.analysis.results import runs

ROOT = Path(__file__).parents[2]
SMALL = ROOT / "results" / "small"
NEEDLES = ("niah_single_1", "niah_single_2", "niah_single_3")


@pytest.mark.parametrize("task", NEEDLES)
def test_accuracies_are_counted_from_answers(task: str) -> None:
    found = runs(SMALL / "runs")
    for run in found:
        for name, result in run.results.items():
            if name.startswith(task):
                assert sum(result.right.values()) == result.result["correct"], result.path
    assert tables.retrieval(found, task).csv() == (SMALL / "tables" / f"table3_{task}.csv").read_text()


def test_contrasts_and_losses() -> None:
    found = runs(SMALL / "runs")
    for table in (tables.contrast_table(found), tables.validation(found), tables.strength_sweep(found)):
        assert table.csv() == (SMALL / "tables" / f"{table.name}.csv").read_text()


@pytest.mark.parametrize("page", ["README.md", "results/small/RESULTS.md"])
def test_pages_show_these_numbers(page: str) -> None:
    """Every row of a page's tables that begins with an arm's name, or a seed and an arm's name, by its columns."""
    with (SMALL / "tables" / "table3_niah_single_1.csv").open() as file:
        rows = list(csv.DictReader(file))
    lines = (
        (ROOT / page)
        .read_text()
        .split("S-NIAH-1, per cent right of 500" if page == "README.md" else "### S-NIAH-1\n")[1]
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
