"""Which trainings count under a registered plan: those of its code, of itself, and of the prompts that the others had.

Every result says which code made it and under which plan (`qed.provenance`). A unit of others is named, with the
reason, and left out: it is never mixed with those that count.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from ..files import read_json
from ..provenance import ADDITIONS, plan_sha256
from .results import SHARED, Result, Run

SHOWN = 12  # digits of a sha256


class Registration(NamedTuple):
    """A plan, by the sha256 of its registered part, and the sha256 of the code that it is about."""

    plan: str
    code: str


def read_registration(path: Path) -> Registration:
    plan = plan_sha256(path)
    lines = path.read_text(encoding="utf-8").splitlines()
    end = next((i for i, line in enumerate(lines) if line.strip() == ADDITIONS), len(lines))
    begin = next((i for i, line in enumerate(lines[:end]) if line.startswith("Code:")), end)
    for line in lines[begin:end]:
        if found := re.fullmatch(r"\s+([0-9a-f]{64})\s*", line):
            return Registration(plan, found[1])
    raise ValueError(
        f"--plan: expected the sha256 of the code, 64 hexadecimal digits on an indented line after 'Code:', got none "
        f"in {path}"
    )


def origins(run: Run) -> dict[str, tuple[str | None, str | None]]:
    """Code and plan of all that is known about a run, by file."""
    found: dict[str, Any] = {"config.json": read_json(run.path / "config.json", "the configuration of a run")}
    for result in _results(run).values():
        found[str(result.path.relative_to(run.path))] = result.whole.get("provenance")
    if run.eigenvalues is not None:
        found["eigenvalues.json"] = run.eigenvalues.get("provenance")
    return {name: (_sha256(x, "code"), _sha256(x, "plan")) for name, x in found.items()}


def _sha256(provenance: Any, name: str) -> str | None:
    found = provenance.get(name) if isinstance(provenance, dict) else None
    return found if isinstance(found, str) else None


def _results(run: Run) -> dict[tuple[float, str], Result]:
    """By scale and name."""
    scaled = {(scale, name): x for scale, results in run.strengths.items() for name, x in results.items()}
    return scaled | {(1.0, name): x for name, x in run.results.items()}


def reason(run: Run, plan: Registration) -> str | None:
    """Why a run does not count, as far as it tells by itself."""
    found = origins(run)
    for i, (what, wanted) in enumerate((("code", plan.code), ("plan", plan.plan))):
        values = {name: x[i] for name, x in found.items()}
        several = list(dict.fromkeys(values.values()))
        if len(several) > 1:
            first, other = (next(name for name, x in values.items() if x == y) for y in several[:2])
            return (
                f"its results are of several {what}s: {_short(several[0])} in {first}, {_short(several[1])} in {other}"
            )
        if several[0] != wanted:
            return f"its {what} is {_short(several[0])}, and the plan's is {_short(wanted)}"
    return None


def _short(sha256: str | None) -> str:
    return "none" if sha256 is None else sha256[:SHOWN]


def of_other_prompts(runs: list[Run]) -> dict[int, str]:
    """Runs, by their place among `runs`, some of whose results are of other prompts than most runs had, and why. Where
    no set of prompts is most runs', nothing is said: such results are refused when they come into one table."""
    by_name: dict[tuple[float, str], dict[int, Result]] = {}
    for i, run in enumerate(runs):
        for key, result in _results(run).items():
            by_name.setdefault(key, {})[i] = result
    found: dict[int, str] = {}
    for (scale, name), results in by_name.items():
        asked = {i: tuple(str(x.about.get(field)) for field in SHARED) for i, x in results.items()}
        (usual, count), *_ = Counter(asked.values()).most_common()
        if 2 * count <= len(asked):
            continue
        for i, other in asked.items():
            if other != usual and i not in found:
                field = next(n for n, (a, b) in enumerate(zip(other, usual, strict=True)) if a != b)
                where = name if scale == 1 else f"{name} at s = {scale:g}"
                found[i] = f"its {where} is of {SHARED[field]} {other[field]}, where {count} others have {usual[field]}"
    return found


def counting(runs: list[Run], plan: Registration) -> tuple[list[Run], list[str]]:
    """Runs that count, and the others by name, each with the reason."""
    reasons = {i: why for i, run in enumerate(runs) if (why := reason(run, plan)) is not None}
    left = [i for i in range(len(runs)) if i not in reasons]
    reasons |= {left[i]: why for i, why in of_other_prompts([runs[i] for i in left]).items()}
    kept = [run for i, run in enumerate(runs) if i not in reasons]
    return kept, [f"{runs[i].path.name}: {why}" for i, why in sorted(reasons.items())]


def several(runs: list[Run]) -> list[str]:
    """What is to be said of runs that are together on a page without a plan: of how many codes and plans they are."""
    found = [x for run in runs for x in origins(run).values()]
    said = []
    for i, what in enumerate(("code", "plan")):
        values = sorted({_short(x[i]) for x in found})
        said += [f"These results are of several {what}s: {', '.join(values)}."] if len(values) > 1 else []
    return said
