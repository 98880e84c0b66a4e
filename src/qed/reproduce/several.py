"""Several scales one after the other, and one table of all arms over them.

BASE/SCALE      the reproduction of each scale, in the folder that it has when it is run alone
BASE/arms       the page with one row for every arm, over all of these scales
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from ..report.arm_page import write_arms
from .plan import Plan, rehearsed
from .run import reproduce


class Job(NamedTuple):
    """A scale and its folder."""

    plan: Plan
    out: Path


class How(NamedTuple):
    """How trainings are run: as `reproduce` takes it."""

    device: str
    jobs: int | None  # None: as many as the plan says
    only: list[str]
    minutes: float | None
    beside: Path | None


def jobs_of(plans: Mapping[str, Plan], out: Path | None, *, dry_run: bool) -> list[Job]:
    """Every plan with its folder: `out` for a single one, otherwise a folder named after the scale.

    Args:
        plans: by scale, in the order in which they are run.
        out: the folder that was asked for; None for runs/.
        dry_run: do a few steps of each.
    """
    found = []
    for scale, plan in plans.items():
        named = (out or Path("runs")) / (f"{scale}-dry-run" if dry_run else scale)
        found.append(Job(rehearsed(plan) if dry_run else plan, out if out and len(plans) == 1 else named))
    return found


def reproduce_all(jobs: list[Job], how: How, console: Console) -> int:
    """Run all scales; if there are several and all are done, write one page of all arms. Return the exit status.

    Args:
        jobs: the scales.
        how: device, processes, time and kept results.
        console: where progress and results are printed.
    """
    if how.only and len(jobs) > 1:
        raise ValueError("--only: expected a single scale, whose trainings it names, got several")
    start = time.monotonic()
    for job in jobs:
        left = None if how.minutes is None else max(0.0, how.minutes - (time.monotonic() - start) / 60)
        if len(jobs) > 1:
            console.rule(job.plan.scale)
        status = reproduce(
            job.plan,
            job.out,
            device=how.device,
            jobs=how.jobs or job.plan.jobs,
            only=how.only,
            minutes=left,
            console=console,
            beside=how.beside,
        )
        if status:
            return status
    if len(jobs) > 1:
        kept = [] if how.beside is None else [how.beside / job.plan.scale for job in jobs]
        folders = [job.out for job in jobs] + [x for x in kept if x.is_dir()]
        path = write_arms(folders, jobs[0].out.parent / "arms", console)
        console.print(f"all arms in one table: {path.resolve().as_uri()}", markup=False)
    return 0
