"""Tables of lm-eval's suites: numbers are those of files, means need all tasks, no column mixes ways of asking."""

import json
from pathlib import Path
from typing import Any

import pytest

from qed.analysis import results
from qed.analysis.stats import clopper_pearson
from qed.eval.harness.suites import PREFIX, SUITES
from qed.report.page import write
from qed.report.suites import suite_tables

COMMONSENSE, RULER = SUITES["commonsense"], SUITES["ruler"]


def kept(run: Path, task: str, measures: dict[str, float], length: int | None = None, **about: Any) -> None:
    """A result of lm-eval as `qed eval` writes it."""
    said = {f"{name},none": value for name, value in measures.items()} | {"sample_len": 40, "higher_is_better": {}}
    known = {"task": task, "version": 1.0, "lm_eval": "0.4.13", "examples": "e"} | about
    known |= {} if length is None else {"length": length}
    path = run / "eval" / (f"{PREFIX}-{task}.json" if length is None else f"{PREFIX}-{task}-{length}.json")
    path.write_text(json.dumps({"about": known, "result": {task: said}}))


@pytest.fixture
def asked(base: Path) -> Path:
    for arm, shift in (("gdn2-0", 0), ("qed-0", 4), ("qed-1", 8)):
        for number, (task, member) in enumerate(COMMONSENSE.items()):
            shares = dict.fromkeys(("acc", "acc_norm"), (10 + number + shift) / 40)
            kept(base / arm, task, shares | {name: 20.5 + shift for name in member.shown if "acc" not in name})
        for number, task in enumerate(RULER):
            kept(base / arm, task, {"4096": (number + shift) / 40}, 4096)
    kept(base / "qed-0", "ruler_vt", {"8192": 0.25}, 8192)
    return base


def rows(base: Path, name: str) -> dict[tuple[str, ...], dict[str, str | None]]:
    (table,) = [x for x in suite_tables(results.runs(base)) if x.name == name]
    keys = 3 if "length" in table.columns else 2
    return {tuple(map(str, row[:keys])): dict(zip(table.columns, row, strict=True)) for row in table.rows}


def test_all_tasks_stand_beside_each_other(asked: Path) -> None:
    found = rows(asked, "suite_commonsense")
    assert found.keys() == {("GDN-2", "0"), ("QED", "0"), ("QED", "1")}
    row = found["QED", "0"]
    assert row["WikiText (perplexity a word)"] == "24.500"
    low, high = clopper_pearson(10 + 2 + 4, 40)
    assert row["PIQA (%)"] == f"40.0 [{100 * low:.1f}, {100 * high:.1f}]"
    assert row["mean (%)"] == f"{sum(10 + n + 4 for n in range(1, 11)) / 40 * 10:.1f}"  # all but WikiText


def test_ruler_by_length(asked: Path) -> None:
    found = rows(asked, "suite_ruler")
    assert found.keys() == {("GDN-2", "0", "4K"), ("QED", "0", "4K"), ("QED", "0", "8K"), ("QED", "1", "4K")}
    assert found["QED", "0", "4K"]["VT"] == f"{100 * 12 / 40:.1f}"
    assert found["QED", "0", "4K"]["mean"] == f"{100 * (6 + 4) / 40:.1f}"
    assert found["QED", "0", "8K"]["mean"] is None


def test_what_was_asked_otherwise_is_not_in_the_column(asked: Path) -> None:
    kept(asked / "qed-1", "piqa", {"acc": 0.9}, version=2.0)
    found = rows(asked, "suite_commonsense")
    assert found["QED", "1"]["PIQA (%)"] is None
    assert found["QED", "1"]["mean (%)"] is None
    assert found["QED", "0"]["mean (%)"] is not None
    page = write(asked, asked.parent / "out").read_text()
    assert "asked otherwise: version is 2.0 instead of 1.0" in page
    assert (asked.parent / "out" / "tables" / "suite_ruler.csv").exists()


def test_what_is_not_finished_or_damaged_is_named(asked: Path) -> None:
    (asked / "qed-0" / "eval" / f"{PREFIX}-copa.json").write_text('{"about": {"task": "copa"}}')
    (asked / "qed-1" / "eval" / f"{PREFIX}-copa.json").write_text('{"about": {"task": "copa"}, "result": {"x": 1}}')
    runs, problems = results.survey(asked)
    said = " ".join(problems)
    assert f"{PREFIX}-copa.json: not finished" in said
    assert f"{PREFIX}-copa.json: expected lm-eval's measures of copa" in said
    assert all("copa" not in run.harness for run in runs if run.arm == "qed")
