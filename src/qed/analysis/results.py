"""Result files read back: what was evaluated, and example by example what was right.

    RUNS/NAME/config.json, metrics.jsonl       written by `qed train`
    RUNS/NAME/eval/TASK-….json, .jsonl         written by `qed eval --out RUNS/NAME/eval`
    RUNS/NAME/strength/S/TASK-….json, .jsonl   written by `qed strength --out RUNS/NAME/strength`
    RUNS/NAME/eigenvalues.json                 written by `qed eigenvalues --out RUNS/NAME/eigenvalues.json`

Without a folder for S = 1, the results in eval/ stand in for it. `qed reproduce --collect` packs answers and
eigenvalues (`qed.eval.packing`); packed files are read like plain ones.

What is not there is missing, never zero. What is there but not finished, damaged or contradicts itself is missing too,
and a run's `problems` name it: one such file never keeps the others from being reported.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ..eval.packing import unpacked
from ..eval.records import by_index
from ..eval.task import MeasuredTask, NeedleTask
from ..eval.tasks import TASKS
from ..files import read_json
from ..recipes import usual_theta
from ..recipes.arms import Arm
from ..train.metrics import read_metrics
from .strays import is_number, strays

HARNESS = "lm-eval"  # what names of lm-eval's own results begin with, which no table has
# Fields that two results must share to stand in one table.
SHARED = ("task", "length", "tokenizer", "prompts", "variant", "sizing", "context", "max_length", "bos")


@dataclass(frozen=True)
class Result:
    """One task (at one length) of one checkpoint at one strength."""

    path: Path  # the summary, a JSON file
    packed: tuple[dict[str, Any], list[dict[str, Any]]] | None = field(default=None, compare=False, repr=False)

    @cached_property
    def whole(self) -> dict[str, Any]:
        """All of the summary; ValueError where it is not one of `qed eval`."""
        summary = self.packed[0] if self.packed else read_json(self.path, "a result of `qed eval`")
        if not isinstance(summary.get("about"), dict) or not isinstance(summary.get("result", {}), dict):
            raise ValueError(f"{self.path}: expected a result of `qed eval`, got something else")
        return summary

    @property
    def about(self) -> dict[str, Any]:
        """What was evaluated: task, length, tokenizer, prompts and so on."""
        return dict(self.whole["about"])

    @property
    def finished(self) -> bool:
        """Whether the evaluation came to its end."""
        return "result" in self.whole

    @property
    def result(self) -> dict[str, Any]:
        """What came out: counts and accuracy, or losses by position."""
        return dict(self.whole["result"])

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """One row per example, as the evaluation wrote them."""
        if self.packed:
            return self.packed[1]
        return list(by_index(plain_or_packed(self.path.with_suffix(".jsonl"))).values())

    @cached_property
    def right(self) -> dict[int, bool]:
        """Whether each example is right, by its index."""
        return {row["index"]: bool(row["correct"]) for row in self.rows}

    @cached_property
    def first_right(self) -> dict[int, bool] | None:
        """Whether the first value generated is the answer, by index; None where predictions are not kept, or the task
        does not tell a first one."""
        task = TASKS.get(str(self.about.get("task")))
        judge = task.first_correct if isinstance(task, NeedleTask) else None
        if judge is None or not all(isinstance(row.get(x), str) for row in self.rows for x in ("prediction", "gold")):
            return None
        return {row["index"]: judge(row["prediction"], row["gold"]) for row in self.rows}

    @cached_property
    def tokens(self) -> list[int]:
        """Tokens of the prompts, the shortest first. The length in a task's name is nominal: prompts are shorter."""
        return sorted(row["tokens"] for row in self.rows)

    @cached_property
    def examples(self) -> frozenset[tuple[int, int, str]]:
        """What tells two sets of examples apart: index, tokens and answer of each."""
        return frozenset((row["index"], row.get("tokens", 0), str(row.get("gold"))) for row in self.rows)

    def check(self) -> None:
        """Raise ValueError for a summary that belongs to another name or contradicts its own lines."""
        if not self.finished:
            raise ValueError(f"{self.path}: not finished")
        task, rest = self.about.get("task"), self.path.stem.partition("-")[2]
        named = self.path.stem.partition("-")[0]
        row = TASKS.get(named)
        if named != task or (isinstance(row, NeedleTask) and rest != str(self.about.get("length"))):
            raise ValueError(f"{self.path}: expected a result of {self.path.stem}, got one of {task!r}")
        if isinstance(row, MeasuredTask):
            try:
                row.check(self.result)
            except ValueError as error:
                raise ValueError(f"{self.path}: {error}") from error
        elif row is not None:
            self._check_counts()

    def _check_counts(self) -> None:
        samples, correct = self.result.get("samples"), self.result.get("correct")
        if type(samples) is not int or type(correct) is not int or not 0 <= correct <= samples or samples < 1:
            raise ValueError(f"{self.path}: expected 0 ≤ correct ≤ samples, got {correct!r} of {samples!r}")
        if abs(self.result.get("accuracy", -1.0) - correct / samples) > 1e-9:
            said = self.result.get("accuracy")
            raise ValueError(f"{self.path}: expected an accuracy of {correct} in {samples}, got {said!r}")
        path, right = plain_or_packed(self.path.with_suffix(".jsonl")), self.right
        if len(right) != samples:
            raise ValueError(f"{path}: expected {samples} lines, got {len(right)}")
        if sum(right.values()) != correct:
            raise ValueError(f"{path}: expected {correct} correct lines, got {sum(right.values())}")
        for row in self.rows:
            if type(row.get("tokens")) is not int:
                example, said = row["index"], row.get("tokens")
                raise ValueError(f"{path}: expected the tokens of a prompt in every line, got {said!r} in {example}")


def plain_or_packed(path: Path) -> Path:
    """The file itself, or the compressed file (.xz) that stands in for it."""
    packed = path.with_name(path.name + ".xz")
    return packed if packed.exists() and not path.exists() else path


def comparable(results: list[Result]) -> None:
    """Raise ValueError for results of different examples, or of the same ones asked in different ways."""
    for other in results[1:]:
        first = results[0]
        for name in SHARED:
            a, b = first.about.get(name), other.about.get(name)
            if a != b:
                raise ValueError(f"not in one table: {name} is {a!r} in {first.path}, {name} is {b!r} in {other.path}")


def same_examples(first: Result, second: Result) -> None:
    """Raise ValueError for two results whose lines are not of the same prompts, as far as the lines tell."""
    if first.right.keys() != second.right.keys():
        raise ValueError(f"not in one table: examples of {first.path} and {second.path} are not the same")
    others = {row["index"]: row for row in second.rows}
    for row in first.rows:
        for name in ("prompt_sha256", "gold"):
            mine, theirs = row.get(name), others[row["index"]].get(name)
            if mine is not None and theirs is not None and mine != theirs:
                where = f"example {row['index']} of {first.path} and {second.path}"
                raise ValueError(f"not in one table: {where} differ in {name}, {mine!r} and {theirs!r}")


def discordant(first: Result, second: Result) -> tuple[int, int, int]:
    """How many examples are right in the first alone, how many in the second alone, and how many there are."""
    comparable([first, second])
    same_examples(first, second)
    pairs = [(first.right[i], second.right[i]) for i in first.right]
    return sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs), len(pairs)


def folder(path: Path, problems: list[str], strength: float) -> dict[str, Result]:
    """The finished results of a folder by name, such as "niah_single_1-4096".

    Args:
        path: the folder.
        problems: why other results are left out is appended to it.
        strength: the factor s on λ with which all results of the folder were made.
    """
    if path.exists() and not path.is_dir():
        problems.append(f"{path}: expected a folder of results, got a file")
    try:
        packed = {name: Result(path / f"{name}.json", x) for name, x in unpacked(path).items()}
    except ValueError as error:
        problems.append(str(error))
        packed = {}
    plain = {x.stem: Result(x) for x in path.glob("*.json") if x.stem.partition("-")[0] in TASKS}
    for x in sorted(path.glob("*.json")):
        if x.stem not in plain and not x.name.startswith(HARNESS):
            problems.append(f"{x}: expected a result of `qed eval`, named after its task, got another file")
    for name in sorted(packed.keys() & plain.keys()):
        problems.append(f"{path}: {name} is there twice, packed and by itself, and neither is used")
        del packed[name], plain[name]
    finished = {}
    for name, result in sorted((packed | plain).items()):
        try:
            result.check()
            made = result.about.get("strength", strength)
            if not is_number(made) or f"{made:g}" != f"{strength:g}":  # as names of folders have it
                raise ValueError(f"{result.path}: expected a result with s = {strength:g}, got one with s = {made}")
        except ValueError as error:
            problems.append(str(error))
        else:
            finished[name] = result
    return finished


@dataclass(frozen=True)
class Run:
    """One training run and everything that was measured of it."""

    path: Path
    _problems: list[str] = field(default_factory=list, compare=False, repr=False)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The configuration of `qed train`; ValueError where it is damaged, since nothing else says what the run is."""
        path = self.path / "config.json"
        config = read_json(path, "the configuration of a run").get("config")
        sizes = ("seed", "sequence", "total_tokens", "batch_tokens")
        if not isinstance(config, dict) or not isinstance(config.get("model"), dict):
            raise ValueError(f"{path}: expected the configuration of a run, got something else")
        for name in sizes:
            if type(config.get(name)) is not int or config[name] < (name != "seed"):
                raise ValueError(f"{path}: expected a whole number for {name}, got {config.get(name)!r}")
        return config

    @cached_property
    def arm(self) -> str:
        """The name of the arm: the rule, and what differs from the recipe."""
        try:
            return Arm.of(self.config, usual_theta(self.config)).name
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            raise ValueError(f"{self.path / 'config.json'}: expected a model of this package, got: {error}") from error

    @property
    def seed(self) -> int:
        """The training seed."""
        return int(self.config["seed"])

    @property
    def train_length(self) -> int:
        """The tokens of a row of training."""
        return int(self.config["sequence"])

    def is_past_training(self, result: Result) -> bool:
        """Whether even the shortest prompt has more tokens than a row of this run's training. The nominal length does
        not tell: S-NIAH-2 at 768 has prompts of some 90 tokens, because essays come in steps of 500 words."""
        return result.tokens[0] > self.train_length

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl, one per step that was logged."""
        path = plain_or_packed(self.path / "metrics.jsonl")
        rows, problems = read_metrics(path) if path.exists() else ([], [])
        self._problems.extend(problems)
        return rows

    @property
    def validation_loss(self) -> float | None:
        """The last validation loss in nats; None while the training is not complete."""
        losses = [row["validation_loss"] for row in self.metrics if row.get("validation_loss") is not None]
        return losses[-1] if losses and self.complete else None

    @property
    def complete(self) -> bool:
        """Whether the training has done all of its steps."""
        steps = -(-self.config["total_tokens"] // self.config["batch_tokens"])
        return bool(self.metrics) and self.metrics[-1]["step"] + 1 >= steps

    @cached_property
    def results(self) -> dict[str, Result]:
        """The finished results of the evaluation, by name."""
        return folder(self.path / "eval", self._problems, 1.0)

    @cached_property
    def strengths(self) -> dict[float, dict[str, Result]]:
        """The finished results with λ scaled at inference, by scale s and name. Those at s = 1 are among them."""
        base = self.path / "strength"
        if base.exists() and not base.is_dir():
            self._problems.append(f"{base}: expected a folder for each scale of λ, got a file")
        scales = (
            {
                float(x.name): folder(x, self._problems, float(x.name))
                for x in base.iterdir()
                if x.is_dir() and is_number(x.name)
            }
            if base.is_dir()
            else {}
        )
        if scales and 1.0 not in scales:  # `qed reproduce` does not do again what `eval` has done
            prompts = {(name, x.about.get("prompts")) for results in scales.values() for name, x in results.items()}
            scales[1.0] = {name: x for name, x in self.results.items() if (name, x.about.get("prompts")) in prompts}
        if scales and not scales[1.0]:
            self._problems.append(f"{base}: no finished result at s = 1, so that there is nothing to compare with")
        return dict(sorted(scales.items()))

    @cached_property
    def mean_strength(self) -> dict[float, float]:
        """The mean λ over layers and heads at each scale of the sweep."""
        path = self.path / "strength" / "strength.json"
        if not path.exists():
            return {}
        try:
            means = read_json(path, "a summary of `qed strength`").get("mean_strength")
            if not isinstance(means, dict) or not all(is_number(x) for pair in means.items() for x in pair):
                raise ValueError(f"{path}: expected the mean λ of every scale, got {means!r:.60}")
        except ValueError as error:
            self._problems.append(str(error))
            return {}
        return {float(scale): float(mean) for scale, mean in means.items()}

    @cached_property
    def eigenvalues(self) -> dict[str, Any] | None:
        """What `qed eigenvalues` measured; None where it is not there or damaged."""
        path = plain_or_packed(self.path / "eigenvalues.json")
        if not path.exists():
            return None
        try:
            measured = read_json(path, "a result of `qed eigenvalues`")
            _check_eigenvalues(measured, path)
        except ValueError as error:
            self._problems.append(str(error))
            return None
        return measured

    @cached_property
    def problems(self) -> list[str]:
        """The files that are there but are not used, each with the reason."""
        for read in (self.metrics, self.results, self.strengths, self.mean_strength, self.eigenvalues):
            del read  # reading a file is what finds its problems
        return self._problems


def _check_eigenvalues(measured: dict[str, Any], path: Path) -> None:
    """Raise ValueError unless everything is there that tables and figures take from it."""
    try:
        everything, histogram = measured["all"], measured["eigenvalue_histogram"]
        for name in ("eigenvalue", "rho", "outside", *(x for x in ("change", "correction") if x in everything)):
            float(everything[name]["mean"])
            for q in ("0.0", "0.01", "0.5", "0.99", "1.0") if name == "eigenvalue" else ("1.0",):
                float(everything[name]["quantiles"][q])
        counted = sum(sum(x) for x in histogram["counts"].values())
        whole = all(len(x) == len(histogram["edges"]) - 1 for x in histogram["counts"].values())
        samples = everything["eigenvalue"]["samples"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path}: expected a result of `qed eigenvalues`, got one without {error}") from error
    if not whole or type(samples) is not int or samples < 1:
        raise ValueError(f"{path}: expected a histogram of {samples!r} samples, got one of {counted}")


# A folder without a configuration was going to be a run if it has one of these.
TRACES = ("metrics.jsonl", "stages.json", "checkpoints", "export", "eval", "strength", "eigenvalues.json")


def _candidates(base: Path) -> list[Path]:
    """The folders that may be runs: that of a run itself, or all in a folder of runs."""
    return [base] if (base / "config.json").exists() else sorted(x for x in base.iterdir() if x.is_dir())


def survey(*bases: Path) -> tuple[list[Run], list[str]]:
    """The training runs in these folders, ordered by name within each, and what is missing from them, in words."""
    for base in bases:
        if not base.is_dir():
            raise ValueError(f"RUNS: expected a folder of runs, got {base}")
    readable: list[Run] = []
    problems: list[str] = []
    named: set[Path] = set()
    for path in (path for base in bases for path in _candidates(base)):
        run = Run(path)
        if not (path / "config.json").exists():
            if not any(path.iterdir()) or any((path / name).exists() for name in TRACES):
                problems.append(f"{path}: no config.json, so that it is not known what was trained")
                named.add(path)
            continue
        named.add(path)
        try:
            run.arm  # noqa: B018  # raises where the configuration is damaged
        except ValueError as error:
            problems.append(str(error))
        else:
            readable.append(run)
    problems += [said for base in bases for said in strays(base, named)]
    if not readable:
        said = f"; {problems[0]}" if problems else ""
        where = " and ".join(map(str, bases))
        raise ValueError(f"RUNS: expected folders with a config.json in {where}, got none{said}")
    seen: dict[tuple[str, int], Run] = {}
    for run in readable:
        if (run.arm, run.seed) in seen:
            raise ValueError(f"RUNS: {run.path} and {seen[run.arm, run.seed].path} are the same arm and seed")
        seen[run.arm, run.seed] = run
    return readable, problems + [problem for run in readable for problem in run.problems]


def runs(base: Path) -> list[Run]:
    """The training runs in a folder that can be reported."""
    return survey(base)[0]
