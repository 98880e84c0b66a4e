"""Whether a tokenizer can express a task. Words that it does not know are lost, and no model can answer with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from tokenizers import Tokenizer

from .options import Options
from .prompts import FrozenPrompts, recall_prompts
from .task import NeedleTask, RecallTask, Task
from .tasks import TASKS

EXAMPLES = 4  # of each task that are looked at
MANY = 0.1  # share of unknown words in prompts from which on it is said


def warn(tasks: Iterable[str], options: Options, tokenizer: Tokenizer, console: Console) -> None:
    """Print a warning for every task that a tokenizer cannot express, before anything is done with it.

    Args:
        tasks: their names.
        options: files and lengths of the tasks.
        tokenizer: of the model that will be asked.
        console: where to print.
    """
    for name in tasks:
        reason = obstacle(TASKS[name], options, tokenizer)
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
        examples: list[tuple[tuple[str, ...], list[int]]] = [((row["answer"],), ids) for row, ids in drawn]
    elif isinstance(task, RecallTask):
        examples = [(prompt.golds, prompt.ids) for prompt in recall_prompts(task, tokenizer, few)[0]]
    else:
        return None
    for golds, _ in examples:
        spelled = [tokenizer.encode(gold, add_special_tokens=False).ids for gold in golds]
        if not any(task.correct(tokenizer.decode(ids), gold) for ids, gold in zip(spelled, golds, strict=True)):
            becomes = tokenizer.decode(spelled[0], skip_special_tokens=False)
            return (
                f"{task.name} cannot be answered with this tokenizer: the answer {golds[0]!r} becomes {becomes!r}, so "
                "that nothing a model says is counted as right"
            )
    tokens = [token for _, ids in examples for token in ids]
    unknown = tokenizer.token_to_id(getattr(tokenizer.model, "unk_token", None) or "")
    share = tokens.count(unknown) / len(tokens) if unknown is not None else 0.0
    if share > MANY:
        return f"{task.name} is hardly to be read with this tokenizer: it does not know {share:.0%} of the words"
    return None
