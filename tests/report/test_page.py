"""What stands on the page: all of it, escaped, with links that lead somewhere and the right examples behind cells."""

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from qed.analysis import results
from qed.analysis.registered import outcomes
from qed.analysis.selection import not_comparable
from qed.cli import app
from qed.report.charts import Axis, Panel, Series
from qed.report.conclusions import verdict
from qed.report.page import write
from qed.report.svg import drawn, ink_on, shade
from tests.analysis.conftest import evaluated
from tests.report.conftest import ODD, undrawn

LARGEST = 3_000_000  # bytes of a page


class Parsed(HTMLParser):
    """Links, rows of tables by the table's name, and what buttons refer to."""

    def __init__(self, text: str):
        super().__init__()
        self.links: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.buttons: dict[tuple[str, int, int], int] = {}
        self._name, self._open = "", False
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        if tag in ("a", "link", "img", "script") and (to := given.get("href") or given.get("src")):
            self.links.append(to)
        if tag == "div" and (given.get("id") or "").startswith("table-"):
            self._name = str(given["id"]).removeprefix("table-")
            self.tables[self._name] = []
        elif tag == "tr" and self._name:
            self.tables[self._name].append([])
        elif tag in ("td", "th") and self._name and self.tables[self._name]:
            self.tables[self._name][-1].append("")
            self._open = True
        elif tag == "figure":
            self._name = ""
        elif tag == "button" and "data-examples" in given:
            rows = self.tables[self._name]
            self.buttons[self._name, len(rows) - 1, len(rows[-1]) - 1] = int(str(given["data-examples"]))

    def handle_endtag(self, tag: str) -> None:
        self._open = self._open and tag not in ("td", "th")

    def handle_data(self, text: str) -> None:
        if self._open and self._name:
            self.tables[self._name][-1][-1] += text.strip()


@pytest.fixture(autouse=True)
def _without_drawings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qed.report.drawing.drawn", undrawn)


@pytest.fixture(scope="module")
def text(page: Path) -> str:
    return page.read_text()


@pytest.fixture(scope="module")
def parsed(text: str) -> Parsed:
    return Parsed(text)


def data(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="examples-data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_it_needs_nothing_else_and_every_link_leads_to_a_file(page: Path, text: str, parsed: Parsed) -> None:
    assert len(text.encode()) < LARGEST
    assert not re.search(r"https?://|url\(|@import|<img|<iframe", text)
    outside = [to for to in parsed.links if not to.startswith(("#", "data:"))]
    assert all((page.parent / to).is_file() for to in outside)
    assert {"report.md", "tables/table3_niah_single_1.csv", "figures/depth_niah_single_1.pdf"} <= set(outside)
    assert "../runs/qed-0/eval/niah_single_1-1024.jsonl" in outside
    for to in (x for x in parsed.links if x.startswith("#")):
        assert f'id="{to[1:]}"' in text


def test_it_begins_with_the_answer_and_says_what_was_trained(text: str, parsed: Parsed) -> None:
    head = text.partition('<section id="question">')[0]
    assert "<strong>Yes.</strong> Past the training length QED finds 25.0 points more than GDN-2 on S-NIAH-1" in head
    trained = {row[0]: row[1:] for row in parsed.tables["trained"]}
    assert trained["QED"][:2] == ["b⊙k + λ·P⊥ₖ(b⊙q)", "0, 1"]
    assert set(trained["QED-nogate"][1:]) == {"not trained"}
    claims = {(row[0], row[1]): row[2:4] for row in parsed.tables["trainings_claims"]}
    assert claims["mechanism", "R1: QED − GDN-2"][0] == "yes"
    assert claims["gate", "R1: QED − QED-nogate"] == ["not trained here", "not trained here"]


def test_no_cell_is_blank_and_each_says_why_it_has_no_value(parsed: Parsed) -> None:
    cells = [cell for rows in parsed.tables.values() for row in rows for cell in row]
    assert len(cells) > 300
    assert "" not in cells
    assert "missing" not in cells
    rows = {row[0]: row for row in parsed.tables["figure2_contrasts"] if row[1] == "gate"}
    assert rows["S-NIAH-1"][3:] == ["not trained", "not trained", "fewer than two seeds"]
    appeared = {row[0]: row for row in parsed.tables["retrieval_over_training"]}
    assert appeared["QED, seed 0"][1:] == ["3,000", "3,000", "never"]


def test_what_others_wrote_is_escaped(text: str, parsed: Parsed) -> None:
    assert ODD not in text
    assert text.count("<script") == 2
    assert any(ODD in said for cell in data(text)["cells"] for _, said, _ in cell["examples"])
    assert "qed train mini --set seed=0 &lt;now&gt;" in text


def test_the_examples_behind_a_cell_are_its_own(rich: Path, text: str, parsed: Parsed) -> None:
    """Of every cell: the run, the task and the first wrong and right answers, with needle and question, no haystack."""
    found, rows = data(text), parsed.tables["table3_niah_single_1"]
    names = {
        f"{arm}, seed {seed}": f"{rule}-{seed}" for arm, rule in (("GDN-2", "gdn2"), ("QED", "qed")) for seed in (0, 1)
    }
    checked = 0
    for i, row in enumerate(rows):
        for column, length in enumerate((512, 1024, 2048, 4096), start=1):
            if row[0] not in names:
                continue
            cell = found["cells"][parsed.buttons["table3_niah_single_1", i, column]]
            title = {512: "512", 1024: "1K", 2048: "2K", 4096: "4K"}[length]
            assert cell["title"] == f"{row[0]}: S-NIAH-1 {title}"
            file = rich / names[row[0]] / "eval" / f"niah_single_1-{length}.jsonl"
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            right = sum(line["correct"] for line in lines)
            assert row[column].startswith(f"{right}.0 ")
            assert cell["said"].startswith(f"{right} of 100 are right.")
            wrong = [line for line in lines if not line["correct"]][:3]
            wanted = [*wrong, *[line for line in lines if line["correct"]][: 5 - len(wrong)]]
            for (number, said, correct), line in zip(cell["examples"], wanted, strict=True):
                prompt = found["prompts"][number]
                assert (said, correct) == (line["prediction"], bool(line["correct"]))
                assert prompt == {
                    "example": line["index"],
                    "needle": line["needle"],
                    "question": line["question"],
                    "answer": line["gold"],
                    "tokens": length,
                    "depth": line["depth"],
                }
            checked += 1
    assert checked == 16


def test_examples_say_what_the_files_do_not_have(base: Path, tmp_path: Path) -> None:
    text = write(base, tmp_path / "out").read_text()
    cell = next(x for x in data(text)["cells"] if x["title"] == "QED, seed 0: S-NIAH-1 1K")
    assert cell["said"].endswith("The result files do not have the needle and the question.")
    scaled = [x["title"] for x in data(text)["cells"] if "scaled" in x["title"]]
    assert "QED, seed 0, λ scaled by -1: S-NIAH-1 2K" in scaled


def test_heat_maps_have_the_share_of_every_bin(rich: Path, text: str) -> None:
    """Example i has depth i, and the first 80 of 2K are right for QED: all bins but the last two."""
    figure = text.partition('<figure id="figure-depth_niah_single_1"')[2].partition("</figure>")[0]
    assert figure.count('data-said="QED, 2K, depth 70–80 %: 20 of 20 right">100<') == 1
    assert figure.count('data-said="QED, 2K, depth 80–90 %: 0 of 20 right">0<') == 1
    heads = text.partition('<figure id="figure-strength_maps"')[2].partition("</figure>")[0]
    assert heads.count('data-said="layer 0, head 1: λ = 0.25000">.250<') == 4
    assert "GDN-2" not in heads


def test_figures_say_the_values_of_the_tables(text: str) -> None:
    figure = text.partition('<figure id="figure-figure1_niah_single_1"')[2].partition("</figure>")[0]
    assert figure.count("<title>1,024 tokens: 95.0 % [88.8 %, 97.8 %]</title>") == 2  # Wilson's, of 95 in 100
    assert figure.count('data-name="QED"') == 2


def test_points_lie_where_their_values_are() -> None:
    """In proportion on a linear axis, by octaves on a logarithmic one, and nothing at −∞."""
    series = Series(name="a <b>", colour=1, x=[1.0, 2.0, 4.0], y=[0.0, 50.0, 100.0])
    panel = Panel(x=Axis(label="x", scale="log2"), y=Axis(label="y", ends=(0, 100)), series=[series])
    places = [tuple(map(float, x)) for x in re.findall(r'class="mark" d="M([\d.]+) ([\d.]+)m', drawn(panel))]
    assert len(places) == 3
    (a, top), (b, middle), (c, bottom) = places
    assert b - a == pytest.approx(c - b, abs=0.2)
    assert top - middle == pytest.approx(middle - bottom, abs=0.2)
    assert "a &lt;b&gt;" in drawn(panel)
    logarithmic = Panel(x=Axis(label="x"), y=Axis(label="y", scale="log10"), series=[series])
    assert drawn(logarithmic).count('class="mark"') == 2


def test_ink_is_readable_on_every_shade() -> None:
    def light(colour: tuple[int, int, int]) -> float:
        parts = [x / 255 for x in colour]
        red, green, blue = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    for i in range(101):
        ground = light(shade(i / 100))
        assert (1.05 / (ground + 0.05) if ink_on(shade(i / 100)) == "#fff" else (ground + 0.05) / 0.05) >= 4.5


def test_where_it_came_from(text: str, parsed: Parsed, base: Path, tmp_path: Path) -> None:
    row = next(row for row in parsed.tables["origins"] if row[0] == "qed-0")
    assert row[1:] == [
        *("QED", "0", "0123456789ab changed", "cccccccccccc", "a device", "torch 9", "2026-01-02 03:04 UTC"),
        "qed train mini --set seed=0 <now>",
    ]
    unknown = Parsed(write(base, tmp_path / "out").read_text()).tables["origins"][1]
    assert set(unknown[3:]) == {"not recorded"}


def test_trainings_that_are_not_comparable_are_marked(base: Path, tmp_path: Path) -> None:
    path = base / "qed-1" / "config.json"
    path.write_text(path.read_text().replace('"total_tokens": 3000', '"total_tokens": 6000'))
    reason = "6,000 training tokens instead of 3,000; the training is not finished"
    assert not_comparable(results.runs(base)) == {base / "qed-1": reason}
    text = write(base, tmp_path / "out").read_text()
    assert f"qed-1: {reason}" in text
    parsed = Parsed(text)
    marked = [row[0] for row in parsed.tables["table3_niah_single_1"] if "≠" in row[0]]
    assert marked == ["QED, seed 1≠"]
    assert "are not comparable with ours cell by cell" in text


def judged(base: Path) -> tuple[str, str]:
    found = results.runs(base)
    answer = verdict(outcomes(found, registered=False), found)
    return answer.word, answer.said


def test_the_verdict_follows_the_test(base: Path) -> None:
    assert judged(base)[0] == "Yes"
    for seed in (0, 1):
        for length in (1024, 2048, 4096):
            evaluated(base / f"qed-{seed}" / "eval", f"niah_single_1-{length}", [])
    word, said = judged(base)
    assert word == "No, the contrary"
    assert "QED finds 46.7 points less than GDN-2" in said
    for length, right in ((1024, 80), (2048, 90), (4096, 100)):
        evaluated(base / "qed-1" / "eval", f"niah_single_1-{length}", list(range(right)))
    assert judged(base)[0] == "Undecided"
    evaluated(base / "qed-0" / "eval", "niah_single_1-512", [1])
    assert judged(base)[1].endswith("have not learned to retrieve even at the training length.")
    for run in base.glob("gdn2-*"):
        shutil.rmtree(run)
    assert judged(base)[0] == "Not tested"


def foreign(base: Path) -> None:
    """Files of others among the runs, and files where folders are expected."""
    (base / "notes.json").write_text("{")
    (base / "page.html").write_text("<html>")
    (base / "qed-0" / "eval" / "notes.json").write_text("[1]")
    (base / "qed-0" / "eval" / "page.html").write_text("<html>")
    shutil.rmtree(base / "qed-1" / "eval")
    (base / "qed-1" / "eval").write_text("a file")
    shutil.rmtree(base / "qed-0" / "strength")
    (base / "qed-0" / "strength").write_text("a file")


def test_foreign_files_among_the_runs_are_named(base: Path, tmp_path: Path) -> None:
    foreign(base)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.json").write_text("mine")
    done = CliRunner().invoke(app, ["report", str(base), "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    for said in (done.output, (tmp_path / "out" / "report.md").read_text()):
        assert "qed-0/eval/notes.json: expected a result of `qed eval`, named after its task, got another file" in said
        assert "qed-1/eval: expected a folder of results, got a file" in said
        assert "qed-0/strength: expected a folder for each scale of λ, got a file" in said
    assert (tmp_path / "out" / "mine.json").read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "is_folder", "message"),
    [
        ("tables", False, "expected a folder or nothing at"),
        ("figures", False, "expected a folder or nothing at"),
        ("report.html", True, "expected a file or nothing at"),
        ("report.md", True, "expected a file or nothing at"),
    ],
)
def test_nothing_is_written_where_something_else_lies(
    base: Path, tmp_path: Path, name: str, is_folder: bool, message: str
) -> None:
    place = tmp_path / "out" / name
    place.mkdir(parents=True) if is_folder else (tmp_path / "out").mkdir()
    if not is_folder:
        place.write_text("another's")
    with pytest.raises(ValueError, match=f"--out: {message} .*{name}, got"):
        write(base, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == [place]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["small", "medium"])
def test_pages_of_committed_results_are_small(name: str, tmp_path: Path) -> None:
    page = write(Path(__file__).parents[2] / "results" / name / "runs", tmp_path / "out")
    assert page.stat().st_size < LARGEST
    found = data(page.read_text())
    assert len(found["cells"]) > 100
    assert all(len(cell["examples"]) == 5 for cell in found["cells"])
