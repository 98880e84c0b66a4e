"""The committed results of tracking and recall: every answer counted again, and held to theory where it is strict."""

import csv
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from qed.analysis.capacity import capacity, missing
from qed.analysis.settings import PACKED, Settings, read_settings, together, unpacked_runs
from qed.analysis.tracking import SOLVED, by_place, forbidden, reach
from qed.analysis.units import counting, read_registration
from qed.data.groups import GROUPS
from qed.eval.task import MeasuredTask
from qed.eval.tasks import named
from qed.reproduce.plan import every_rule

RESULTS = Path(__file__).parents[2] / "results"
LARGEST = 1_500_000  # bytes of everything that is kept of a scale


def kept(scale: str) -> Iterator[tuple[Settings, Path]]:
    if not (RESULTS / scale / PACKED).exists():
        pytest.skip(f"results/{scale} is not there")
    with unpacked_runs(RESULTS / scale) as runs:
        assert runs is not None
        found, problems = read_settings(runs)  # reading a result counts its answers again
        assert problems == []
        assert together([runs]).left_out == []
        yield found, runs


@pytest.fixture(scope="module")
def tracking() -> Iterator[Settings]:
    yield from (found for found, _ in kept("tracking"))


@pytest.fixture(scope="module")
def recall() -> Iterator[Settings]:
    yield from (found for found, _ in kept("recall"))


@pytest.mark.parametrize("scale", ["tracking", "recall"])
def test_what_is_kept_is_small(scale: str) -> None:
    folder = RESULTS / scale
    if not folder.exists():
        pytest.skip(f"results/{scale} is not there")
    assert sum(x.stat().st_size for x in folder.rglob("*") if x.is_file()) <= LARGEST


def test_every_answer_is_counted_again(tracking: Settings) -> None:
    assert list(GROUPS) == [group for group in GROUPS if group in tracking]
    for group, runs in tracking.items():
        for run in runs:
            (name,) = run.results
            result = run.results[name].result
            named(f"tracking_{group}", MeasuredTask).check(result)
            changed = [x | {"right": x["right"] + 1} for x in result["bins"]]
            with pytest.raises(ValueError, match="as its answers have them"):
                named(f"tracking_{group}", MeasuredTask).check(result | {"bins": changed})


def test_every_rule_and_three_seeds(tracking: Settings) -> None:
    for runs in tracking.values():
        trained = {arm: {run.seed for run in runs if run.arm == arm} for arm in every_rule()}
        assert all(len(seeds) >= 3 for seeds in trained.values()), trained


def test_no_training_does_what_theory_forbids(tracking: Settings) -> None:
    """Past four times the training length nothing that theory forbids is followed: neither on words, nor on powers."""
    held = 0
    for group, runs in tracking.items():
        for run in runs:
            if forbidden(run.arm, group) is None:
                continue
            for part in ("bins", "powers"):
                far = [
                    share.value for (begin, _), share in by_place(run, part).items() if begin >= 4 * run.train_length
                ]
                assert far
                assert max(far) < SOLVED, f"{group}/{run.path.name}: {part} {far}"
                held += 1
    assert held > 100


@pytest.mark.parametrize("group", ["z2", "s5_swaps"])
def test_what_a_negative_eigenvalue_allows_does_happen(group: str, tracking: Settings) -> None:
    """Some rule with b in (0, 2) follows words of eight times the training length."""
    wide = [run for run in tracking[group] if run.arm.endswith("+erase2")]
    assert max(reach(run) for run in wide) >= 8 * wide[0].train_length


def test_recall_is_counted_again(recall: Settings) -> None:
    for runs in recall.values():
        for run in runs:
            (name,) = run.results
            named("recall_load", MeasuredTask).check(run.results[name].result)
            assert capacity(run) is not None


def test_every_training_of_recall_counts(recall: Settings) -> None:
    """Those of arms that the plan does not name were made by the registered code under the registered plan too."""
    registration = read_registration(RESULTS / "PLAN.md", "E4")
    for runs in recall.values():
        assert counting(runs, registration) == (runs, [])


def test_the_pages_have_the_pairs_that_every_training_holds(recall: Settings) -> None:
    page = (RESULTS.parent / "docs" / "evidence.md").read_text().splitlines()
    with (RESULTS / "recall" / "tables" / "recall_trainings.csv").open() as file:
        rows = list(csv.reader(file))
    assert len(rows) == 1 + len({run.arm for runs in recall.values() for run in runs})
    for row in rows[1:]:
        assert "| " + " | ".join(row) + " |" in page


def test_registered_tests_are_given_if_recall_is_complete(recall: Settings) -> None:
    report = (RESULTS / "recall" / "report.md").read_text()
    assert ("Registered: differences in capacity over trainings" in report) == (missing(recall) == [])
    assert "Exploratory: differences" not in report


def test_the_added_experiment_names_its_code(tmp_path: Path) -> None:
    """Its own code counts, and the plan's registered part stays what it was."""
    text = (RESULTS / "PLAN.md").read_text()
    assert "Code of E4:" in text
    begin = text.index("Code of E4:")
    head = re.sub(r"\n    [0-9a-f]{64}\n", "\n", text[begin:])
    (tmp_path / "plan.md").write_text(text[:begin] + head)
    with pytest.raises(ValueError, match=r"64 hexadecimal digits on an indented line after 'Code of E4:', got none"):
        read_registration(tmp_path / "plan.md", "E4")
    (tmp_path / "named.md").write_text(text[:begin] + head + f"\n    {'ab' * 32}\n")
    added = read_registration(tmp_path / "named.md", "E4")
    assert added.code == "ab" * 32
    assert added.plan == read_registration(RESULTS / "PLAN.md").plan
    assert read_registration(RESULTS / "PLAN.md").code.startswith("7ae971bc")
