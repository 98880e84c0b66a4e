"""Whether a tokenizer can express a task. Words that it does not know are lost, and no model can answer with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random

from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from ..data import practice, tokenization
from ..data.needles import NOISE, value
from ..files import read_json
from .options import Options
from .prompts import FrozenPrompts, recall_prompts
from .task import NeedleTask, RecallTask, Task
from .tasks import TASKS, named
from .tasks.niah import correct

EXAMPLES = 4  # of each task that are looked at
MANY = 0.1  # share of unknown words in prompts from which on it is said
PRACTICE = "what practice documents practise"
Example = tuple[tuple[str, ...], list[int]]  # answers that are right, and the tokens of the prompt


def warn(tasks: Iterable[str], options: Options, tokenizer: Tokenizer, console: Console) -> None:
    """Print a warning for every task that a tokenizer cannot express, before anything is done with it.

    Args:
        tasks: their names.
        options: files and lengths of the tasks.
        tokenizer: of the model that will be asked.
        console: where to print.
    """
    for name in tasks:
        _say(obstacle(TASKS[name], options, tokenizer), console)


def warn_of_practice(tokenizer: Tokenizer, console: Console) -> None:
    """Print a warning if a tokenizer cannot express the documents that practise the needle tasks."""
    _say(practice_obstacle(tokenizer), console)


def warn_of_corpus(folder: Path, console: Console) -> None:
    """Print a warning if the tokenizer of a corpus cannot express its practice documents, where it has some, or the
    needle task that models of such a tokenizer are asked. What is no corpus is refused where it is opened."""
    if not all((folder / name).is_file() for name in ("index.json", "tokenizer.json")):
        return
    tokenizer = tokenization.load(str(folder / "tokenizer.json"))
    asked = read_json(folder / "index.json", "what `qed prepare` finished").get("asked")
    if (isinstance(asked, dict) and "mix" in asked) or usual_task(tokenizer).name != "pairs":
        warn_of_practice(tokenizer, console)
    if usual_task(tokenizer).name == "pairs":
        warn(["pairs"], Options(), tokenizer, console)


def usual_task(tokenizer: Tokenizer) -> NeedleTask:
    """Return the needle task that a model of this tokenizer is asked first: `pairs` where every word is one token."""
    return named("pairs" if isinstance(tokenizer.model, WordLevel) else "niah_single_1", NeedleTask)


def _say(reason: str | None, console: Console) -> None:
    if reason is not None:
        console.print(f"warning: {reason}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def obstacle(task: Task, options: Options, tokenizer: Tokenizer) -> str | None:
    """Why models with a tokenizer cannot do a task, by the task's first examples; None where they can.

    Args:
        task: any; of those that are only measured nothing is asked.
        options: files and lengths of the task.
        tokenizer: of the models.
    """
    few = dataclasses.replace(options, samples=EXAMPLES)
    if isinstance(task, NeedleTask):
        drawn = FrozenPrompts(task, min(options.lengths), few, tokenizer, Path()).draw(EXAMPLES)
        examples: list[Example] = [((row["answer"],), ids) for row, ids in drawn]
    elif isinstance(task, RecallTask):
        examples = [(prompt.golds, prompt.ids) for prompt in recall_prompts(task, tokenizer, few)[0]]
    else:
        return None
    return example_obstacle(task.name, task.correct, examples, tokenizer)


def practice_obstacle(tokenizer: Tokenizer) -> str | None:
    """Why models with a tokenizer cannot learn from practice documents; None where they can."""
    examples: list[Example] = []
    for i in range(EXAMPLES):
        draw = Random(f"expressing/{i}")
        text = practice.document(draw, [NOISE], NOISE.lower().split())
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        examples += [((value(kind, draw),), ids) for kind in ("numbers", "uuids")]
    return example_obstacle(PRACTICE, correct, examples, tokenizer)


def example_obstacle(
    name: str, right: Callable[[str, str], bool], examples: list[Example], tokenizer: Tokenizer
) -> str | None:
    """Why none of the answers to some examples can be given, or many of their words cannot be read.

    Args:
        name: what the examples are of.
        right: whether a prediction has an answer.
        examples: of each the answers, none where nothing is generated, and the tokens that are read.
        tokenizer: of the models.
    """
    for golds, _ in examples:
        if not golds:
            continue
        spelled = [tokenizer.encode(gold, add_special_tokens=False).ids for gold in golds]
        if not any(right(tokenizer.decode(ids), gold) for ids, gold in zip(spelled, golds, strict=True)):
            becomes = tokenizer.decode(spelled[0], skip_special_tokens=False)
            return (
                f"{name} cannot be answered with this tokenizer: the answer {golds[0]!r} becomes {becomes!r}, so "
                "that nothing a model says is counted as right"
            )
    tokens = [token for _, ids in examples for token in ids]
    unknown = tokenizer.token_to_id(getattr(tokenizer.model, "unk_token", None) or "")
    share = tokens.count(unknown) / len(tokens) if unknown is not None else 0.0
    if share > MANY:
        return f"{name} is hardly to be read with this tokenizer: it does not know {share:.0%} of the words"
    return None
