"""`qed report`: one page that needs nothing else to open, and every part of it as files, from result files alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from ..analysis.registered import outcomes
from ..analysis.results import Run, survey
from ..analysis.selection import all_comparable, empty_answers, not_comparable
from ..analysis.units import SHOWN, Registration, counting, read_registration, several
from ..files import write_bytes, write_text
from ..pages import render
from . import drawing, figures, training_figures, view
from .charts import Charts
from .conclusions import Verdict, answers, conclusions, verdict
from .examples import Examples
from .markup import Table
from .origins import origins_table, raw_answers, trained_table
from .tables import all_tables
from .training_tables import answer_tables, other_tables

DAMAGED = "Not finished or damaged, and so shown as missing"
CONTENTS = {
    "question": "What was asked",
    "claims": "The paper's claims",
    "conclusions": "What can be concluded",
    "figures": "Figures",
    "tables": "Tables",
    "provenance": "Where this came from",
}
PARTS = ("tables", "figures")  # folders beside the page
PAGE, TEXT = "report.html", "report.md"


@dataclass(frozen=True, kw_only=True)
class Page:
    """What stands on the page, before it is HTML or markdown."""

    verdict: Verdict
    over_trainings: str  # the heading of the answers
    answers: list[str]
    answer_tables: list[Table]
    by_seed: str  # the heading of the conclusions
    conclusions: list[str]
    absent: list[str]
    problems: list[str]
    charts: Charts
    tables: list[Table]
    runs: list[Run]

    def files(self) -> dict[str, bytes]:
        """The content of the files of tables and figures, by their path beside the page."""
        made = {f"tables/{x.name}.csv": x.csv().encode() for x in (*self.answer_tables, *self.tables)}
        for name, chart in self.charts.items():
            drawn = drawing.drawn(chart, ("pdf", "png"))
            made |= {f"figures/{name}.{kind}": content for kind, content in drawn.items()}
        return made

    def html(self, out: Path) -> str:
        """The page as HTML, as it stands in the folder `out` with its files beside it."""
        examples = Examples(self.runs)

        def shown(table: Table) -> dict[str, Any]:
            return view.table(table, examples, [f"tables/{table.name}.csv"])

        charts = [
            view.chart(name, x, [f"figures/{name}.pdf", f"figures/{name}.png"]) for name, x in self.charts.items()
        ]
        if (maps := training_figures.strength_maps(self.runs)) is not None:
            charts.append(view.chart("strength_maps", maps))
        unlike, names = not_comparable(self.runs), {run.path: run.path.name for run in self.runs}
        return render(
            "report.html",
            verdict={**self.verdict._asdict(), "tag": view.tag(self.verdict.answer)},
            contents=CONTENTS.items(),
            runs=len(self.runs),
            trained=view.table(trained_table(self.runs), examples),
            unlike=[f"{names[path]}: {why}" for path, why in unlike.items()],
            over_trainings=self.over_trainings,
            answer_tables=[shown(x) for x in self.answer_tables],
            answers=[view.typeset(x) for x in self.answers],
            by_seed=self.by_seed,
            conclusions=self.conclusions,
            absent=self.absent,
            damaged=DAMAGED,
            problems=self.problems,
            charts=charts,
            tables=[shown(x) for x in self.tables],
            origins=view.table(origins_table(self.runs), examples),
            looks=sorted(x.name for x in out.glob("look*.html") if x.is_file()),
            raw=raw_answers(self.runs, out),
            examples=examples.data(),
        )

    def markdown(self) -> str:
        """The page as markdown, with the pictures in files beside it."""
        text = ["# Results", "", f"## {self.over_trainings}", "", *(f"- {x}" for x in self.answers), ""]
        text += [table.markdown() for table in self.answer_tables]
        text += [f"## {self.by_seed}", "", *(f"- {x}" for x in self.conclusions), ""]
        text += [f"There are no results for: {', '.join(self.absent)}.", ""] if self.absent else []
        if self.problems:
            text += [f"## {DAMAGED}", "", *(f"- {x}" for x in self.problems), ""]
        text += [f"![{chart.title}](figures/{name}.png)\n" for name, chart in self.charts.items()]
        text += [table.markdown() for table in self.tables]
        return "\n".join(text)


def absent_parts(tables: list[Table], charts: Charts) -> list[str]:
    """The parts of the paper for which there are no results."""
    parts = {
        "Table 3 and Figure 1 (S-NIAH-1)": "figure1_niah_single_1" in charts,
        "S-NIAH-2": "figure1_niah_single_2" in charts,
        "S-NIAH-3": "figure1_niah_single_3" in charts,
        "Figure 3 (recall)": "figure3_recall" in charts,
        "Table 4 (strength sweep)": any(table.name == "table4_strength" for table in tables),
        "eigenvalues": "eigenvalues" in charts,
        "loss by position": "loss_by_position" in charts,
        "λ over training": "strength_over_training" in charts,
    }
    return [name for name, present in parts.items() if not present]


def write(
    base: Path, out: Path, console: Console | None = None, *, more: Sequence[Path] = (), plan: Path | None = None
) -> Path:
    """Write report.html, report.md, tables/*.csv, figures/*.png and figures/*.pdf, and return the page's path.

    Result files that are there but cannot be used are named on the page. With a registered plan, only its trainings are
    on the page, and the others are named. Other files in `out` are left as they are.

    Args:
        base: a folder of runs.
        out: the folder to write.
        console: where files that cannot be used and trainings that do not count are named too.
        more: further folders, whose runs are reported together with those of `base`.
        plan: a registered plan.
    """
    check_room(out)
    registration = None if plan is None else read_registration(plan)
    runs, problems = survey(base, *more)
    left_out: list[str] = []
    if registration is not None:
        runs, left_out = counting(runs, registration)
        if not runs:
            raise ValueError(f"--plan: expected trainings of this plan, got none; {left_out[0]}")
    for said in (*(f"shown as missing: {x}" for x in problems), *(f"left out: {x}" for x in left_out)):
        if console is not None:
            console.print(said, style="yellow", soft_wrap=True, markup=False)
    for folder in (base, *more):  # the page is about the runs, wherever they lie
        problems = [problem.replace(f"{folder}/", "") for problem in problems]
    page = _page(runs, registration, left_out, problems)
    files = page.files() | {TEXT: page.markdown().encode()}
    html = page.html(out)
    return write_page(out, html, files)


def write_page(out: Path, html: str, files: dict[str, bytes]) -> Path:
    """Write a page and the files beside it, the page last, and return where it is.

    Args:
        out: the folder.
        html: the page.
        files: what lies beside it, by names relative to the folder.
    """
    for part in PARTS:
        (out / part).mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_bytes(out / name, content)
    write_text(out / PAGE, html)
    return out / PAGE


def check_room(out: Path) -> None:
    """Raise ValueError, before anything is read or written, if something else lies where the report would."""
    for folder in (out, *(out / part for part in PARTS)):
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"--out: expected a folder or nothing at {folder}, got a file")
    for file in (out / PAGE, out / TEXT):
        if file.is_dir():
            raise ValueError(f"--out: expected a file or nothing at {file}, got a folder")


def _page(runs: list[Run], registration: Registration | None, left_out: list[str], problems: list[str]) -> Page:
    all_comparable(runs)
    judged = outcomes(runs, registered=registration is not None)
    said = answers(judged, left_out) + empty_answers(runs) + (several(runs) if registration is None else [])
    kind = "exploratory, no plan was given"
    if registration is not None:
        kind = f"the registered plan {registration.plan[:SHOWN]}"
    tables = other_tables(judged, runs) + all_tables(runs)
    charts = training_figures.all_figures(runs) | figures.all_figures(runs)
    return Page(
        verdict=verdict(judged, runs),
        over_trainings=f"Over trainings: {kind}",
        answers=said,
        answer_tables=answer_tables(judged),
        by_seed="What this run can and cannot conclude" if registration is None else "Seed by seed: exploratory",
        conclusions=conclusions(runs),
        absent=absent_parts(tables, charts),
        problems=problems,
        charts=charts,
        tables=tables,
        runs=runs,
    )
