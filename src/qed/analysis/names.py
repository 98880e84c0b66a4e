"""How arms, tasks, lengths and data sets are called in every table, figure and sentence."""

from __future__ import annotations

from ..eval.task import NeedleTask, RecallTask
from ..eval.tasks import TASKS, of_kind
from ..recipes.paper import ARMS
from .results import Result

NEEDLES, RECALL = tuple(of_kind(NeedleTask)), of_kind(RecallTask)
TITLES = {name: task.title for name, task in TASKS.items()}


def name_of(arm: str) -> str:
    """The paper's name of an arm. An arm that the paper does not have keeps its own name."""
    return ARMS.get(arm, arm)


def length_title(tokens: int) -> str:
    """A length in tokens, in units of 1024 where it is a multiple of that: 4096 is "4K", 768 is "768"."""
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


def recall_title(name: str, results: list[Result]) -> str:
    """The title of a recall task's results.

    It is the data set's own name only where every result says that it was read from there. A user's file is in that
    data set's style, or made of questions.
    """
    task, _, variant = name.partition("-")
    if {result.about.get("dataset") for result in results} == {RECALL[task].dataset}:
        return f"{TITLES[task]} ({variant})"
    forms = {form for result in results for form in result.about.get("forms", ())}
    return f"{TITLES[task]} questions ({variant})" if forms == {"question"} else f"{TITLES[task]}-style ({variant})"


def result_title(name: str, results: list[Result]) -> str:
    """The title of a result by its name: a needle task with its length, or a recall task with its data set."""
    task, _, length = name.partition("-")
    return f"{TITLES[task]} {length_title(int(length))}" if task in NEEDLES else recall_title(name, results)
