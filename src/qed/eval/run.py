"""`qed eval`: frozen examples, predictions, scores. Everything that is read is checked before the first task runs."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from ..data import tokenization
from ..locks import held
from ..model.base import weights_dtype
from ..model.causal_lm import QEDForCausalLM
from ..model.loading import load
from ..ops import explain
from ..provenance import provenance
from .answers import Answer, answers
from .options import Options
from .prompts import FrozenPrompts, Prompt, check_needles, frozen, needle_prompts, progress, recall_prompts
from .records import Results, check_same, digest, text_digest
from .task import Judge, MeasuredTask, NeedleTask, RecallTask, Task
from .tasks import TASKS, named

Job = Callable[[], dict[str, Any]]


class Evaluation:
    """A checkpoint with its tokenizer, and what is to be asked of it."""

    def __init__(self, checkpoint: Path, tokenizer: str | None, options: Options, device: str, console: Console):
        if not checkpoint.is_dir():
            raise ValueError(f"CHECKPOINT: expected a folder that save_pretrained wrote, got {checkpoint}")
        self.options, self.device, self.console = options, device, console
        self.tokenizer = matching_tokenizer(checkpoint, tokenizer)
        self.dtype = weights_dtype(device)
        self.model: QEDForCausalLM = load(checkpoint, dtype=self.dtype, device=device)
        self.model.set_strength_scale(options.strength)
        size, vocabulary = self.model.config.vocab_size, self.tokenizer.get_vocab_size()
        if vocabulary > size:
            raise ValueError(f"--tokenizer: expected at most the model's {size} tokens, got {vocabulary}")
        self.about: dict[str, Any] = {
            **{"checkpoint": _weights(checkpoint), "tokenizer": tokenization.identity(self.tokenizer)},
            **{"strength": options.strength, "dtype": str(self.dtype), "bos": options.bos, "batch": options.batch},
        }
        sizes = self.model.config
        shape = (1, 64, sizes.num_heads)
        q, v = (torch.zeros(*shape, n, dtype=self.dtype, device=device) for n in (sizes.head_dim, sizes.value_head_dim))
        self.provenance = provenance(device) | {"folder": str(checkpoint), "impl": explain(q, q, q, v).route}

    def jobs(self, tasks: list[str], out: Path) -> dict[str, Job]:
        """What is to be done, by the result's name. Whatever is wrong with files, options or earlier results in `out`
        raises here, before anything is run or written."""
        chosen = [named(task, Task) for task in tasks]
        check_needles(tasks, self.options, self.tokenizer)
        return {name: job for task in chosen for name, job in self._jobs_of(task, out)}

    def _jobs_of(self, task: Task, out: Path) -> Iterator[tuple[str, Job]]:
        if isinstance(task, NeedleTask):
            for length in self.options.lengths:
                yield self._needles(task, length, out)
        elif isinstance(task, RecallTask):
            yield self._recall(task, out)
        elif isinstance(task, MeasuredTask):
            yield self._measured(task, out)
        else:
            kinds = "a NeedleTask, a RecallTask or a MeasuredTask"
            raise TypeError(f"{task.name}: expected {kinds}, got a {type(task).__name__}")

    def _needles(self, task: NeedleTask, length: int, out: Path) -> tuple[str, Job]:
        samples = FrozenPrompts(task, length, self.options, self.tokenizer, out)
        samples.verify()
        about = self.about | {"task": task.name, "length": length, "sizing": self.options.sizing}
        about |= {"prompts": samples.path.name}
        name = f"{task.name}-{length}"
        check_same(out, name, about)

        def job() -> dict[str, Any]:
            path = frozen(task.name, length, self.options, self.tokenizer, out, self.console)
            prompts = list(needle_prompts(path, self.tokenizer, self.options))
            return self._score(task, prompts, Results(out, name, about, self.provenance))

        return name, job

    def _recall(self, task: RecallTask, out: Path) -> tuple[str, Job]:
        options = self.options
        prompts, log = recall_prompts(task, self.tokenizer, options)
        about = self.about | {"task": task.name, "variant": options.variant}
        about |= {"prompts": digest([prompt.text for prompt in prompts])}
        about |= {"context": options.context} if options.variant == "B" else {"max_length": options.max_length}
        about |= log
        name = f"{task.name}-{options.variant}" + (f"-{options.max_length}" if options.max_length else "")
        check_same(out, name, about)
        return name, lambda: self._score(task, prompts, Results(out, name, about, self.provenance))

    def _measured(self, task: MeasuredTask, out: Path) -> tuple[str, Job]:
        measurement = task.prepare(self.model, self.options, self.about["tokenizer"])
        name = f"{task.name}-{measurement.suffix}" if measurement.suffix else task.name
        about = self.about | {"task": task.name} | measurement.about
        check_same(out, name, about)

        def job() -> dict[str, Any]:
            results = Results(out, name, about, self.provenance)
            with progress(self.console) as bar:
                shown = bar.add_task(name, total=measurement.steps)
                return results.finish(measurement.run(lambda done: bar.update(shown, completed=done)))

        return name, job

    def _score(self, task: NeedleTask | RecallTask, prompts: list[Prompt], results: Results) -> dict[str, Any]:
        """Batches are by length, the shortest first, and so the same when a run is resumed."""
        self._check_rows(results, prompts)
        order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i].ids), i))
        batches = [order[i : i + self.options.batch] for i in range(0, len(order), self.options.batch)]
        _, end = tokenization.ends(self.tokenizer)
        ends = {end} | self.model.end_tokens()
        start = time.perf_counter()
        with progress(self.console) as bar:
            shown = bar.add_task(results.path.stem, total=len(prompts), completed=len(results.rows))
            for batch in batches:
                left = [i for i in batch if i not in results.rows]
                if not left:
                    continue
                ids = [prompts[i].ids for i in batch]
                said = answers(self.model, ids, new_tokens=task.new_tokens, ends=ends, batch=self.options.batch)
                answered = dict(zip(batch, said, strict=True))
                results.add([self._row(i, prompts[i], answered[i], task.correct) for i in left])
                bar.update(shown, completed=len(results.rows))
        rows = results.rows.values()
        right = sum(row["correct"] for row in rows)
        result = {"samples": len(rows), "correct": right, "accuracy": right / len(rows)}
        tokens = sorted(row["tokens"] for row in rows)
        result |= {"tokens": {"least": tokens[0], "median": tokens[len(tokens) // 2], "most": tokens[-1]}}
        not_finite = sum(not row.get("finite", True) for row in rows)
        result |= {"not_finite": not_finite} if not_finite else {}
        return results.finish(result) | {"seconds": time.perf_counter() - start}

    @staticmethod
    def _check_rows(results: Results, prompts: list[Prompt]) -> None:
        """Predictions that are there already are of these prompts."""
        for index, row in results.rows.items():
            known = 0 <= index < len(prompts)
            if not known or row.get("prompt_sha256") != text_digest(prompts[index].text):
                raise ValueError(
                    f"{results.path}: expected predictions of the same prompts, got one of another prompt for "
                    f"example {index}; use another --out"
                )

    def _row(self, index: int, prompt: Prompt, answer: Answer, correct: Judge) -> dict[str, Any]:
        said = self.tokenizer.decode(answer.tokens)
        return {
            "index": index,
            "prompt_sha256": text_digest(prompt.text),
            "prediction": said,
            "gold": prompt.golds[0] if len(prompt.golds) == 1 else list(prompt.golds),
            "correct": int(any(correct(said, gold) for gold in prompt.golds)),
            "tokens": len(prompt.ids),
            **({} if answer.finite else {"finite": False}),
            **prompt.more,
        }


def matching_tokenizer(checkpoint: Path | None, name: str | None) -> Tokenizer:
    """The tokenizer in a checkpoint; or that of the name, which must be the same where the checkpoint has one."""
    own = None if checkpoint is None else checkpoint / "tokenizer.json"
    if own is None or not own.exists():
        if name is None:
            raise ValueError(f"--tokenizer: expected a file, since there is none in {checkpoint}, got nothing")
        if not Path(name).is_file():
            raise ValueError(f"--tokenizer: expected a .model or .json file, got {name}")
        return tokenization.load(name)
    tokenizer = tokenization.load(str(own))
    if name is not None and tokenization.identity(tokenization.load(name)) != tokenization.identity(tokenizer):
        raise ValueError(f"--tokenizer: expected the checkpoint's own, {own}, got another, {name}")
    return tokenizer


def evaluate(
    checkpoint: Path,
    tasks: list[str],
    options: Options,
    *,
    out: Path,
    tokenizer: str | None,
    device: str,
    console: Console,
) -> dict[str, dict[str, Any]]:
    """Evaluates a checkpoint on tasks, prints tables of the results, and returns them by name.

    Args:
        checkpoint: a folder that save_pretrained wrote.
        tasks: names of the table of tasks.
        options: which examples, and how they are answered.
        out: the folder for results; an evaluation that is there unfinished is resumed.
        tokenizer: a file, where the checkpoint has none.
        device: where the model runs.
        console: for progress bars and the tables.
    """
    run = Evaluation(checkpoint, tokenizer, options, device, console)
    results: dict[str, dict[str, Any]] = {}
    for name, job in run.jobs(tasks, out).items():
        with held(out, f"eval-{name}"):
            results[name] = job()
    console.print(str(checkpoint), markup=False)
    for table in tables(results):
        console.print(table)
    console.print(f"written to {out}", markup=False)
    return results


def tables(results: dict[str, dict[str, Any]]) -> list[Table]:
    """Results by name, as tables: one for all tasks that have the same columns."""
    by_columns: dict[tuple[str, ...], Table] = {}
    for name, result in results.items():
        task = TASKS[name.partition("-")[0]]
        table = by_columns.setdefault(task.columns, Table(*task.columns))
        for row in task.rows(name, result):
            table.add_row(*row)
    return list(by_columns.values())


def _weights(checkpoint: Path) -> str:
    """The sha256 of the weights: a result belongs to them, whatever their folder is called."""
    weights = hashlib.sha256()
    for path in sorted(checkpoint.glob("*.safetensors")):
        with path.open("rb") as file:
            weights.update(hashlib.file_digest(file, "sha256").digest())
    return weights.hexdigest()
