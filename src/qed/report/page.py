"""`qed report`: one page that needs nothing else to open, and every part of it as files, from result files alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from rich.console import Console

from ..analysis.names import name_of
from ..analysis.registered import outcomes
from ..analysis.results import Run, survey
from ..analysis.selection import all_comparable
from ..analysis.units import SHOWN, Registration, counting, read_registration, several
from ..files import write_text
from . import drawing, figures, training_figures
from .conclusions import answers, conclusions
from .drawing import Drawings
from .markup import Table, html_list, html_page, html_picture
from .tables import all_tables
from .training_tables import answer_tables, other_tables

DAMAGED = "Not finished or damaged, and so shown as missing"


@dataclass(frozen=True, kw_only=True)
class Page:
    """What stands on the page, before it is HTML or markdown."""

    over_trainings: str  # the heading of the answers
    answers: list[str]
    answer_tables: list[Table]
    by_seed: str  # the heading of the conclusions
    conclusions: list[str]
    absent: list[str]
    problems: list[str]
    drawings: Drawings
    tables: list[Table]
    runs: list[Run]

    def html(self, pictures: dict[str, dict[str, bytes]]) -> str:
        """The page as HTML, with the pictures inside."""
        sections = [f"<h2>{escape(self.over_trainings)}</h2>", html_list(self.answers)]
        sections += [table.html() for table in self.answer_tables]
        sections += [f"<h2>{self.by_seed}</h2>", html_list(self.conclusions)]
        if self.absent:
            sections.append(f"<p class='missing'>There are no results for: {escape(', '.join(self.absent))}.</p>")
        if self.problems:
            sections += [f"<h2>{DAMAGED}</h2>", html_list(self.problems)]
        sections += ["<h2>Figures</h2>"]
        sections += [
            html_picture(title, pictures[name]["svg"], pictures[name]["dark"])
            for name, (title, _) in self.drawings.items()
        ]
        sections += ["<h2>Tables</h2>", *(table.html() for table in self.tables)]
        sections += ["<h2>Runs</h2>", html_list([_about(run) for run in self.runs])]
        return html_page(sections)

    def markdown(self) -> str:
        """The page as markdown, with the pictures in files beside it."""
        text = ["# Results", "", f"## {self.over_trainings}", "", *(f"- {x}" for x in self.answers), ""]
        text += [table.markdown() for table in self.answer_tables]
        text += [f"## {self.by_seed}", "", *(f"- {x}" for x in self.conclusions), ""]
        text += [f"There are no results for: {', '.join(self.absent)}.", ""] if self.absent else []
        if self.problems:
            text += [f"## {DAMAGED}", "", *(f"- {x}" for x in self.problems), ""]
        text += [f"![{title}](figures/{name}.png)\n" for name, (title, _) in self.drawings.items()]
        text += [table.markdown() for table in self.tables]
        return "\n".join(text)


def absent_parts(tables: list[Table], drawings: Drawings) -> list[str]:
    """The parts of the paper for which there are no results."""
    parts = {
        "Table 3 and Figure 1 (S-NIAH-1)": "figure1_niah_single_1" in drawings,
        "S-NIAH-2": "figure1_niah_single_2" in drawings,
        "S-NIAH-3": "figure1_niah_single_3" in drawings,
        "Figure 3 (recall)": "figure3_recall" in drawings,
        "Table 4 (strength sweep)": any(table.name == "table4_strength" for table in tables),
        "eigenvalues": "eigenvalues" in drawings,
        "loss by position": "loss_by_position" in drawings,
        "λ over training": "strength_over_training" in drawings,
    }
    return [name for name, present in parts.items() if not present]


def write(
    base: Path, out: Path, console: Console | None = None, *, more: Sequence[Path] = (), plan: Path | None = None
) -> Path:
    """Write report.html, report.md, tables/*.csv, figures/*.png and figures/*.pdf, and return the page's path.

    Result files that are there but cannot be used are named on the page. With a registered plan, only its trainings are
    on the page, and the others are named.

    Args:
        base: a folder of runs.
        out: the folder to write.
        console: where files that cannot be used and trainings that do not count are named too.
        more: further folders, whose runs are reported together with those of `base`.
        plan: a registered plan.
    """
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
    pictures = _pictures(page.drawings)
    _write_files(page, pictures, out)
    write_text(out / "report.md", page.markdown())
    write_text(out / "report.html", page.html(pictures))
    return out / "report.html"


def _page(runs: list[Run], registration: Registration | None, left_out: list[str], problems: list[str]) -> Page:
    all_comparable(runs)
    judged = outcomes(runs, registered=registration is not None)
    said = answers(judged, left_out) + (several(runs) if registration is None else [])
    kind = "exploratory, no plan was given"
    if registration is not None:
        kind = f"the registered plan {registration.plan[:SHOWN]}"
    tables = other_tables(judged, runs) + all_tables(runs)
    drawings = training_figures.all_figures(runs) | figures.all_figures(runs)
    return Page(
        over_trainings=f"Over trainings: {kind}",
        answers=said,
        answer_tables=answer_tables(judged),
        by_seed="What this run can and cannot conclude" if registration is None else "Seed by seed: exploratory",
        conclusions=conclusions(runs),
        absent=absent_parts(tables, drawings),
        problems=problems,
        drawings=drawings,
        tables=tables,
        runs=runs,
    )


def _pictures(drawings: Drawings) -> dict[str, dict[str, bytes]]:
    """Every figure by name and kind of file; "dark" is SVG for a dark page."""
    return {
        name: drawing.drawn(draw, ("svg", "png", "pdf")) | {"dark": drawing.drawn(draw, ("svg",), dark=True)["svg"]}
        for name, (_, draw) in drawings.items()
    }


def _write_files(page: Page, pictures: dict[str, dict[str, bytes]], out: Path) -> None:
    for part in ("tables", "figures"):
        (out / part).mkdir(parents=True, exist_ok=True)
    for table in (*page.answer_tables, *page.tables):
        (out / "tables" / f"{table.name}.csv").write_text(table.csv())
    for name, kinds in pictures.items():
        for kind in ("png", "pdf"):
            (out / "figures" / f"{name}.{kind}").write_bytes(kinds[kind])


def _about(run: Run) -> str:
    text = f"{run.path.name}: {name_of(run.arm)}, seed {run.seed}, {run.config['total_tokens']:,} tokens"
    return text + f", rows of {run.train_length}" + ("" if run.complete else ", not finished")
