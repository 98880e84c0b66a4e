"""What "past the training length" means, which answer counts, where a difference comes from, what data are called."""

import json
from pathlib import Path

import pytest

from qed.analysis import breakdown, results, selection
from qed.report import tables
from qed.report.conclusions import conclusions

from .conftest import evaluated


def test_past_the_training_length_is_told_by_tokens(base: Path) -> None:
    """Rows of training have 512 tokens. At a nominal 1024 these prompts have 90 and 512, at 2048 513."""
    for name, right in (("qed-0", 90), ("gdn2-0", 10)):
        for length, tokens in ((768, 90), (1024, 512), (2048, 513)):
            found = list(range(right if length < 2048 else 50))
            evaluated(base / name / "eval", f"niah_single_2-{length}", found, tokens=tokens)
    found = {(run.arm, run.seed): run for run in results.runs(base)}
    assert selection.past_training([found["qed", 0], found["gdn2", 0]], "niah_single_2") == [2048]
    (contrast,) = (x for x in breakdown.contrasts(list(found.values()), "niah_single_2") if x.name == "mechanism")
    assert contrast.seeds[0][0] == 0  # 50 and 50 at 2048 alone
    longest = selection.longest_within_training(found["qed", 0], "niah_single_2")
    assert longest is found["qed", 0].results["niah_single_2-1024"]


def test_one_short_prompt_keeps_a_length_from_being_past(base: Path) -> None:
    path = base / "qed-0" / "eval" / "niah_single_1-1024.jsonl"
    rows = [json.loads(x) for x in path.read_text().splitlines()]
    rows[7]["tokens"] = 512
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run,) = (x for x in results.runs(base) if x.path.name == "qed-0")
    assert selection.past_training([run], "niah_single_1") == [2048, 4096]
    longest = selection.longest_within_training(run, "niah_single_1")
    assert longest is run.results["niah_single_1-512"]  # and it is not at the training length either
    said = " ".join(conclusions(results.runs(base)))
    assert "at every length past the training length, at every seed. Holds here in all 5" in said


def test_first_answers_stand_beside_rulers(base: Path) -> None:
    """Ten examples of 100 at 2048 name another number first, at the training length all do."""
    for length, late in ((512, 100), (2048, 10)):
        path = base / "qed-1" / "eval" / f"niah_single_1-{length}.jsonl"
        rows = [json.loads(x) for x in path.read_text().splitlines()]
        for row in rows[:late]:
            row["prediction"] = f"9999. Or {row['prediction']}"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = tables.first_answers(results.runs(base))
    assert table.columns[3:] == [f"S-NIAH-1 {x}" for x in ("512", "1K", "2K", "4K", "past training")]
    rows = {tuple(row[:3]): row[3:] for row in table.rows}
    assert rows["1", "QED", "anywhere (RULER)"] == ["100.0", "95.0", "80.0", "40.0", "71.7"]
    assert rows["1", "QED", "first answer"] == ["0.0", "95.0", "70.0", "40.0", "68.3"]
    assert rows["0", "QED", "first answer"] == rows["0", "QED", "anywhere (RULER)"]


def test_without_predictions_first_answers_are_missing(base: Path) -> None:
    path = base / "qed-1" / "eval" / "niah_single_1-1024.jsonl"
    rows = [{k: v for k, v in json.loads(x).items() if k != "prediction"} for x in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = tables.first_answers(results.runs(base))
    rows_ = {tuple(row[:3]): row[3:] for row in table.rows}
    assert rows_["1", "QED", "first answer"] == ["100.0", None, "80.0", "40.0", None]


def test_a_difference_is_training_and_correction(base: Path) -> None:
    """The sweep is at 2048: 70 right at s = 1, 60 at s = 0; GDN-2 has 50."""
    (split,) = breakdown.splits(results.runs(base))
    assert (split.arm, split.task, split.lengths) == ("qed", "niah_single_1", [2048])
    for seed in (0, 1):
        parts = [x[seed][0] for x in (split.whole, split.training, split.correction)]
        assert parts == pytest.approx([20, 10, 10])
    said = " ".join(conclusions(results.runs(base)))
    assert "QED − GDN-2 on S-NIAH-1 at 2K: +20.00 points at seed 0, of which +10.00 remain with λ set to 0" in said
    table = tables.split_table(results.runs(base))
    assert table.theirs == {7, 8, 9}
    assert table.rows[0][7:] == ["+15.00", "+15.00", "+0.00"]  # the paper's seed 0: Table 4 less Table 3's GDN-2
    assert table.rows[1][7:] == ["+30.50", "+23.55", "+6.95"]


def test_a_sweep_over_other_prompts_is_not_split(base: Path) -> None:
    for scale in ("0", "1"):
        evaluated(base / "qed-0" / "strength" / scale, "niah_single_1-2048", [1], prompts="fewer.jsonl")
    (split,) = breakdown.splits(results.runs(base))
    assert list(split.whole) == [1]


@pytest.mark.parametrize(
    ("task", "about", "title"),
    [
        ("fda", {}, "FDA-style (A1)"),
        ("fda", {"forms": {"as given": 100}}, "FDA-style (A1)"),
        ("fda", {"dataset": "hazyresearch/based-fda"}, "FDA (A1)"),
        ("fda", {"dataset": "hazyresearch/based-swde-v2"}, "FDA-style (A1)"),
        ("swde", {}, "SWDE-style (A1)"),
        ("squad_completion", {"forms": {"question": 100}}, "SQuAD questions (A1)"),
        ("squad_completion", {"forms": {"as given": 50, "question": 50}}, "SQuAD-style (A1)"),
        ("squad_completion", {"dataset": "hazyresearch/based-squad"}, "SQuAD (A1)"),
    ],
)
def test_data_of_a_users_file_are_not_called_the_papers(
    base: Path, task: str, about: dict[str, object], title: str
) -> None:
    for run in base.iterdir():
        (run / "eval" / "fda-A1.json").unlink()
        evaluated(run / "eval", f"{task}-A1", [1, 2], **about)
    table = tables.retrieval(results.runs(base), "niah_single_1")
    assert [x for i, x in enumerate(table.columns) if i not in table.theirs][-1] == title
    assert [table.columns[i] for i in sorted(table.theirs)][-3:] == ["FDA", "SQuAD", "SWDE"]


def test_a_sweep_names_its_data_too(base: Path) -> None:
    for scale in ("0", "1"):
        evaluated(base / "qed-0" / "strength" / scale, "fda-A1", [1])
    columns = tables.strength_sweep(results.runs(base)).csv().splitlines()[0]
    assert "FDA-style (A1),paper: mean λ" in columns
    assert columns.endswith("paper: FDA")
