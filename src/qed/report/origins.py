"""Where the trainings of a page came from: what was trained, by which code, where, when, and with which command."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..analysis.names import name_of
from ..analysis.results import Run
from ..analysis.selection import arms_of, not_comparable, setup
from ..files import read_json
from ..provenance import without_folders
from ..recipes.paper import ARMS
from ..rules import RULES
from .markup import Table

SHORT = 12  # digits of a commit or sha256 that are shown
NOT_RECORDED = "not recorded"
FARTHEST = 2  # folders above the page's in which files may lie that it links to


def trained_table(runs: list[Run]) -> Table:
    """The paper's arms and all others, and which seeds of each were trained."""
    rows: list[list[str | None]] = []
    for arm in dict.fromkeys([*ARMS, *arms_of(runs)]):
        own = [run for run in runs if run.arm == arm]
        rule = own[0].config["model"]["rule"] if own else arm
        row: list[str | None] = [name_of(arm), RULES[rule].erase_vector]
        row.append(", ".join(str(run.seed) for run in own) or None)
        for name in ("total_tokens", "sequence"):
            row.append(" and ".join(dict.fromkeys(f"{setup(run)[name]:,}" for run in own)) or None)
        rows.append([*row, _size(own)])
    return Table(
        name="trained",
        title="What was trained",
        columns=["arm", "erase vector a", "seeds", "training tokens", "tokens in a row", "model"],
        rows=rows,
        absent="not trained",
    )


def _size(runs: list[Run]) -> str | None:
    """The sizes of these runs' models; None where no configuration says them."""
    sizes = [setup(run) for run in runs]
    said = [
        f"{x['num_hidden_layers']} layers, {x['hidden_size']} channels, {x['num_heads']} heads"
        for x in sizes
        if x["num_hidden_layers"] and x["hidden_size"] and x["num_heads"]
    ]
    return " and ".join(dict.fromkeys(said)) or ("the usual sizes" if runs else None)


def origins_table(runs: list[Run]) -> Table:
    """One row for each training: commit, code, device, versions, date and command, as its files recorded them."""
    unlike = not_comparable(runs)
    rows: list[list[str | None]] = []
    for run in runs:
        about = read_json(run.path / "config.json", "the configuration of a run")
        where = about.get("environment") if isinstance(about.get("environment"), dict) else {}
        commit, _, changed = _words(about.get("git")).partition(" ")
        rows.append(
            [
                *(run.path.name, name_of(run.arm), str(run.seed)),
                f"{commit[:SHORT]} {changed}".strip() or None,
                _words(about.get("code"))[:SHORT] or None,
                _words(where.get("device")) or None,
                " ".join(f"{name} {where[name]}" for name in ("torch", "triton") if name in where) or None,
                _words(about.get("date")) or None,
                without_folders(_words(about.get("command"))) or None,
            ]
        )
    return Table(
        name="origins",
        title="Where every training came from",
        columns=["run", "arm", "seed", "commit", "sha256 of the code", "device", "versions", "date", "command"],
        rows=rows,
        absent=NOT_RECORDED,
        prose={8},
        verbatim={8},
        unlike={(i, 0): unlike[run.path] for i, run in enumerate(runs) if run.path in unlike},
        note='"changed" after a commit means that files differed from it. The sha256 tells which code it was. '
        "Of absolute paths in a command the last name is shown.",
    )


def _words(value: Any) -> str:
    return value if isinstance(value, str) else ""


def link(path: Path, page: Path) -> str | None:
    """A relative link from the page's folder to a file; None where there is no file, or it lies far from the page."""
    if not path.is_file():
        return None
    relative = Path(os.path.relpath(path.resolve(), page.resolve()))
    return relative.as_posix() if relative.parts.count("..") <= FARTHEST else None


def raw_answers(runs: list[Run], page: Path) -> dict[str, list[tuple[str, str]]]:
    """Links to the files with every answer of each run, by the run's name: what is shown, and the link."""
    found = {}
    for run in runs:
        files = [x for part in ("eval", "strength") for x in sorted((run.path / part).rglob("*.jsonl*")) if x.is_file()]
        links = [(x.relative_to(run.path).as_posix(), link(x, page)) for x in files if "prompts" not in x.parts]
        found[run.path.name] = [(name, to) for name, to in links if to is not None]
    return {name: links for name, links in found.items() if links}
