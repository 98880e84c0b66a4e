"""Results of lm-eval's tasks read back: which there are, and which of them were asked alike."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..eval.harness.suites import PREFIX
from ..files import read_json

# What two results of a task must share to stand in one column.
ASKED = ("version", "lm_eval", "samples", "examples", "prompts", "length", "bos", "max_length")


@dataclass(frozen=True, kw_only=True)
class Scored:
    """What lm-eval says of one task, at one length if it has lengths."""

    path: Path
    about: dict[str, Any]
    measures: dict[str, float]  # by lm-eval's names, without those of its filters
    samples: int
    higher_is_better: dict[str, bool]


def harness_results(place: Path, problems: list[str]) -> dict[str, Scored]:
    """The finished results of lm-eval's tasks in a folder, by their names without what all begin with.

    Args:
        place: the folder.
        problems: why other results are left out is appended to it.
    """
    found = {}
    for path in sorted(place.glob(f"{PREFIX}-*.json")):
        try:
            whole = read_json(path, "a result of lm-eval")
            about = whole.get("about")
            if not isinstance(about, dict):
                raise ValueError(f"{path}: expected a result of lm-eval, got something else")
            if "task" not in about:
                continue  # of an earlier version, which wrote all tasks of a command into one file
            if "result" not in whole:
                raise ValueError(f"{path}: not finished")
            found[path.stem.removeprefix(f"{PREFIX}-")] = _scored(path, about, whole["result"])
        except ValueError as error:
            problems.append(str(error))
    return found


def _scored(path: Path, about: dict[str, Any], result: Any) -> Scored:
    try:
        said = result[about["task"]]
        measures = {key.partition(",")[0]: float(value) for key, value in said.items() if "," in key}
        samples, better = int(said["sample_len"]), dict(said["higher_is_better"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path}: expected lm-eval's measures of {about.get('task')}, got: {error!r}") from error
    return Scored(path=path, about=about, measures=measures, samples=samples, higher_is_better=better)


def asked_otherwise(results: list[Scored]) -> dict[Path, str]:
    """Of results of one name, those that were asked in another way than most: the difference, by path."""
    ways = [tuple(str(x.about.get(name)) for name in ASKED) for x in results]
    usual = Counter(ways).most_common(1)[0][0] if ways else ()
    reasons = {}
    for result, way in zip(results, ways, strict=True):
        said = [f"{a} is {x} instead of {y}" for a, x, y in zip(ASKED, way, usual, strict=True) if x != y]
        if said:
            reasons[result.path] = f"asked otherwise: {'; '.join(said)}"
    return reasons
