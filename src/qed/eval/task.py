"""What a task is. Each is one row in one file under `tasks/`, and all else reads the table that these rows make.

| kind | its examples | its result | results |
|---|---|---|---|
| `NeedleTask` | drawn from a seed, and frozen before any model reads them | share of right answers | one a length |
| `RecallTask` | read from a file of --data, or from a data set of the hub | share of right answers | one a variant |
| `MeasuredTask` | its own | whatever it measures in the model | one |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `qed --help` lists the tasks, and does not wait for transformers to be imported
    from ..model.causal_lm import QEDForCausalLM
    from .options import Options

Judge = Callable[[str, str], bool]  # whether a prediction has the answer
Count = Callable[[list[str]], list[int]]  # how many tokens texts are


def score_rows(name: str, result: dict[str, Any]) -> list[tuple[str, ...]]:
    """The row of a result that counts right answers."""
    median = str(result["tokens"]["median"])
    return [(name, f"{result['accuracy']:.1%}", str(result["samples"]), median, f"{result['seconds']:.1f}")]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What all tasks have.

    Attributes:
        name: what --task calls it; names of result files begin with it, so that it has no hyphen.
        title: what the tables and figures of a report call it.
        inputs: the options that name files it reads, of "words", "essays" and "data".
        columns: of its table in `qed eval`; tasks with the same columns share a table.
        rows: the rows of that table for a result, given its name.
    """

    name: str
    title: str
    inputs: tuple[str, ...] = ()
    columns: tuple[str, ...] = ("", "correct", "of", "prompt tokens", "seconds")
    rows: Callable[[str, dict[str, Any]], list[tuple[str, ...]]] = score_rows

    def __post_init__(self) -> None:
        if not self.name or "-" in self.name:
            raise ValueError(f"name of a task: expected one without a hyphen, got {self.name!r}")
        unknown = sorted(set(self.inputs) - {"words", "essays", "data"})
        if unknown:
            raise ValueError(f"inputs of {self.name}: expected some of words, essays, data, got {unknown[0]!r}")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """An example of a needle task, as it is frozen."""

    prompt: str
    answer: str
    tokens: int  # of the prompt, without any that the tokenizer would add
    depth: float  # of the needle asked for, per cent of the haystack


@dataclass(frozen=True, kw_only=True)
class Draws:
    """How a needle task's samples are drawn, once its files are read.

    Attributes:
        samples: of a length in tokens, a number of samples, a count of tokens and a seed, the samples. The same
            arguments give the same samples, of which fewer are the first ones of more, and no prompt with its new
            tokens is longer than the length.
        about: what decides the samples besides task, length, number, seed and tokenizer.
    """

    samples: Callable[[int, int, Count, int], Iterator[Sample]]
    about: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class NeedleTask(Task):
    """A text of a given length, and a question about something hidden in it.

    Attributes:
        draws: reads the files that options name, and says how samples are drawn.
        shortest: the least length, in tokens, that it can be asked at.
        new_tokens: how many are generated after a prompt.
        correct: whether a prediction has the answer.
        first_correct: the same, but for the first value that was generated alone; None where that cannot be told.
    """

    draws: Callable[[Options], Draws]
    shortest: int
    new_tokens: int
    correct: Judge
    first_correct: Judge | None = None


@dataclass(frozen=True, kw_only=True)
class Example:
    """An example of a recall task. It has one answer or several, any of which is right."""

    prompt: str
    golds: tuple[str, ...]
    form: str  # "as given", "cue added" or "question"
    document: str  # examples of one document are not independent


@dataclass(frozen=True, kw_only=True)
class RecallTask(Task):
    """Texts from a file, at the end of which something that stood in them is asked for.

    Attributes:
        dataset: the name on the hub of the data set that is read where --data has no file.
        examples: of numbered rows of the file, the examples; variant, tokenizer, context and where are given by name
            as `recall.examples` takes them.
        new_tokens: how many are generated after a prompt.
        correct: whether a prediction has the answer.
    """

    inputs: tuple[str, ...] = ("data",)
    dataset: str
    examples: Callable[..., Iterator[Example]]
    new_tokens: int
    correct: Judge


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What a measured task is going to do, once everything it needs was found to be there.

    Attributes:
        about: what decides the result besides the task, the checkpoint and how it is run.
        steps: how many steps it has, for a progress bar.
        run: measures, calling the function it is given with the number of steps done, and returns the result.
        suffix: what names of its result files have after the task's name and a hyphen, if anything.
    """

    about: dict[str, Any]
    steps: int
    run: Callable[[Callable[[int], None]], dict[str, Any]]
    suffix: str = ""


@dataclass(frozen=True, kw_only=True)
class MeasuredTask(Task):
    """Something that is measured in a model without letting it generate.

    Attributes:
        prepare: of a model, options and the sha256 of its tokenizer, what is going to be measured; whatever is wrong
            with files or options raises here, before anything runs.
        check: raises ValueError if something that was read from a file is not a result of this task.
    """

    prepare: Callable[[QEDForCausalLM, Options, str], Measurement]
    check: Callable[[dict[str, Any]], None] = lambda result: None


def checked_golds(golds: Iterable[Any], where: str) -> tuple[str, ...]:
    """Golds with something to be said: an empty one stands in any prediction, and would count all as right."""
    checked = tuple(golds)
    if not checked:
        raise ValueError(f"{where}: expected an answer, got none")
    for gold in checked:
        if not isinstance(gold, str) or not gold.strip():
            raise ValueError(f"{where}: expected an answer with at least one character, got {gold!r}")
    return checked
