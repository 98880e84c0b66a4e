"""Which trainings count under a registered plan: those made by its code, under it, and with the same prompts.

Every result says which code made it and under which plan (`qed.provenance`). A training made by another code or under
another plan is named, with the reason, and left out: it is never mixed with those that count.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from ..files import read_json
from ..provenance import ADDITIONS, plan_sha256
from .results import SHARED, Result, Run

SHOWN = 12  # digits of a sha256 that messages show


class Registration(NamedTuple):
    """A plan, by the sha256 of its registered part, and the sha256 of the code that it is about."""

    plan: str
    code: str


def read_registration(path: Path, added: str = "") -> Registration:
    """Read a registered plan; ValueError where it does not name the code that it is about.

    An experiment that was added later, such as "E4", has its own code: the first sha256 after a line "Code of E4:"
    among the additions.
    """
    plan = plan_sha256(path)
    lines = path.read_text(encoding="utf-8").splitlines()
    end = next((i for i, line in enumerate(lines) if line.strip() == ADDITIONS), len(lines))
    lines, mark = (lines[end:], f"Code of {added}:") if added else (lines[:end], "Code:")
    begin = next((i for i, line in enumerate(lines) if line.startswith(mark)), len(lines))
    for line in lines[begin:]:
        if digits := re.fullmatch(r"\s+([0-9a-f]{64})\s*", line):
            return Registration(plan, digits[1])
    raise ValueError(
        f"--plan: expected the sha256 of the code, 64 hexadecimal digits on an indented line after '{mark}', got none "
        f"in {path}"
    )


def origins(run: Run) -> dict[str, tuple[str | None, str | None]]:
    """The sha256 of code and plan under which each file of a run was made, by the file's path in the run's folder."""
    provenances: dict[str, Any] = {"config.json": read_json(run.path / "config.json", "the configuration of a run")}
    for result in _results(run).values():
        provenances[str(result.path.relative_to(run.path))] = result.whole.get("provenance")
    if run.eigenvalues is not None:
        provenances["eigenvalues.json"] = run.eigenvalues.get("provenance")
    return {name: (_sha256(x, "code"), _sha256(x, "plan")) for name, x in provenances.items()}


def _sha256(provenance: Any, name: str) -> str | None:
    digits = provenance.get(name) if isinstance(provenance, dict) else None
    return digits if isinstance(digits, str) else None


def _results(run: Run) -> dict[tuple[float, str], Result]:
    """All results of a run, by scale and name."""
    scaled = {(scale, name): x for scale, results in run.strengths.items() for name, x in results.items()}
    return scaled | {(1.0, name): x for name, x in run.results.items()}


def reason(run: Run, plan: Registration) -> str | None:
    """Why a run does not count, as far as its own files tell; None where they give no reason."""
    by_file = origins(run)
    for i, (what, wanted) in enumerate((("code", plan.code), ("plan", plan.plan))):
        values = {name: x[i] for name, x in by_file.items()}
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
    """Runs with results of other prompts than most runs had: the reason, by the run's place among `runs`.

    Where no set of prompts is that of most runs, no run is named: such results are refused when they would stand in one
    table.
    """
    by_name: dict[tuple[float, str], dict[int, Result]] = {}
    for i, run in enumerate(runs):
        for key, result in _results(run).items():
            by_name.setdefault(key, {})[i] = result
    reasons: dict[int, str] = {}
    for (scale, name), results in by_name.items():
        asked = {i: tuple(str(x.about.get(field)) for field in SHARED) for i, x in results.items()}
        (usual, count), *_ = Counter(asked.values()).most_common()
        if 2 * count <= len(asked):
            continue
        for i, other in asked.items():
            if other != usual and i not in reasons:
                field = next(n for n, (a, b) in enumerate(zip(other, usual, strict=True)) if a != b)
                where = name if scale == 1 else f"{name} at s = {scale:g}"
                reasons[i] = (
                    f"its {where} is of {SHARED[field]} {other[field]}, where {count} others have {usual[field]}"
                )
    return reasons


def counting(runs: list[Run], plan: Registration) -> tuple[list[Run], list[str]]:
    """The runs that count under a plan, and for each of the others its name and the reason."""
    reasons = {i: why for i, run in enumerate(runs) if (why := reason(run, plan)) is not None}
    left = [i for i in range(len(runs)) if i not in reasons]
    reasons |= {left[i]: why for i, why in of_other_prompts([runs[i] for i in left]).items()}
    kept = [run for i, run in enumerate(runs) if i not in reasons]
    return kept, [f"{runs[i].path.name}: {why}" for i, why in sorted(reasons.items())]


def several(runs: list[Run]) -> list[str]:
    """Sentences for runs that are on one page without a plan although several codes or plans made them."""
    made_by = [x for run in runs for x in origins(run).values()]
    said = []
    for i, what in enumerate(("code", "plan")):
        values = sorted({_short(x[i]) for x in made_by})
        said += [f"These results are of several {what}s: {', '.join(values)}."] if len(values) > 1 else []
    return said
