"""What a set of runs has: its arms, seeds, tasks and lengths, and which of its results may be counted together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..recipes.paper import ARMS
from .names import RECALL, name_of, result_title
from .results import Result, Run, comparable, same_examples

# What two trainings must share for their numbers to be comparable, in words.
SETUP = {
    "total_tokens": "training tokens",
    "sequence": "tokens in a row of training",
    "batch_tokens": "tokens in a batch",
    "num_hidden_layers": "layers",
    "hidden_size": "channels",
    "num_heads": "heads",
    "head_dim": "channels in a head",
}


def setup(run: Run) -> dict[str, Any]:
    """What a run was trained with, by the names of SETUP; None where its configuration does not say."""
    everything = run.config["model"] | {name: x for name, x in run.config.items() if name != "model"}
    return {name: everything.get(name) for name in SETUP}


def not_comparable(runs: list[Run]) -> dict[Path, str]:
    """Runs that differ from the others in more than arm and seed, or are not finished: the reason, by their path."""
    usual = dict(Counter(tuple(setup(run).items()) for run in runs).most_common(1)[0][0])
    reasons = {}
    for run in runs:
        own = setup(run)
        said = [
            f"{own[name]:,} {SETUP[name]} instead of {x:,}"
            for name, x in usual.items()
            if own[name] != x and x and own[name]
        ]
        said += [] if run.complete else ["the training is not finished"]
        if said:
            reasons[run.path] = "; ".join(said)
    return reasons


def by_arm_and_seed(runs: list[Run]) -> dict[tuple[str, int], Run]:
    """The runs by their arm and seed, of which no two share both."""
    return {(run.arm, run.seed): run for run in runs}


def arms_of(runs: list[Run]) -> list[str]:
    """The arms of these runs: the paper's in its order, then the others by name."""
    present = {run.arm for run in runs}
    return [arm for arm in ARMS if arm in present] + sorted(present - ARMS.keys())


def seeds_of(runs: list[Run]) -> list[int]:
    """The seeds of these runs, in order."""
    return sorted({run.seed for run in runs})


def results_of(runs: list[Run], name: str) -> list[Result]:
    """The results of this name, such as "niah_single_1-4096", of all runs that have one."""
    return [run.results[name] for run in runs if name in run.results]


def needle_lengths(runs: list[Run], task: str) -> list[int]:
    """The nominal lengths at which any of these runs has a result of a needle task."""
    names = {name for run in runs for name in run.results if name.startswith(f"{task}-")}
    return sorted(int(name.rsplit("-", 1)[1]) for name in names)


def past_training(runs: list[Run], task: str) -> list[int]:
    """Nominal lengths at which every prompt is longer than the training length of every run that was asked."""
    asked = {n: [run for run in runs if f"{task}-{n}" in run.results] for n in needle_lengths(runs, task)}
    return [n for n, some in asked.items() if all(run.is_past_training(run.results[f"{task}-{n}"]) for run in some)]


def longest_within_training(run: Run, task: str) -> Result | None:
    """The result of the longest prompts none of which has more tokens than a row of training; None if there is none."""
    by_length = [run.results[f"{task}-{n}"] for n in needle_lengths([run], task)]
    fitting = [result for result in by_length if result.tokens[-1] <= run.train_length]
    return fitting[-1] if fitting else None


def distinct(results: Iterable[tuple[Result, ...]]) -> list[tuple[Result, ...]]:
    """Each set of examples once: S-NIAH-2 and -3 are sized in steps of 500 words, and two lengths may share theirs."""
    by_examples: dict[frozenset[tuple[int, int, str]], tuple[Result, ...]] = {}
    for same_length in results:
        by_examples.setdefault(same_length[0].examples, same_length)
    return list(by_examples.values())


def main_task(runs: list[Run]) -> str:
    """The needle task that is judged: the paper's, unless the runs only have the one for tiny models."""
    return "pairs" if needle_lengths(runs, "pairs") and not needle_lengths(runs, "niah_single_1") else "niah_single_1"


def recall_names(runs: list[Run]) -> list[str]:
    """Names of results of recall tasks. The variant is part of the name, so that no column mixes two."""
    return sorted({name for run in runs for name in run.results if name.split("-")[0] in RECALL})


def all_comparable(runs: list[Run]) -> None:
    """Raise ValueError unless all results of the same name were made from the same examples."""
    for name in sorted({name for run in runs for name in run.results}):
        first, *others = same_name = results_of(runs, name)
        comparable(same_name)
        for other in others:
            if "correct" in other.result:
                same_examples(first, other)


def empty_answers(runs: list[Run]) -> list[str]:
    """Sentences about results that have not one answer with any text, or answers after numbers that were not finite:
    they count as they are, but a reader should know."""
    said = []
    for run in runs:
        scales = {1.0: run.results} | {scale: x for scale, x in run.strengths.items() if scale != 1.0}
        for scale, name, result in ((scale, name, x) for scale, some in scales.items() for name, x in some.items()):
            answers = [row.get("prediction") for row in result.rows] if "correct" in result.result else []
            if not answers:
                continue
            title = f"{name_of(run.arm)} seed {run.seed} at s = {scale:g}, {result_title(name, [result])}"
            if count := result.result.get("not_finite"):
                said.append(
                    f"{title}: the model's numbers were not finite in {count} of {len(answers)} answers, which say "
                    "nothing and count as they are."
                )
            elif all(isinstance(x, str) and not x.strip() for x in answers):
                said.append(
                    f"{title}: all {len(answers)} answers are empty, and count as wrong. A model says nothing where "
                    "its logits are not finite, or where it ends its text at once."
                )
    return said
