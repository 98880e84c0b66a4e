"""RULER's prompts, drawn by lm-eval's own code: once for a task, a length and a tokenizer, and then kept ("frozen").

lm-eval draws from Python's and NumPy's global random numbers, which depend on what ran before. Here every set begins
with the seed, so that it is the same whenever it is drawn. Essays, SQuAD and HotpotQA come from your files, or from
where lm-eval has them. What lm-eval cannot draw without end or in silence less than was asked for is refused first:

| task | refused |
|---|---|
| all | a length in which the question does not fit |
| ruler_vt, ruler_cwe, ruler_fwe | a length at which the shortest prompt does not fit: lm-eval would try forever |
| with essays, ruler_qa_* | a length for which the text has too few tokens |
| all but ruler_qa_* | a length at which an answer does not stand in the prompt, or is not the only right one |
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from ...data import tokenization
from ...files import read_json, write_json
from ..options import Options
from ..prompts import NEEDLE_SAMPLES
from ..records import digest, file_digest, lines, text_digest, write_lines
from ..task import checked_golds
from ..tasks import niah
from .hub import reason
from .suites import MEMBERS, has_files
from .tasks import quiet, task_manager

DRAWING = ("generate_samples", "sys_word_pair_random", "sys_vartrack_w_noise_random", "sys_kwext")
QUESTIONS = {"ruler_qa_squad": "read_squad", "ruler_qa_hotpot": "read_hotpotqa"}
DRAWS = 4  # prompts that are looked at to know whether the shortest fits


class Ruler:
    """RULER's tasks for one tokenizer."""

    def __init__(self, options: Options, tokenizer: Any, folder: Path, out: Path):
        """Args: options, of an evaluation; tokenizer, of transformers, whose files lie in folder; out, of results."""
        self.options, self.tokenizer, self.folder = options, tokenizer, folder
        self.samples = NEEDLE_SAMPLES if options.samples is None else options.samples
        self.prompts = options.prompts or out / "prompts"

    def path(self, task: str, length: int) -> Path:
        """Where a set of prompts is kept: its name has the sha256 of all that decides it."""
        return self.prompts / f"{task}-{length}-{digest(self.about(task, length))[:12]}.jsonl"

    def about(self, task: str, length: int) -> dict[str, Any]:
        """What decides a set of prompts."""
        about: dict[str, Any] = {"task": task, "length": length, "samples": self.samples, "seed": self.options.seed}
        about |= {"tokenizer": tokenization.identity(self.tokenizer.backend_tokenizer)}
        about |= {name: version(name) for name in ("lm-eval", "wonderwords")}
        if MEMBERS[task].essays:
            about |= {"essays": _text_of(self.options.essays), "sentences": niah.splitter()[1]}
        if task in QUESTIONS:
            given = self.options.data.get(task)
            about |= {"questions": "lm-eval's own" if given is None else file_digest(given)}
        return about

    def rows(self, task: str, length: int) -> list[dict[str, Any]]:
        """The examples of a task at a length as lm-eval has them, which are drawn unless they are there."""
        path = self.path(task, length)
        about, note = self.about(task, length), path.with_suffix(".json")
        if not note.exists():
            write_lines(path, self.draw(task, length, self.samples))
            write_json(note, about | {"sha256": file_digest(path)})
        kept = read_json(note, "what `qed eval` says about frozen prompts").get("sha256")
        if not path.exists() or file_digest(path) != kept:
            raise ValueError(f"{path}: expected the prompts as they were frozen, with sha256 {kept}, got others")
        return list(lines(path))

    def check(self, tasks: list[str]) -> None:
        """Raises ValueError, before anything runs, if a task cannot be asked at all of the lengths, or has no data. One
        error names all tasks without data."""
        missing: dict[str, dict[str, str]] = {}  # reasons, by what is wanted and by task
        for task in tasks:
            try:
                self._check(task)
            except OSError as error:
                if has_files(task, self.options):
                    raise  # nothing is downloaded for it
                wanted = "--essays: expected FILE" if MEMBERS[task].essays else "--data: expected NAME=FILE"
                missing.setdefault(wanted, {})[task] = reason(error)
        if missing:
            said = (
                f"{wanted}, or what lm-eval downloads, for {', '.join(why)}; got neither ({next(iter(why.values()))})"
                for wanted, why in missing.items()
            )
            raise ValueError("; ".join(said))

    def _check(self, task: str) -> None:
        shortest, longest = min(self.options.lengths), max(self.options.lengths)
        module = _function(task).__globals__
        text = self._text(task, module)
        self._check_room(task, module, shortest)
        for row in self.draw(task, shortest, 1):
            if not _answerable(task, row):
                raise ValueError(f"--lengths: expected room for all that {task} asks for, got {shortest}")
        if text is not None and self._count(text) < longest:
            where = "--essays" if MEMBERS[task].essays else "--data"
            raise ValueError(
                f"{where}: expected text of {longest} tokens or more for {task}, got {self._count(text)}: it cannot "
                f"fill --lengths {longest}"
            )

    def _check_room(self, task: str, module: dict[str, Any], length: int) -> None:
        """Refuses a length at which lm-eval would look for a fitting prompt forever."""
        if self.tokenizer(" a b")["input_ids"] == []:
            raise ValueError("--tokenizer: expected one that knows some letters, got one that gives no tokens")
        need = 0
        with _drawing(self.options, task):
            for _ in range(DRAWS):
                if task == "ruler_vt":
                    shown, answer = module["generate_input_output"](5, 1, 4, is_icl=True)
                    example = self._count(f"{shown} {answer}")
                    if example + 30 > 500:
                        raise ValueError(
                            f"--tokenizer: expected one with which ruler_vt's first example is 470 tokens or fewer, "
                            f"got {example}: lm-eval would try forever"
                        )
                    text, answer = module["generate_input_output"](10, 1, 4)
                    need = max(need, example + self._count(f"{text} {answer}") + 30)
                elif task == "ruler_cwe":
                    example, text, answer = module["generate_input_output"](10, length)
                    listed = " ".join(f"{i + 1}. {word}" for i, word in enumerate(answer))
                    need = max(need, self._count(f"{example}\n{text} {listed}") + 120)
                elif task == "ruler_fwe":
                    need = self._count(module["TEMPLATE"])
        if need > length:
            raise ValueError(f"--lengths: expected {need} or more for {task} with this tokenizer, got {length}")

    def _text(self, task: str, module: dict[str, Any]) -> str | None:
        """All of the text that a task's prompts are cut from; None where it can be made without end."""
        if MEMBERS[task].essays:
            return niah.essays(self.options.essays) if self.options.essays is not None else None
        if task not in QUESTIONS:
            return None
        try:
            with _drawing(self.options, task):
                questions, documents = module[QUESTIONS[task]]()
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"--data: expected {MEMBERS[task].dataset} for {task}, got: {error!r:.200}") from error
        for i, question in enumerate(questions):
            checked_golds(question["outputs"], f"--data: question {i} of {task}")
        return "\n\n".join(documents)

    def _count(self, text: str) -> int:
        return len(self.tokenizer(text)["input_ids"])

    def draw(self, task: str, length: int, samples: int) -> list[dict[str, Any]]:
        """Examples as lm-eval draws them, the first ones of 500.

        Args:
            task: the name of one of RULER's tasks.
            length: in tokens.
            samples: how many; of a task with questions at most as many as there are.
        """
        make = _function(task)
        with _drawing(self.options, task, samples):
            try:
                found: list[dict[str, Any]] = make(tokenizer=str(self.folder), max_seq_lengths=[length])[
                    "test"
                ].to_list()
            except ValueError as error:
                raise ValueError(f"--lengths: expected a length at which {task} fits, got {length}: {error}") from error
        return found


def _function(task: str) -> Callable[..., Any]:
    """lm-eval's function that draws a task's examples."""
    from lm_eval.tasks._yaml_loader import load_yaml

    with quiet():
        made: Callable[..., Any] = load_yaml(task_manager().task_index[task].yaml_path, resolve_func=True)[
            "custom_dataset"
        ]
    return made


def _answerable(task: str, row: dict[str, Any]) -> bool:
    """Whether the answers stand in a prompt and, where the most frequent words are asked for, no others are as
    frequent. Of questions nothing is asked: an answer may be "yes"."""
    if task in QUESTIONS:
        return True
    if task == "ruler_fwe":
        counts = Counter(row["input"].split())
        others = [n for word, n in counts.items() if len(word) == len(row["outputs"][0]) and word not in row["outputs"]]
        return min(counts[x] for x in row["outputs"]) > max(others, default=0)
    return bool(row["outputs"]) and all(x in row["input"] for x in row["outputs"])


@lru_cache
def _text_of(essays: Path | None) -> str:
    return "lm-eval's own" if essays is None else text_digest(niah.essays(essays))


@contextlib.contextmanager
def _drawing(options: Options, task: str, samples: int = 1) -> Iterator[None]:
    """While lm-eval draws: the seed, so many samples, and your files in place of downloads; in silence."""
    import datasets
    from lm_eval.tasks.ruler import prepare_niah

    module = _function(task).__globals__
    state, numpy_state, words = random.getstate(), np.random.get_state(), module.get("RNG")  # noqa: NPY002
    changed = {name: module[name] for name in (*DRAWING, "download_json") if name in module}
    whole, sentences = datasets.load_dataset, prepare_niah.sent_tokenize
    caches = [prepare_niah.get_haystack, *(module[x] for x in QUESTIONS.values() if x in module)]
    try:
        for kept in caches:
            kept.cache_clear()
        _use_files(module, options, task)
        if niah.splitter()[0] is None:
            prepare_niah.sent_tokenize = niah.Haystack().split
        if task in QUESTIONS:
            samples = min(samples, len(module[QUESTIONS[task]]()[0]))
        for name in DRAWING:
            if name in module:
                module[name] = _with_samples(changed[name], samples)
        random.seed(options.seed)
        np.random.seed(options.seed)  # noqa: NPY002  # lm-eval's own
        if words is not None:
            words.seed(options.seed)
        with quiet():
            yield
    finally:
        module.update(changed)
        datasets.load_dataset, prepare_niah.sent_tokenize = whole, sentences
        random.setstate(state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        for kept in caches:
            kept.cache_clear()


def _use_files(module: dict[str, Any], options: Options, task: str) -> None:
    """Lets lm-eval's functions read files where they would download."""
    import datasets

    if options.essays is not None:
        essays = datasets.Dataset.from_list([{"text": niah.essays(options.essays)}])
        datasets.load_dataset = lambda *_, **__: essays
    if task in options.data:
        path = options.data[task]
        module["download_json"] = lambda _: read_json(path)


def _with_samples(draws: Callable[..., Any], samples: int) -> Callable[..., Any]:
    """A function of lm-eval that draws 500 samples, or one as an example, now of so many."""

    def drawn(*given: Any, **named: Any) -> Any:
        if named.get("num_samples") != 1:
            named["num_samples"] = samples
        return draws(*given, **named)

    return drawn
