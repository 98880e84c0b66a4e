"""Endpoints of trainings from constructed answers, and the audit's figures from the committed ones."""

import json
import math
from pathlib import Path

import pytest

from qed.analysis.contrasts import contrast, pooled
from qed.analysis.registered import MECHANISM, exploratory, outcome, split
from qed.analysis.results import Run, runs
from qed.analysis.selection import empty_answers
from qed.analysis.trainings import Study, at_training_length, half, rate

from .conftest import evaluated, trained
from .synthetic import unit

SMALL = Path(__file__).parents[2] / "results" / "small" / "runs"


@pytest.mark.parametrize(
    ("shares", "crossing"),
    [
        ((1.0, 1.0, 0.0, 0.0), 11.5),
        ((1.0, 0.75, 0.25, 0.0), 11.5),
        ((1.0, 0.6, 0.2, 0.0), 11.25),
        ((1.0, 0.5, 0.0, 0.0), 11.0),  # one half is still half
        ((1.0, 0.8, 0.7, 0.6), 13.0),  # above throughout: the end of the range
        ((0.4, 0.3, 0.2, 0.1), 10.0),  # below throughout: its beginning
        ((0.9, 0.1, 0.9, 0.1), 12.5),  # the last of three crossings
        ((0.9, 0.1, 0.1, 0.9), 12.5),  # in whatever direction
    ],
)
def test_where_one_half_is_crossed(shares: tuple[float, ...], crossing: float) -> None:
    assert half(list(zip((10.0, 11.0, 12.0, 13.0), shares, strict=True))) == pytest.approx(crossing)


def test_one_half_on_real_lengths(base: Path) -> None:
    """In octaves of median tokens: 0.5 at 2048 is crossed there, 0.8 at 2048 and 0.4 at 4096 three quarters further."""
    study = Study(runs(base))
    found = {run.path.name: study.value("L50", run) for run in study.runs}
    assert found["gdn2-0"] == pytest.approx(11.0)
    assert found["qed-0"] == pytest.approx(11.75)


def test_past_the_training_length_is_decided_by_tokens(base: Path) -> None:
    """Rows of 512: a cell of prompts with 512 tokens is not past them, whatever it is called, one with 513 is."""
    run = Run(base / "qed-0")
    study = Study([run])
    assert study.value("R1", run) == pytest.approx((95 + 80 + 40) / 3)
    evaluated(run.path / "eval", "niah_single_1-4096", list(range(40)), tokens=512)
    run = Run(base / "qed-0")
    assert Study([run]).value("R1", run) == pytest.approx((95 + 80) / 2)
    evaluated(run.path / "eval", "niah_single_1-4096", list(range(40)), tokens=513)
    run = Run(base / "qed-0")
    assert Study([run]).value("R1", run) == pytest.approx((95 + 80 + 40) / 3)


def test_prompts_of_two_lengths_count_once(base: Path) -> None:
    for length, right in ((1024, 90), (1536, 90), (2048, 30)):
        evaluated(base / "qed-0" / "eval", f"niah_single_2-{length}", list(range(right)), tokens=min(length, 1536))
    run = Run(base / "qed-0")
    evaluated(base / "qed-0" / "eval", "niah_single_2-1024", list(range(90)), tokens=1536)
    run = Run(base / "qed-0")
    assert Study([run]).value("R2", run) == pytest.approx(90)  # all three have the same examples: the first is taken


def test_first_answers(base: Path) -> None:
    """A later guess is right for RULER and wrong as a first answer."""
    folder = base / "qed-0" / "eval"
    lines = (folder / "niah_single_1-4096.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for row in rows[:30]:
        row["prediction"] = f"99999, or rather {row['gold']}"
    (folder / "niah_single_1-4096.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = Run(base / "qed-0")
    study = Study([run])
    assert study.value("R1", run) == pytest.approx((95 + 80 + 40) / 3)
    assert study.value("R1", run, first=True) == pytest.approx((95 + 80 + 10) / 3)
    assert study.value("L50", run, first=True) == pytest.approx(11 + 0.3 / 0.7)


def test_words_have_no_first_answer(tmp_path: Path) -> None:
    """Of the smallest models' task, whose answers are words."""
    run = trained(tmp_path, "qed", 0, (1.0, 0.8, 0.5, 0.1))
    for path in (run / "eval").glob("niah*"):
        text = path.read_text().replace("niah_single_1", "pairs")
        path.unlink()
        path.with_name(path.name.replace("niah_single_1", "pairs")).write_text(text)
    study = Study(runs(tmp_path))
    assert study.main == "pairs"
    assert study.value("R1", study.runs[0]) == pytest.approx((80 + 50 + 10) / 3)
    assert study.value("R1", study.runs[0], first=True) is None


def test_results_without_any_text_are_named(tmp_path: Path) -> None:
    """With λ as trained and with λ = 0; a single answer with text is enough."""
    folder = unit(tmp_path, "qed", 3, samples=4, tasks=("niah_single_1",), lengths=(4096, 8192))
    assert empty_answers(runs(tmp_path)) == []
    for place, length, kept in (("eval", 4096, 0), ("eval", 8192, 1), ("strength/0", 8192, 0)):
        path = folder / place / f"niah_single_1-{length}.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows = [row | ({"prediction": "", "correct": 0} if i >= kept else {}) for i, row in enumerate(rows)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        whole = json.loads(path.with_suffix(".json").read_text())
        right = sum(row["correct"] for row in rows)
        whole["result"] |= {"correct": right, "accuracy": right / 4}
        path.with_suffix(".json").write_text(json.dumps(whole))
    assert [x.partition(", and")[0] for x in empty_answers(runs(tmp_path))] == [
        "QED seed 3 at s = 1, S-NIAH-1 4K: all 4 answers are empty",
        "QED seed 3 at s = 0, S-NIAH-1 8K: all 4 answers are empty",
    ]
    summary = folder / "eval" / "niah_single_1-4096.json"
    whole = json.loads(summary.read_text())
    whole["result"]["not_finite"] = 4
    summary.write_text(json.dumps(whole))
    assert empty_answers(runs(tmp_path))[0].startswith(
        "QED seed 3 at s = 1, S-NIAH-1 4K: the model's numbers were not finite in 4 of 4 answers"
    )


def test_with_the_strength_scaled(base: Path) -> None:
    """60 and 70 of 100 at s = 0 and s = 1 on the one cell that has both; the endpoint as a whole was not asked."""
    study = Study(runs(base))
    assert study.scaled_cells("R1") == ["niah_single_1-2048"]
    assert study.switched("R1") == [(70.0, 60.0)] * 2
    assert study.switched("R1", scale=2.0) == [(70.0, 80.0)] * 2
    assert all(study.scaled_value("R1", run) is None for run in study.runs)
    found = split(study, "R1")
    assert found is not None
    assert (found.whole.value, found.training.value, found.correction.value) == pytest.approx((20, 10, 10))


def test_at_the_training_length(base: Path) -> None:
    assert at_training_length(Run(base / "qed-0"), "niah_single_1") == 100
    evaluated(base / "qed-0" / "eval", "niah_single_1-512", list(range(89)), tokens=300)
    assert at_training_length(Run(base / "qed-0"), "niah_single_1") == 89


def test_the_audits_figures_from_committed_answers() -> None:
    """14M models: S-NIAH-1 past the training length, by tokens the same cells as by nominal length."""
    found = runs(SMALL)
    study = Study(found)
    assert {len(study.cells("R1", run)) for run in found} == {10}
    assert {len(study.cells("R2", run)) for run in found} == {9}  # nominal 768 has prompts of 89 tokens
    deviation, freedom = pooled(study.groups("R1"))
    assert (round(deviation, 2), freedom) == (2.75, 5)
    difference = contrast(study.groups("R1"), MECHANISM[1])
    assert [round(x, 1) for x in (difference.value, *difference.interval())] == [-7.0, -14.1, 0.1]
    informative = [f"niah_single_1-{n}" for n in (4096, 8192, 16384, 32768)]
    groups = {arm: [rate(run.results[n] for n in informative) for run in some] for arm, some in study.arms.items()}
    assert round(pooled(groups)[0], 1) == 6.2  # type: ignore[arg-type]


def test_the_split_of_committed_answers() -> None:
    """Most of the difference is there with λ set to 0: −9.6, −22.9, of which −11.0, −22.3."""
    found = runs(SMALL)
    assert set(outcome(exploratory(found), found).status.values()) == {"counts"}
    parts = split(Study(found), "R1")
    assert parts is not None
    assert parts.whole.value == pytest.approx((-9.6 - 22.9) / 2, abs=0.06)
    assert parts.training.value == pytest.approx((-11.0 - 22.3) / 2, abs=0.06)
    assert parts.whole.value == pytest.approx(parts.training.value + parts.correction.value)
    assert math.isfinite(parts.training.interval().low)
