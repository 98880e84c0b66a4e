"""From result files to a page: numbers, what is missing, what is refused, and how it looks in a browser."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from qed.analysis import results
from qed.analysis.breakdown import contrasts
from qed.analysis.strength import compare
from qed.cli import app
from qed.report import drawing, svg
from qed.report.arm_figures import look
from qed.report.conclusions import conclusions
from qed.report.page import write
from qed.report.tables import retrieval
from qed.reproduce.plan import every_rule
from tests.analysis.conftest import evaluated


def test_everything_is_written(base: Path, tmp_path: Path) -> None:
    page = write(base, tmp_path / "out").read_text()
    out = tmp_path / "out"
    tables = {
        "table2_validation_loss",
        "table3_niah_single_1",
        "table4_strength",
        "figure2_contrasts",
        "first_answer",
        "split",
        "eigenvalues",
        "loss_by_position",
        "retrieval_over_training",
        *(
            f"trainings_{x}"
            for x in ("claims", "endpoints", "lengths", "means", "power", "sensitivity", "split", "tests")
        ),
    }
    assert {x.stem for x in (out / "tables").glob("*.csv")} == tables
    figures = {
        "figure1_niah_single_1",
        "figure2_contrasts",
        "figure3_recall",
        "loss_by_position",
        "eigenvalues",
        "strength_over_training",
        "retrieval_over_training",
        "trainings_niah_single_1",
        "trainings_half",
    }
    for kind in ("png", "pdf"):
        assert {x.stem for x in (out / "figures").glob(f"*.{kind}")} == figures
    appeared = (out / "tables" / "retrieval_over_training.csv").read_text().splitlines()
    assert 'QED,1,"3,000","3,000",missing' in appeared
    assert "95.0 [88.7, 98.4]" in page  # Clopper and Pearson's, of 95 in 100
    assert "paper: 32K" in page
    assert set(re.findall(r'<figure id="figure-(\w+)"', page)) == figures | {"strength_maps"}
    text = (out / "report.md").read_text()
    assert "| seed | arm | 512 | 1K | 2K | 4K | FDA-style (A1) | paper: 1K |" in text
    again = write(base, tmp_path / "again").read_text()
    assert again == page


def test_what_is_missing_is_said_not_zero(base: Path, tmp_path: Path) -> None:
    (base / "qed-1" / "eval" / "niah_single_1-4096.json").unlink()
    shutil.rmtree(base / "gdn2-1")
    page = write(base, tmp_path / "out").read_text()
    rows = (tmp_path / "out" / "tables" / "table3_niah_single_1.csv").read_text().splitlines()
    (row,) = [x for x in rows if x.startswith("1,QED,")]
    assert row.split(",missing")[0].count("[") == 3
    assert not any(x.startswith("1,GDN-2") for x in rows)
    assert "Missing: GDN-2 seed 1." in page
    assert "There are no results for: S-NIAH-2, S-NIAH-3." in page


def test_contrasts_are_paired_and_past_the_training_length(base: Path) -> None:
    found = {x.name: x for x in contrasts(results.runs(base), "niah_single_1")}
    difference, (low, _), p = found["mechanism"].seeds[0]
    assert difference == pytest.approx(100 * (15 + 30 + 30) / 300)
    assert low > 0
    assert p < 1e-9
    assert found["gate"].seeds == {}
    assert found["direction"].overall is not None


def test_examples_that_two_lengths_share_count_once(base: Path, tmp_path: Path) -> None:
    for length, tokens, (one, other) in ((1024, 700, (90, 40)), (1536, 700, (90, 40)), (2048, 1400, (20, 20))):
        evaluated(base / "qed-0" / "eval", f"niah_single_2-{length}", list(range(one)), tokens=tokens)
        evaluated(base / "gdn2-0" / "eval", f"niah_single_2-{length}", list(range(other)), tokens=tokens)
    (found,) = (x for x in contrasts(results.runs(base), "niah_single_2") if x.name == "mechanism")
    assert found.seeds[0][0] == pytest.approx(100 * (50 + 0) / 200)
    write(base, tmp_path / "out")
    rows = (tmp_path / "out" / "tables" / "figure2_contrasts.csv").read_text()
    assert "S-NIAH-2,mechanism,QED − GDN-2," in rows


def test_what_is_concluded_follows_the_intervals(base: Path) -> None:
    said = " ".join(conclusions(results.runs(base)))
    assert "The mechanism (QED against GDN-2: +25.0 points at seed 0, +25.0 points at seed 1) is better" in said
    assert "The gate (QED against QED-nogate) cannot be judged" in said
    assert (
        "QED is above GDN-2 on S-NIAH-1 at every length past the training length, at every seed. Holds here in all 6"
        in said
    )
    for length in (1024, 2048, 4096):
        evaluated(base / "qed-1" / "eval", f"niah_single_1-{length}", [])
    said = " ".join(conclusions(results.runs(base)))
    assert "reverses between seeds, so that it is undecided" in said
    assert "Does not hold here: 3 of 6 comparisons agree" in said
    evaluated(base / "gdn2-0" / "eval", "niah_single_1-512", list(range(20)))
    said = " ".join(conclusions(results.runs(base)))
    assert "has not been learned at the training length by GDN-2 seed 0 (13 to 29 %)" in said


def test_strengths_are_compared_with_the_trained_one(base: Path) -> None:
    rows = compare(results.Run(base / "qed-0").strengths)
    assert rows["2.0"]["niah_single_1-2048"]["better"] == 10
    assert rows["-1.0"]["niah_single_1-2048"]["worse"] == 20
    assert rows["2.0"]["niah_single_1-2048"]["p"] == pytest.approx(2 / 2**10)
    assert rows["2.0"]["niah_single_1-2048"]["p_holm"] == pytest.approx(2 * 2 / 2**10)
    assert "p" not in rows["1.0"]["niah_single_1-2048"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer": "other"}, r"not in one table: tokenizer is 't' in .*tokenizer is 'other' in .*qed-1"),
        ({"prompts": "x"}, r"not in one table: prompts is .* prompts is 'x' in"),
        ({"sizing": "binary"}, r"not in one table: sizing is 'linear' in .* sizing is 'binary' in"),
    ],
)
def test_what_cannot_be_compared_is_refused(base: Path, tmp_path: Path, change: dict[str, str], message: str) -> None:
    evaluated(base / "qed-1" / "eval", "niah_single_1-512", [1], **change)
    with pytest.raises(ValueError, match=message):
        write(base, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def changed(path: Path, **fields: Any) -> None:
    found = json.loads(path.read_text())
    found["result"] |= fields
    path.write_text(json.dumps(found))


def doubled(path: Path) -> None:
    rows = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*rows[:-1], rows[0]]))


DAMAGE: dict[str, tuple[Any, str]] = {
    "a line cut off": (
        lambda x: x.with_suffix(".jsonl").write_text(x.with_suffix(".jsonl").read_text()[:-10]),
        "1024.jsonl:100: expected a JSON object",
    ),
    "lines missing": (
        lambda x: x.with_suffix(".jsonl").write_text('{"index": 0, "correct": 1}\n'),
        "1024.jsonl: expected 100 lines, got 1",
    ),
    "no lines": (lambda x: x.with_suffix(".jsonl").unlink(), "1024.jsonl: expected a file of JSON lines"),
    "an example twice": (lambda x: doubled(x.with_suffix(".jsonl")), "1024.jsonl:100: expected each example once"),
    "too many right": (lambda x: changed(x, correct=101), "expected 0 ≤ correct ≤ samples, got 101 of 100"),
    "another count": (lambda x: changed(x, correct=94, accuracy=0.94), "expected 94 correct lines, got 95"),
    "no tokens": (
        lambda x: x.with_suffix(".jsonl").write_text(x.with_suffix(".jsonl").read_text().replace('"tokens"', '"size"')),
        "1024.jsonl: expected the tokens of a prompt in every line, got None in 0",
    ),
    "another share": (lambda x: changed(x, accuracy=0.5), "expected an accuracy of 95 in 100, got 0.5"),
    "not finished": (lambda x: x.write_text(json.dumps({"about": json.loads(x.read_text())["about"]})), "not finished"),
    "half a file": (lambda x: x.write_text(x.read_text()[:30]), "expected a result of `qed eval`"),
    "another type": (lambda x: x.write_text("[]"), "expected a result of `qed eval`, got JSON of type list"),
    "another's name": (lambda x: x.write_text(x.read_text().replace("1024", "2048")), "expected a result of niah"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_result_is_missing_and_named(base: Path, damage: str) -> None:
    damaging, message = DAMAGE[damage]
    damaging(base / "qed-0" / "eval" / "niah_single_1-1024.json")
    found, (problem,) = results.survey(base)
    assert message in problem
    (run,) = (x for x in found if x.path.name == "qed-0")
    rows = [row for row in retrieval(found, "niah_single_1").rows if row[:2] == ["0", "QED"]]
    assert [row[2:5] for row in rows] == [["100.0 [96.4, 100.0]", None, "80.0 [70.8, 87.3]"]]
    assert "niah_single_1-1024" not in run.results


def test_what_is_left_out_is_said(base: Path, tmp_path: Path) -> None:
    """On the terminal, with the number of the line, and on the page."""
    DAMAGE["a line cut off"][0](base / "qed-0" / "eval" / "niah_single_1-1024.json")
    done = CliRunner().invoke(app, ["report", str(base), "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    for said in (done.output, (tmp_path / "out" / "report.md").read_text()):
        assert "niah_single_1-1024.jsonl:100: expected a JSON object" in said


def test_unfinished_pieces_never_block_the_report(base: Path, tmp_path: Path) -> None:
    """Of every kind at once; what is whole is reported."""
    (base / "qed-0" / "eigenvalues.json").write_text('{"all": {"eigenvalue": {}}}')
    (base / "qed-0" / "strength" / "strength.json").write_text("{")
    shutil.rmtree(base / "qed-0" / "strength" / "1")
    for path in (base / "qed-0" / "strength").glob("*/*.json"):  # of other prompts than eval's, which cannot stand in
        path.write_text(path.read_text().replace("niah_single_1-2048.jsonl", "others.jsonl"))
    (base / "qed-1" / "strength" / "2" / "niah_single_1-2048.jsonl").write_bytes(b"\xff")
    (base / "qed-1" / "eval" / "positions-512.json").write_text(
        '{"about": {"task": "positions"}, "result": {"bins": 3}}'
    )
    (base / "qed-nogate-0").mkdir()  # just begun
    (base / "gdn2-7" / "checkpoints").mkdir(parents=True)
    for name, text in (("a", "{"), ("b", '{"config": 3}'), ("c", '{"config": {"model": {"rule": "none"}, "seed": 0}}')):
        (base / name).mkdir()
        (base / name / "config.json").write_text(text)
    (base / "report").mkdir()
    (base / "report" / "report.html").write_text("an earlier one")
    write(base, tmp_path / "out")
    text = (tmp_path / "out" / "report.md").read_text()
    for named in (
        "qed-0/eigenvalues.json: expected a result of `qed eigenvalues`",
        "qed-0/strength/strength.json: expected a summary",
        "qed-0/strength: no finished result at s = 1",
        "qed-1/strength/2/niah_single_1-2048.jsonl:1: expected",
        "qed-1/eval/positions-512.json: expected losses by position",
        "qed-nogate-0: no config.json",
        "gdn2-7: no config.json",
        *(f"{name}/config.json: expected" for name in "abc"),
    ):
        assert named in text
    assert "report: no config" not in text
    assert "95.0 [88.7, 98.4]" in text
    assert "The mechanism (QED against GDN-2: +25.0 points at seed 0" in text


def test_nothing_to_report_is_an_error(base: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(tmp_path / "nothing"), "--out", str(tmp_path / "out")])
    assert done.exit_code == 1
    assert "RUNS: expected a folder of runs" in done.output
    for config in base.glob("*/config.json"):
        config.write_text("{")
    with pytest.raises(ValueError, match=r"RUNS: expected folders with a config.json .*gdn2-0/config.json: exp"):
        write(base, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_results_of_other_prompts_are_not_in_one_table(base: Path, tmp_path: Path) -> None:
    for run, prompt in (("qed-0", "a"), ("gdn2-0", "b")):
        file = base / run / "eval" / "niah_single_1-1024.jsonl"
        rows = [json.loads(x) | {"prompt_sha256": prompt} for x in file.read_text().splitlines()]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=r"not in one table: example 0 of .* differ in prompt_sha256, 'b' and 'a'"):
        write(base, tmp_path / "out")


def test_arms_of_one_figure_look_different() -> None:
    """In a figure with every rule, with either range of the erase gate, or with several bounds on λ, no two lines look
    alike: in print or on a page."""
    looks = [look(arm) for arm in (*every_rule(), "qed@0", "qed@0.1", "qed@0.5", "qed@1")]
    for colours, marks in ((len(drawing.COLOURS), len(drawing.MARKERS)), (svg.COLOURS, len(svg.MARKS))):
        assert len({(place % colours, place % marks, dashes) for place, dashes in looks}) == len(looks)
