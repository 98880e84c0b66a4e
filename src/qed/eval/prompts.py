"""Prompts that a model can read. Those of needle tasks are drawn once and kept ("frozen"), those of recall tasks come
from their files.

A frozen set is three files of one name: .jsonl has the prompts and answers, .npz the prompts' tokens, and .json, which
is written last, says what decided them and has the sha256 of the other two. Whenever the set is used both are compared
with it, so that an edited prompt is noticed. A set without sha256, of an earlier version or of a run that was killed,
is drawn once more, which always gives the same for the same settings, and must be equal to what is there.
"""

from __future__ import annotations

import dataclasses
import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tokenizers import Tokenizer

from ..data import tokenization
from ..files import read_json, write_json
from .options import Options
from .records import digest, file_digest, numbered_lines, read_rows, write_lines, write_rows
from .task import NeedleTask, RecallTask, checked_golds
from .tasks import named, of_kind

NEEDLE_SAMPLES = 500  # unless --samples says otherwise


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """An example as a model reads it, and the answers that are right."""

    ids: list[int]
    text: str
    golds: tuple[str, ...]
    more: dict[str, Any]  # kept with the prediction


class FrozenPrompts:
    """The samples of a needle task at one length: what decides them, where they are kept, how they are drawn."""

    def __init__(self, task: NeedleTask, length: int, options: Options, tokenizer: Tokenizer, out: Path):
        if length < task.shortest:
            raise ValueError(f"--lengths: expected {task.shortest} or more, got {length}")
        self.task, self.length, self.options, self.tokenizer = task, length, options, tokenizer
        self.samples = NEEDLE_SAMPLES if options.samples is None else options.samples
        self.recent: dict[str, list[int]] = {}  # tokens of the last texts that were counted: a sample is one of them
        self.draws = task.draws(options)
        self.about: dict[str, Any] = {
            **{"task": task.name, "length": length, "samples": self.samples, "seed": options.seed},
            **{"tokenizer": tokenization.identity(tokenizer), "format": 1},
            **self.draws.about,
        }
        name = f"{task.name}-{length}-{digest(self.about)[:12]}.jsonl"
        self.path = (options.prompts or out / "prompts") / name

    def _count(self, texts: list[str]) -> list[int]:
        self.recent.clear()
        self.recent.update(zip(texts, _encoded(self.tokenizer, texts), strict=True))
        return [len(self.recent[text]) for text in texts]

    def draw(self, samples: int) -> Iterator[tuple[dict[str, Any], list[int]]]:
        """The first samples: of each a line of the .jsonl, and the prompt's tokens."""
        for sample in self.draws.samples(self.length, samples, self._count, self.options.seed):
            yield asdict(sample), self.recent[sample.prompt]

    @property
    def parts(self) -> tuple[Path, Path]:
        """The files of prompts and of their tokens."""
        return self.path, self.path.with_suffix(".npz")

    def verify(self) -> bool:
        """Whether the set is there, whole and as it was frozen. False if it has yet to be made or compared; a file that
        was edited raises ValueError."""
        if not self.path.with_suffix(".json").exists():
            return False
        kept = read_json(self.path.with_suffix(".json"), "what `qed eval` says about frozen prompts").get("sha256")
        if not isinstance(kept, dict) or not all(path.exists() for path in self.parts):
            return False
        for path in self.parts:
            now = file_digest(path)
            if now != kept.get(path.suffix):
                raise ValueError(
                    f"{path}: expected the prompts as they were frozen, with sha256 {kept.get(path.suffix)}, got "
                    f"{now}: the file was changed; remove it, {self.path.with_suffix('.json').name} and its results "
                    "to have it made anew"
                )
        return True

    def freeze(self, console: Console) -> None:
        """Draws all samples and writes them, or compares them with what is there."""
        ids: list[list[int]] = []

        def rows(samples: Iterable[tuple[dict[str, Any], list[int]]]) -> Iterator[dict[str, Any]]:
            for row, tokens in samples:
                ids.append(tokens)
                yield row

        with progress(console) as bar:
            shown = f"{self.task.name} {self.length}: prompts"
            drawn = rows(bar.track(self.draw(self.samples), total=self.samples, description=shown))
            if self.path.exists():
                self._compare(drawn)
            else:
                write_lines(self.path, drawn)
        tokens = self.path.with_suffix(".npz")
        if tokens.exists() and read_rows(tokens) != ids:
            raise ValueError(f"{tokens}: expected the tokens of the prompts in {self.path.name}, got others")
        if not tokens.exists():
            write_rows(tokens, ids)
        sums = {path.suffix: file_digest(path) for path in self.parts}
        write_json(self.path.with_suffix(".json"), self.about | {"sha256": sums})

    def _compare(self, drawn: Iterable[dict[str, Any]]) -> None:
        there = numbered_lines(self.path)
        for wanted in drawn:
            number, row = next(there, (None, None))
            if row != json.loads(json.dumps(wanted)):
                where = f"{self.path}:{number}" if number else f"{self.path}, at its end"
                raise ValueError(
                    f"{where}: expected the prompt that task, length and seed give, got another: the file was changed, "
                    "or is not whole; remove it and its results to have it made anew"
                )
        number, extra = next(there, (None, None))
        if extra is not None:
            raise ValueError(f"{self.path}:{number}: expected {self.samples} prompts, got more")


def check_needles(tasks: list[str], options: Options, tokenizer: Tokenizer) -> None:
    """Raises ValueError, before anything runs, unless words and essays are there and the shortest length has room.

    Args:
        tasks: names; those of other than needle tasks are not looked at.
        options: files and lengths.
        tokenizer: of the model that will be asked.
    """
    known, one = of_kind(NeedleTask), dataclasses.replace(options, samples=1)
    for task in tasks:
        if task in known:
            next(iter(FrozenPrompts(known[task], min(options.lengths), one, tokenizer, Path()).draw(1)))


def frozen(task: str, length: int, options: Options, tokenizer: Tokenizer, out: Path, console: Console) -> Path:
    """The file of a needle task's prompts, which is made unless it is there.

    Args:
        task: the name of a needle task.
        length: in tokens.
        options: what decides the prompts.
        tokenizer: of the model that will be asked.
        out: the folder of results, in which prompts are kept unless options name another folder.
        console: for the progress bar.
    """
    prompts = FrozenPrompts(named(task, NeedleTask), length, options, tokenizer, out)
    if not prompts.verify():
        prompts.freeze(console)
    return prompts.path


def needle_prompts(path: Path, tokenizer: Tokenizer, options: Options) -> Iterator[Prompt]:
    """The prompts of a frozen set.

    Args:
        path: the set's .jsonl.
        tokenizer: of the model that will be asked.
        options: whether prompts begin with the tokenizer's <s>.
    """
    tokens = read_rows(path.with_suffix(".npz"))
    rows = list(numbered_lines(path))
    if len(rows) != len(tokens):
        raise ValueError(f"{path}: expected as many prompts as in its .npz, {len(tokens)}, got {len(rows)}")
    for (number, row), ids in zip(rows, tokens, strict=True):
        missing = [name for name in ("prompt", "answer", "depth") if name not in row]
        if missing:
            raise ValueError(f"{path}:{number}: expected a prompt, its answer and depth, got no {missing[0]}")
        if row.get("tokens") != len(ids):
            raise ValueError(f"{path}:{number}: expected {row.get('tokens')} tokens in its .npz, got {len(ids)}")
        golds, more = checked_golds((row["answer"],), f"{path}:{number}"), {"depth": row["depth"]}
        if (place := row["prompt"].find(row["answer"])) >= 0:
            # Tokens from the needle to the end of the prompt, were all its characters spread evenly over its tokens.
            more["distance"] = round(len(ids) * (1 - place / len(row["prompt"])))
        more |= needle_and_question(row["prompt"], row["answer"])
        yield Prompt(ids=_with_bos(ids, tokenizer, options), text=row["prompt"], golds=golds, more=more)


def needle_and_question(prompt: str, answer: str) -> dict[str, str]:
    """What a reader of an answer wants to see of a prompt: the sentence that has it, and the question at the end.

    Of several sentences that have the answer, the one that shares most words with the question is the needle.
    """
    ends = [match.end() for match in re.finditer(r"(?<=[.!?])[ \n]+|\n", prompt)]
    last_line = prompt.rfind("\n") + 1
    begin = last_line or max(ends, default=0)
    question, words, needles = prompt[begin:], set(prompt[begin:].split()), []
    for match in re.finditer(re.escape(answer), prompt[:begin]):
        place = bisect_right(ends, match.start())
        sentence = prompt[ends[place - 1] if place else 0 : ends[place] if place < len(ends) else begin]
        needles.append(sentence.strip())
    found = {"question": question.strip()}
    return found | ({"needle": max(needles, key=lambda x: len(words & set(x.split())))} if needles else {})


def recall_prompts(task: RecallTask, tokenizer: Tokenizer, options: Options) -> tuple[list[Prompt], dict[str, Any]]:
    """The prompts of a recall task; and what is said of them: how many still have their gold, how many were cut.

    Args:
        task: whose file or data set is read.
        tokenizer: of the model that will be asked.
        options: file, variant and lengths.
    """
    rows, where = _numbered_rows(task, options)
    prompts = []
    golds, truncated, forms = 0, 0, dict.fromkeys(("as given", "cue added", "question"), 0)
    made = task.examples(rows, variant=options.variant, tokenizer=tokenizer, context=options.context, where=where)
    for example in islice(made, options.samples):
        ids, text = tokenizer.encode(example.prompt, add_special_tokens=False).ids, example.prompt
        if not ids:
            raise ValueError(f"{where}: expected text in every example, got none in that of {example.document}")
        limit = None if options.max_length is None else options.max_length - task.new_tokens
        if limit is not None and options.variant != "B" and len(ids) > limit:
            ids, truncated = ids[-limit:], truncated + 1
            text = tokenizer.decode(ids)
        golds += survives(text, example.golds)
        forms[example.form] += 1
        more = {"document": example.document, "form": example.form}
        prompts.append(Prompt(ids=_with_bos(ids, tokenizer, options), text=text, golds=example.golds, more=more))
    if not prompts:
        raise ValueError(f"{where}: expected examples, got none")
    log: dict[str, Any] = {"golds_in_prompt": golds, "truncated": truncated}
    log["forms"] = {k: v for k, v in forms.items() if v}
    if task.name not in options.data:
        log["dataset"] = where  # by which reports tell it from a file that only resembles it
    return prompts, log


def survives(prompt: str, golds: tuple[str, ...]) -> bool:
    """Whether there is anything to recall: a gold stands in the prompt."""
    return any(gold.lower() in prompt.lower() for gold in golds)


def _numbered_rows(task: RecallTask, options: Options) -> tuple[Iterable[tuple[int, dict[str, Any]]], str]:
    """The numbered rows of a task's file or data set, and its name."""
    path, name = options.data.get(task.name), task.dataset
    if path is not None:
        return numbered_lines(path), str(path)
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(
            f"--data: expected {task.name}=FILE, or the `data` extra to read {name}; got neither"
        ) from error
    try:
        return enumerate(load_dataset(name, split="validation"), 1), name
    except (OSError, ValueError, RuntimeError) as error:  # no network, or none that leads there
        raise ValueError(f"--data: expected {task.name}=FILE, or {name} from the hub; got neither: {error}") from error


def _encoded(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Tokens of texts, found on all cores."""
    return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def _with_bos(ids: list[int], tokenizer: Tokenizer, options: Options) -> list[int]:
    begin, _ = tokenization.ends(tokenizer)
    return [begin, *ids] if options.bos and begin is not None else ids


def progress(console: Console) -> Progress:
    """A bar that shows how many of how many are done, and the time that has passed and is left."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=console)
