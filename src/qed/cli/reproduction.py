"""`qed reproduce`: the main job, from a corpus to the report."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..eval.task import NeedleTask, RecallTask
from ..eval.tasks import of_kind
from . import completion
from .console import console_for
from .options import (
    LARGEST_SEED,
    Device,
    Import,
    Words,
    device_for,
    existing,
    files,
    finite,
    names,
    numbers,
    writable,
)

if TYPE_CHECKING:
    from ..reproduce.plan import Plan

commands = typer.Typer()

Scale = Annotated[
    str,
    typer.Option(
        help="mini (two cores), small, medium, paper-short (one large GPU each) or paper (days); tracking (two cores) "
        "and recall (one GPU) ask what a state can follow and hold. Several, separated by commas, run in turn.",
        autocompletion=completion.scales,
    ),
]
Arms = Annotated[
    str,
    typer.Option(
        help="Rules, RULE@λ_max, RULE+eraseMOST or RULE+thetaFACTOR, separated by commas, instead of the scale's own; "
        "'all' takes the paper's five.",
        autocompletion=completion.arms,
    ),
]
SettingsOption = Annotated[
    str,
    typer.Option(
        "--settings", help="Some of tracking's groups or of recall's widths, separated by commas, instead of all."
    ),
]
Beside = Annotated[
    Path | None,
    typer.Option(help="A folder with kept results of tracking/ and recall/, whose rows stand beside the new ones."),
]
Seeds = Annotated[str, typer.Option(help="Seeds separated by commas, instead of the scale's own.")]
Out = Annotated[Path | None, typer.Option(help="The folder for everything; the same command resumes where it stopped.")]
Corpus = Annotated[str | None, typer.Option(help="The source of documents, as in `qed prepare`; not for mini.")]
Validation = Annotated[str | None, typer.Option(help="A held-out source, instead of a part of the corpus.")]
CorpusTokenizer = Annotated[str | None, typer.Option(help="The tokenizer, as in `qed prepare`.")]
Haystack = Annotated[
    Path | None, typer.Option(help="The essays of niah_single_2 and _3; without them these tasks are left out.")
]
RECALL, NEEDLES = ", ".join(of_kind(RecallTask)), ", ".join(of_kind(NeedleTask))
RecallData = Annotated[list[str] | None, typer.Option(help=f"TASK=FILE for {RECALL}; may be given repeatedly.")]
Needles = Annotated[str, typer.Option(help=f"Some of {NEEDLES}, separated by commas, instead of the scale's own.")]
Practice = Annotated[
    float | None, typer.Option(help="The share of practice documents in the corpus, instead of the scale's own.")
]
PlanFile = Annotated[
    Path | None, typer.Option("--plan", help="The text of a registered plan; every result carries its sha256.")
]
Jobs = Annotated[int | None, typer.Option(min=1, max=1024, help="Trainings that run at a time.")]
Only = Annotated[str, typer.Option(help="Run only these trainings now: names such as qed-0, separated by commas.")]
Minutes = Annotated[
    float | None, typer.Option(min=0, help="Stop after so many minutes, ready to be resumed.", callback=finite)
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Run every stage of every arm with a few steps each.")]
Status = Annotated[bool, typer.Option("--status", help="Print what is done, in seconds and per cent, and stop.")]
Collect = Annotated[Path | None, typer.Option(help="Copy the results to this folder, packed, and stop.")]


@commands.command("reproduce", epilog="Example: qed reproduce --arms all --seeds 0,1 --minutes 30")
def _reproduce(
    scale: Scale = "mini",
    arms: Arms = "",
    seeds: Seeds = "",
    out: Out = None,
    corpus: Corpus = None,
    validation: Validation = None,
    tokenizer: CorpusTokenizer = None,
    words: Words = None,
    essays: Haystack = None,
    data: RecallData = None,
    needles: Needles = "",
    practice: Practice = None,
    settings: SettingsOption = "",
    beside: Beside = None,
    plan_file: PlanFile = None,
    jobs: Jobs = None,
    only: Only = "",
    minutes: Minutes = None,
    dry_run: DryRun = False,
    status: Status = False,
    collect: Collect = None,
    device: Device = "auto",
    import_: Import = None,
) -> None:
    """Run the main job: train the paper's arms, measure them and write the report."""
    from ..reproduce import collecting, progress, run, several
    from ..reproduce.plan import PLANS, Files

    console = console_for()
    scales = names("--scale", [scale], PLANS)
    given = Files(
        corpus=corpus,
        validation=validation,
        tokenizer=tokenizer,
        words=None if existing("--words", words, folder=True) is None else str(words),
        essays=None if existing("--essays", essays, folder=False) is None else str(essays),
        recall={task: str(path) for task, path in files(data, of_kind(RecallTask)).items()},
    )
    plans = {x: _changed(PLANS[x](given), arms, seeds, needles, practice, settings, plan_file) for x in scales}
    existing("--beside", beside, folder=True)
    scheduled = several.jobs_of(plans, out, dry_run=dry_run)
    for job in scheduled:
        writable("--out", job.out, folder=True)
        if status:
            progress.show_state(job.plan, job.out, console)
        elif collect is not None:
            place = writable("--collect", collect / job.plan.scale if len(scales) > 1 else collect, folder=True)
            console.print(f"{collecting.collect(job.out, place)} files in {place}")
    if status or collect is not None:
        return
    device = device_for(device)
    for job in scheduled:
        if job.plan.scale == "paper":
            run.say_hours(plans["paper"], job.out, device, console)
    how = several.How(device, jobs, only.split(",") if only else [], minutes, beside)
    raise typer.Exit(several.reproduce_all(scheduled, how, console))


def _changed(
    plan: Plan,
    arms: str,
    seeds: str,
    needles: str,
    practice: float | None,
    settings: str,
    plan_file: Path | None,
) -> Plan:
    """Replace what the options say of a scale's own plan."""
    from ..provenance import imported, plan_sha256
    from ..recipes.paper import ARMS
    from ..reproduce.plan import with_settings

    if settings:
        plan = with_settings(plan, tuple(names("--settings", [settings], None)))
    changes: dict[str, Any] = {"imported": imported()}
    if arms:
        changes["arms"] = tuple(ARMS) if arms == "all" else tuple(names("--arms", [arms], None))
    if seeds:
        changes["seeds"] = numbers("--seeds", seeds, 0, LARGEST_SEED)
    if plan.scale in ("mini", "tracking", "recall") and (needles or practice is not None):
        raise ValueError(f"{'--needles' if needles else '--practice'}: expected a scale with S-NIAH, got {plan.scale}")
    if needles:
        changes["needles"] = tuple(names("--needles", [needles], None))
    if practice is not None:
        changes["practice"] = practice
    if plan_file is not None:
        changes["registered"] = plan_sha256(plan_file)
    return dataclasses.replace(plan, **changes)
