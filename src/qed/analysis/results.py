"""Result files, read again: what was evaluated, and example by example what was right.

    RUNS/NAME/config.json, metrics.jsonl       of `qed train`
    RUNS/NAME/eval/TASK-….json, .jsonl         of `qed eval --out RUNS/NAME/eval`
    RUNS/NAME/strength/S/TASK-….json, .jsonl   of `qed strength --out RUNS/NAME/strength`
    RUNS/NAME/eigenvalues.json                 of `qed eigenvalues --out RUNS/NAME/eigenvalues.json`

What is not there is missing, never zero.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..eval.records import lines
from ..model.config import QEDConfig
from ..train.metrics import read_metrics

# Fields that two results must share to stand in one table.
SHARED = ("task", "length", "tokenizer", "prompts", "variant", "sizing", "context", "max_length", "bos")


@dataclass(frozen=True)
class Result:
    """One task (at one length) of one checkpoint at one strength."""

    path: Path  # the summary

    @cached_property
    def whole(self) -> dict[str, Any]:
        try:
            found = json.loads(self.path.read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{self.path}: expected a result of `qed eval`, got: {error}") from error
        if not isinstance(found, dict) or "about" not in found:
            raise ValueError(f"{self.path}: expected a result of `qed eval`, got something else")
        return found

    @property
    def about(self) -> dict[str, Any]:
        return dict(self.whole["about"])

    @property
    def finished(self) -> bool:
        return "result" in self.whole

    @property
    def result(self) -> dict[str, Any]:
        return dict(self.whole["result"])

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        path = plain_or_packed(self.path.with_suffix(".jsonl"))
        rows = list(lines(path))
        if len(rows) != self.result["samples"]:
            raise ValueError(f"{path}:{len(rows)}: expected {self.result['samples']} lines, got {len(rows)}")
        return rows

    @cached_property
    def right(self) -> dict[int, bool]:
        """By example."""
        return {row["index"]: bool(row["correct"]) for row in self.rows}

    @cached_property
    def examples(self) -> frozenset[tuple[int, int, str]]:
        """What tells examples of one task at two lengths apart."""
        return frozenset((row["index"], row["tokens"], str(row["gold"])) for row in self.rows)


def plain_or_packed(path: Path) -> Path:
    """The file, or the .xz that stands in for it."""
    packed = path.with_name(path.name + ".xz")
    return packed if packed.exists() and not path.exists() else path


def comparable(results: list[Result]) -> None:
    """Refuse results of different examples or ways of asking."""
    for other in results[1:]:
        first = results[0]
        for name in SHARED:
            a, b = first.about.get(name), other.about.get(name)
            if a != b:
                raise ValueError(f"not in one table: {name} is {a!r} in {first.path}, {name} is {b!r} in {other.path}")


def discordant(first: Result, second: Result) -> tuple[int, int, int]:
    """b: right in the first alone; c: in the second alone; n examples."""
    comparable([first, second])
    if first.right.keys() != second.right.keys():
        raise ValueError(f"not in one table: examples of {first.path} and {second.path} are not the same")
    pairs = [(first.right[i], second.right[i]) for i in first.right]
    return sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs), len(pairs)


def folder(path: Path) -> dict[str, Result]:
    """Finished results by name, such as "niah_single_1-4096"."""
    found = {x.stem: Result(x) for x in sorted(path.glob("*.json"))} if path.is_dir() else {}
    return {name: x for name, x in found.items() if x.finished}


@dataclass(frozen=True)
class Run:
    """One training run and all that was found out about it."""

    path: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        return dict(json.loads((self.path / "config.json").read_text())["config"])

    @property
    def arm(self) -> str:
        """The rule; with its bound on λ where that is not the paper's."""
        model = QEDConfig(**self.config["model"])
        bound = model.lambda_max
        return model.rule if bound == QEDConfig().lambda_max else f"{model.rule}@{bound:g}"

    @property
    def seed(self) -> int:
        return int(self.config["seed"])

    @property
    def train_length(self) -> int:
        return int(self.config["sequence"])

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        path = plain_or_packed(self.path / "metrics.jsonl")
        rows, problems = read_metrics(path) if path.exists() else ([], [])
        if problems:
            warnings.warn("\n".join(problems), stacklevel=2)
        return rows

    @property
    def validation_loss(self) -> float | None:
        found = [row["validation_loss"] for row in self.metrics if row.get("validation_loss") is not None]
        return found[-1] if found and self.complete else None

    @property
    def complete(self) -> bool:
        steps = -(-self.config["total_tokens"] // self.config["batch_tokens"])
        return bool(self.metrics) and self.metrics[-1]["step"] + 1 >= steps

    @cached_property
    def results(self) -> dict[str, Result]:
        return folder(self.path / "eval")

    @cached_property
    def strengths(self) -> dict[float, dict[str, Result]]:
        base = self.path / "strength"
        found = (
            {float(x.name): folder(x) for x in base.iterdir() if x.is_dir() and _number(x.name)}
            if base.is_dir()
            else {}
        )
        return dict(sorted(found.items()))

    @cached_property
    def mean_strength(self) -> dict[float, float]:
        """Mean λ of the sweep, by scale."""
        path = self.path / "strength" / "strength.json"
        found = json.loads(path.read_text())["mean_strength"] if path.exists() else {}
        return {float(scale): mean for scale, mean in found.items()}

    @cached_property
    def eigenvalues(self) -> dict[str, Any] | None:
        path = self.path / "eigenvalues.json"
        return json.loads(path.read_text()) if path.exists() else None


def _number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def runs(base: Path) -> list[Run]:
    """Folders of training runs under `base`, by arm as the paper lists them and by seed."""
    if not base.is_dir():
        raise ValueError(f"RUNS: expected a folder of runs, got {base}")
    found = [Run(x.parent) for x in sorted(base.glob("*/config.json"))]
    if not found:
        raise ValueError(f"RUNS: expected folders with a config.json in {base}, got none")
    seen: dict[tuple[str, int], Run] = {}
    for run in found:
        if (run.arm, run.seed) in seen:
            raise ValueError(f"RUNS: {run.path} and {seen[run.arm, run.seed].path} are the same arm and seed")
        seen[run.arm, run.seed] = run
    return found
