"""Trainings at several settings, read back: what `qed reproduce --scale tracking` and `--scale recall` leave behind.

    FOLDER/runs/SETTING/NAME     a run, as `results.py` reads it; every setting is a folder of runs of its own
    FOLDER/runs.tar.xz           the same, packed by `qed reproduce --collect`

Trainings of several folders stand in one table only where nothing but arm and seed tells them apart: the same recipe,
the same rows, the same questions. Whatever differs otherwise is named and left out.
"""

from __future__ import annotations

import json
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ..files import read_json
from ..train.config import CHANGEABLE_ON_RESUME
from .results import Run, survey

PACKED = "runs.tar.xz"
ARM = {"rule", "lambda_max", "erase_max", "layer_rules", "layer_types"}  # fields of a model that an arm sets
# Fields of a run that may differ. Of data, the identity of what was read counts, and not where it lay.
OWN = {"name", "seed", "theta_learning_rate", "data", "validation"} | CHANGEABLE_ON_RESUME
Settings = dict[str, list[Run]]  # runs by setting, in the order of the folders


class Collected(NamedTuple):
    """Runs that may stand in one table, by setting, and why others do not, in words."""

    runs: Settings
    left_out: list[str]


@contextmanager
def unpacked_runs(folder: Path) -> Iterator[Path | None]:
    """The folder of runs in a folder of `qed reproduce`, packed or not; None if there is none."""
    if (folder / "runs").is_dir():
        yield folder / "runs"
    elif not (folder / PACKED).is_file():
        yield None
    else:
        with tempfile.TemporaryDirectory() as place:
            try:
                with tarfile.open(folder / PACKED) as archive:
                    archive.extractall(place, filter="data")
            except (tarfile.TarError, EOFError, OSError) as error:
                raise ValueError(f"{folder / PACKED}: expected packed runs, got: {error}") from error
            yield Path(place)


def read_settings(base: Path) -> tuple[Settings, list[str]]:
    """The runs in every folder of a folder of settings, and what is wrong with others, in words."""
    runs: Settings = {}
    problems: list[str] = []
    for place in sorted(x for x in base.iterdir() if x.is_dir()):
        if any(place.glob("*/config.json")):
            runs[place.name], said = survey(place)
            problems += [text.replace(f"{base}/", "") for text in said]
    return runs, problems


def has_settings(base: Path) -> bool:
    """Whether a folder of runs has a folder for each of several settings."""
    return base.is_dir() and any(base.glob("*/*/config.json")) and not any(base.glob("*/config.json"))


def together(folders: Sequence[Path]) -> Collected:
    """The runs of several folders of settings that are comparable; the first folder is the measure.

    A run of the same setting, arm and seed as one of an earlier folder is left out too.
    """
    kept: Settings = {}
    left_out: list[str] = []
    for folder in folders:
        found, problems = read_settings(folder)
        left_out += problems
        for setting, runs in found.items():
            there = kept.setdefault(setting, [])
            for run in runs:
                measure = there[0] if there else run
                known = {(x.arm, x.seed) for x in there}
                why = "the same arm and seed is there" if (run.arm, run.seed) in known else unlike(run, measure)
                if why is None:
                    there.append(run)
                else:
                    left_out.append(f"{setting}/{run.path.name}: {why}")
    return Collected({setting: runs for setting, runs in kept.items() if runs}, left_out)


def unlike(run: Run, measure: Run) -> str | None:
    """Why two runs do not stand in one table; None where they do."""
    if not run.complete:
        return "the training is not finished"
    mine, theirs = (_compared(x) for x in (run, measure))
    for name in sorted(mine.keys() | theirs.keys()):
        if mine.get(name) != theirs.get(name):
            return f"its {name} is {_short(mine.get(name))}, where {measure.path.name} has {_short(theirs.get(name))}"
    return None


def _compared(run: Run) -> dict[str, Any]:
    """All that decides a run's numbers apart from arm and seed, and all that decides what it was asked."""
    model = {f"model.{name}": x for name, x in run.config["model"].items() if name not in ARM}
    config = {name: x for name, x in run.config.items() if name not in OWN | {"model"}}
    identities = read_json(run.path / "config.json", "the configuration of a run").get("identities")
    asked = {f"questions of {name}": result.about.get("prompts") for name, result in run.results.items()}
    return config | model | {"rows": identities} | asked


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
