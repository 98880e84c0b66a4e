"""The page with a row for every arm: what arms follow and hold, from folders of several scales, in one table.

Every folder is one of `qed reproduce`, or the runs in one; what it has is told by its trainings. Of trainings at the
same setting the first folder's are the measure: those that are not comparable with them are named and left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from ..analysis.capacity import SEEDS, missing
from ..analysis.registered import recipe_of
from ..analysis.results import Run, survey
from ..analysis.selection import arms_of
from ..analysis.settings import Collected, Settings, has_settings, read_settings, together, unlike, unpacked_runs
from ..analysis.units import counting, origins, read_registration
from ..pages import render
from . import drawing, view
from .arm_figures import recall_figures, tracking_figures
from .arm_tables import (
    all_runs,
    capacity_table,
    capacity_tests,
    held_table,
    loads_table,
    one_table,
    reach_table,
    tracking_table,
)
from .charts import Charts
from .examples import Examples
from .markup import Table
from .origins import origins_table
from .page import TEXT, check_room, write_page

RECALL_EXPERIMENT = "E4"  # of the registered plan


class Part(NamedTuple):
    """A section of the page."""

    id: str
    title: str
    said: list[str]
    tables: list[Table]
    charts: Charts


class Folders(NamedTuple):
    """What several folders of `qed reproduce` have together."""

    tracking: Settings
    recall: Settings
    mini: list[Run]
    left_out: list[str]

    @property
    def runs(self) -> list[Run]:
        """All trainings."""
        return [*all_runs(self.tracking), *all_runs(self.recall), *self.mini]


def is_of_arms(base: Path) -> bool:
    """Whether this page, and not that of the paper's question, is the one about a folder's trainings."""
    with unpacked_runs(base) as runs:
        return has_settings(base if runs is None else runs)


def _mini(folders: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """The comparable runs of plain folders of runs, those of the first one first."""
    kept: list[Run] = []
    left_out: list[str] = []
    for folder in folders:
        runs, problems = survey(folder)
        left_out += problems
        for run in runs:
            known = (run.arm, run.seed) in {(x.arm, x.seed) for x in kept}
            why = "the same arm and seed is there" if known else unlike(run, kept[0] if kept else run)
            if why is None:
                kept.append(run)
            else:
                left_out.append(f"{run.path.name}: {why}")
    return kept, left_out


def _sorted_by_kind(folders: Iterable[Path]) -> dict[str, list[Path]]:
    """Folders of runs by what they are of: "tracking", "recall", or "mini" for all that have no settings."""
    kinds: dict[str, list[Path]] = {"tracking": [], "recall": [], "mini": []}
    for folder in folders:
        if not has_settings(folder):
            kinds["mini"].append(folder)
            continue
        first = next(iter(read_settings(folder)[0].values()))[0]
        recipe = recipe_of(first)
        if recipe not in kinds:
            raise ValueError(f"RUNS: expected trainings of tracking or recall in {folder}, got those of {recipe}")
        kinds[recipe].append(folder)
    return kinds


def gathered(folders: Sequence[Path], stack: ExitStack) -> Folders:
    """Everything in these folders that may stand in one table. Packed folders stay unpacked as long as `stack` does."""
    opened = []
    for folder in folders:
        inside = stack.enter_context(unpacked_runs(folder))
        opened.append(folder if inside is None else inside)
    kinds = _sorted_by_kind(opened)
    tracking, recall = (together(kinds[name]) for name in ("tracking", "recall"))
    mini, problems = _mini(kinds["mini"])
    named: list[Collected] = [tracking, recall]
    left_out = [text for x in named for text in x.left_out] + problems
    return Folders(tracking.runs, recall.runs, mini, left_out)


def parts_of(found: Folders, registered: bool) -> list[Part]:
    """The sections that there are results for."""
    parts = []
    scales = [bool(x) for x in (found.tracking, found.recall, found.mini)]
    if sum(scales) > 1:
        said = "Each row is an arm; trainings of other settings, rows or questions are not in it."
        table = one_table(found.tracking, found.recall, found.mini)
        parts.append(Part("arms", "One table", [said], [table], {}))
    if found.tracking:
        said = (
            "A model of one layer reads letters of a finite group and says after each what the word has multiplied to "
            "so far. It is trained on short words and asked about long ones. What a rule can follow depends on the "
            "eigenvalues of its transition: without a negative one not even parity, with real ones alone no element of "
            "order three."
        )
        tables = [tracking_table(found.tracking), reach_table(found.tracking)]
        parts.append(Part("tracking", "State tracking", [said], tables, tracking_figures(found.tracking)))
    if found.recall:
        said = (
            "A row tells pairs of a key and a value one by one, and after each asks for two of those told so far. How "
            "many pairs a state of a given size holds is where it still answers 90 % of the questions."
        )
        of_a_plan = registered or any(origins(run)["config.json"][1] for run in all_runs(found.recall))
        waits = missing(found.recall) if of_a_plan else []  # a plan's tests are not looked at before they are taken
        tests = [] if waits else [x for x in [capacity_tests(found.recall, registered)] if x.rows]
        tables = [capacity_table(found.recall), *tests, held_table(found.recall), loads_table(found.recall)]
        saying = [said, *(["The registered tests are not taken yet. " + "; ".join(waits) + "."] if waits else [])]
        parts.append(Part("recall", "Associative recall under load", saying, tables, recall_figures(found.recall)))
    return parts


def write_arms(folders: Sequence[Path], out: Path, console: Console | None = None, *, plan: Path | None = None) -> Path:
    """Write report.html, report.md, tables/*.csv and figures/* about all arms in these folders; return the page's path.

    Args:
        folders: folders of `qed reproduce`, packed or not, or the runs in one; the first one of a scale is the measure.
        out: the folder to write.
        console: where trainings that are left out are named too.
        plan: a registered plan, under which alone trainings of recall count.
    """
    check_room(out)
    with ExitStack() as stack:
        found = gathered(folders, stack)
        if plan is not None:
            found = _registered(found, plan)
        if not found.runs:
            raise ValueError(f"RUNS: expected finished trainings, got none in {', '.join(map(str, folders))}")
        parts = parts_of(found, registered=plan is not None)
        files = _files(parts)
        examples = Examples(found.runs)
        origins = view.table(origins_table(found.runs), examples)
        html = render(
            "arms.html",
            runs=len(found.runs),
            parts=[_shown(part, examples) for part in parts],
            left_out=found.left_out,
            origins=origins,
            examples=examples.data(),
        )
        files[TEXT] = _markdown(parts, found).encode()
    for said in found.left_out:
        if console is not None:
            console.print(f"left out: {said}", style="yellow", soft_wrap=True, markup=False)
    return write_page(out, html, files)


def _registered(found: Folders, plan: Path) -> Folders:
    """The same with those trainings of recall alone that count under a plan."""
    registration = read_registration(plan, RECALL_EXPERIMENT)
    kept: Settings = {}
    left_out = list(found.left_out)
    for setting, runs in found.recall.items():
        counted, others = counting(runs, registration)
        others += [
            f"{run.path.name}: its seed is {run.seed}, and the plan's are 0 to {SEEDS - 1}"
            for run in counted
            if run.seed >= SEEDS
        ]
        left_out += [f"{setting}/{text}" for text in others]
        counted = [run for run in counted if run.seed < SEEDS]
        kept |= {setting: counted} if counted else {}
    return found._replace(recall=kept, left_out=left_out)


def _files(parts: list[Part]) -> dict[str, bytes]:
    """The content of the files of tables and figures, by their path beside the page."""
    made = {f"tables/{x.name}.csv": x.csv().encode() for part in parts for x in part.tables}
    for name, chart in [item for part in parts for item in part.charts.items()]:
        made |= {f"figures/{name}.{kind}": x for kind, x in drawing.drawn(chart, ("pdf", "png")).items()}
    return made


def _shown(part: Part, examples: Examples) -> dict[str, object]:
    tables = [view.table(x, examples, [f"tables/{x.name}.csv"]) for x in part.tables]
    charts = [view.chart(name, x, [f"figures/{name}.pdf", f"figures/{name}.png"]) for name, x in part.charts.items()]
    return part._asdict() | {"tables": tables, "charts": charts}


def _markdown(parts: list[Part], found: Folders) -> str:
    text = ["# Results", "", f"{len(found.runs)} trainings of {', '.join(arms_of(found.runs))}.", ""]
    for part in parts:
        text += [f"## {part.title}", "", *part.said, ""]
        text += [table.markdown() for table in part.tables]
        text += [f"![{chart.title}](figures/{name}.png)\n" for name, chart in part.charts.items()]
    if found.left_out:
        text += ["## Left out", "", *(f"- {x}" for x in found.left_out), ""]
    return "\n".join(text)
