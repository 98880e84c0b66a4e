"""Examples ready to be read: needle tasks' are drawn once and kept ("frozen"), recall tasks' come from their files.

A frozen set is three files of one name: .jsonl has the prompts and answers, .npz the prompts' tokens, and .json, which
is written last, says what decided them and has the sha256 of the other two. Whenever the set is used both are compared
with it, so that an edited prompt is noticed. A set without sha256, of an earlier version or of a run that was killed,
is drawn once more, which the same settings always do alike, and must be what is there.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tokenizers import Tokenizer

from ..data import tokenization
from ..files import read_json, write_json
from . import keys, niah, pairs, recall
from .records import (
    digest,
    file_digest,
    numbered_lines,
    read_rows,
    text_digest,
    write_lines,
    write_rows,
)

NEEDLE_SAMPLES = 500
NEEDLES = (*niah.TASKS, pairs.TASK)  # tasks that have lengths


@dataclass(frozen=True, kw_only=True)
class Options:
    """What decides which examples there are and what counts as their answer."""

    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384, 32768)
    samples: int | None = None  # None: 500 of needle tasks, all of others, 64 rows for `positions`
    seed: int = 42
    sizing: str = "linear"
    words: Path | None = None
    essays: Path | None = None
    data: dict[str, Path] = field(default_factory=dict)
    variant: str = "A1"
    context: int = 2048  # of variant B
    max_length: int | None = None  # of variants A: longer prompts lose their beginning
    bos: bool = True  # where the tokenizer has one
    batch: int = 64
    strength: float = 1.0
    prompts: Path | None = None  # where frozen prompts are kept, if not with the results

    def __post_init__(self) -> None:
        if not self.lengths:
            raise ValueError("--lengths: expected one or more, got none")
        if self.samples is not None and self.samples < 1:
            raise ValueError(f"--samples: expected 1 or more, got {self.samples}")
        if self.sizing not in niah.SIZINGS:
            raise ValueError(f"--sizing: expected one of {', '.join(niah.SIZINGS)}, got {self.sizing!r}")
        if self.variant not in recall.VARIANTS:
            raise ValueError(f"--variant: expected one of {', '.join(recall.VARIANTS)}, got {self.variant!r}")


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """An example ready to be read."""

    ids: list[int]
    text: str
    golds: tuple[str, ...]
    more: dict[str, Any]  # kept with the prediction


class Needles:
    """The samples of a needle task at one length: what decides them, where they are kept, how they are drawn."""

    def __init__(self, task: str, length: int, options: Options, tokenizer: Tokenizer, out: Path):
        least = pairs.SHORTEST if task == pairs.TASK else niah.SHORTEST
        if length < least:
            raise ValueError(f"--lengths: expected {least} or more, got {length}")
        self.task, self.length, self.options, self.tokenizer = task, length, options, tokenizer
        self.samples = NEEDLE_SAMPLES if options.samples is None else options.samples
        self.recent: dict[str, list[int]] = {}  # tokens of the last texts that were counted: a sample is one of them
        self.about: dict[str, Any] = {
            **{"task": task, "length": length, "samples": self.samples, "seed": options.seed},
            **{"tokenizer": tokenization.identity(tokenizer), "format": 1},
        }
        if task != pairs.TASK:
            self._load_haystack()
        name = f"{task}-{length}-{digest(self.about)[:12]}.jsonl"
        self.path = (options.prompts or out / "prompts") / name

    def _load_haystack(self) -> None:
        text, splitter, self.haystack = "", "none", niah.Haystack()
        self.keys = keys.load(self.options.words)
        if niah.TASKS[self.task].haystack == "essay":
            text = niah.essays(self.options.essays)
            split, splitter = niah.splitter()
            self.haystack = niah.Haystack(text=text) if split is None else niah.Haystack(text=text, split=split)
        self.about |= {"sizing": self.options.sizing, "keys": self.keys.identity()}
        self.about |= {"essays": text_digest(text) if text else None, "sentences": splitter}

    def _count(self, texts: list[str]) -> list[int]:
        self.recent.clear()
        self.recent.update(zip(texts, _encoded(self.tokenizer, texts), strict=True))
        return [len(self.recent[text]) for text in texts]

    def draw(self, samples: int) -> Iterator[tuple[dict[str, Any], list[int]]]:
        """The first ones: a line of the .jsonl each, and the prompt's tokens."""
        seed = self.options.seed
        if self.task == pairs.TASK:
            found = pairs.generate(self.length, samples=samples, count=self._count, seed=seed)
        else:
            found = niah.generate(
                niah.TASKS[self.task],
                self.length,
                samples=samples,
                keys=self.keys,
                haystack=self.haystack,
                count=self._count,
                seed=seed,
                sizing=self.options.sizing,
            )
        for sample in found:
            yield asdict(sample), self.recent[sample.prompt]

    @property
    def parts(self) -> tuple[Path, Path]:
        return self.path, self.path.with_suffix(".npz")

    def verify(self) -> bool:
        """True if the set is there, whole and as it was frozen; False if it has yet to be made or compared; edited
        files raise."""
        if not self.path.with_suffix(".json").exists():
            return False
        kept = read_json(self.path.with_suffix(".json"), "what `qed eval` says about frozen prompts").get("sha256")
        if not isinstance(kept, dict) or not all(path.exists() for path in self.parts):
            return False
        for path in self.parts:
            found = file_digest(path)
            if found != kept.get(path.suffix):
                raise ValueError(
                    f"{path}: expected the prompts as they were frozen, with sha256 {kept.get(path.suffix)}, got "
                    f"{found}: the file was changed; remove it, {self.path.with_suffix('.json').name} and its results "
                    "to have it made anew"
                )
        return True

    def freeze(self, console: Console) -> None:
        """Draw all samples and write them, or compare them with what is there."""
        ids: list[list[int]] = []

        def rows(found: Iterable[tuple[dict[str, Any], list[int]]]) -> Iterator[dict[str, Any]]:
            for row, tokens in found:
                ids.append(tokens)
                yield row

        with progress(console) as bar:
            shown = f"{self.task} {self.length}: prompts"
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
    """Before anything runs: words and essays are there, and the shortest length has room for a sample."""
    for task in tasks:
        if task in NEEDLES:
            one = dataclasses.replace(options, samples=1)
            next(iter(Needles(task, min(options.lengths), one, tokenizer, Path()).draw(1)))


def frozen(task: str, length: int, options: Options, tokenizer: Tokenizer, out: Path, console: Console) -> Path:
    """The file of a needle task's samples, made unless it is there."""
    found = Needles(task, length, options, tokenizer, out)
    if not found.verify():
        found.freeze(console)
    return found.path


def needle_prompts(path: Path, tokenizer: Tokenizer, options: Options) -> Iterator[Prompt]:
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
        golds, more = recall.checked((row["answer"],), f"{path}:{number}"), {"depth": row["depth"]}
        if (place := row["prompt"].find(row["answer"])) >= 0:
            # Tokens from the needle to the end of the prompt, were all its characters spread evenly over its tokens.
            more["distance"] = round(len(ids) * (1 - place / len(row["prompt"])))
        yield Prompt(ids=_with_bos(ids, tokenizer, options), text=row["prompt"], golds=golds, more=more)


def recall_prompts(task: str, tokenizer: Tokenizer, options: Options) -> tuple[list[Prompt], dict[str, Any]]:
    """Prompts, and how many golds are still in them."""
    rows, where = _rows(task, options)
    found = []
    golds, truncated, forms = 0, 0, dict.fromkeys(("as given", "cue added", "question"), 0)
    made = recall.examples(
        task, rows, variant=options.variant, tokenizer=tokenizer, context=options.context, where=where
    )
    for example in islice(made, options.samples):
        ids, text = tokenizer.encode(example.prompt, add_special_tokens=False).ids, example.prompt
        if not ids:
            raise ValueError(f"{where}: expected text in every example, got none in that of {example.document}")
        limit = None if options.max_length is None else options.max_length - recall.NEW_TOKENS
        if limit is not None and options.variant != "B" and len(ids) > limit:
            ids, truncated = ids[-limit:], truncated + 1
            text = tokenizer.decode(ids)
        golds += recall.survives(text, example.golds)
        forms[example.form] += 1
        more = {"document": example.document, "form": example.form}
        found.append(Prompt(ids=_with_bos(ids, tokenizer, options), text=text, golds=example.golds, more=more))
    if not found:
        raise ValueError(f"{where}: expected examples, got none")
    log: dict[str, Any] = {"golds_in_prompt": golds, "truncated": truncated}
    log["forms"] = {k: v for k, v in forms.items() if v}
    if task not in options.data:
        log["dataset"] = where  # by which reports tell it from a file that only resembles it
    return found, log


def _rows(task: str, options: Options) -> tuple[Iterable[tuple[int, dict[str, Any]]], str]:
    path = options.data.get(task)
    if path is not None:
        return numbered_lines(path), str(path)
    name = recall.DATASETS[task]
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(f"--data: expected {task}=FILE, or the `data` extra to read {name}; got neither") from error
    try:
        return enumerate(load_dataset(name, split="validation"), 1), name
    except (OSError, ValueError, RuntimeError) as error:  # no network, or none that leads there
        raise ValueError(f"--data: expected {task}=FILE, or {name} from the hub; got neither: {error}") from error


def _encoded(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Over all cores."""
    return [found.ids for found in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def _with_bos(ids: list[int], tokenizer: Tokenizer, options: Options) -> list[int]:
    begin, _ = tokenization.ends(tokenizer)
    return [begin, *ids] if options.bos and begin is not None else ids


def progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=console)
