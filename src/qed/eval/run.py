"""`qed eval`: frozen examples, predictions, scores. Everything that is read is looked at before the first task runs."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from ..data import tokenization
from ..data.shards import TokenShards
from ..locks import held
from ..model.base import weights_dtype
from ..model.causal_lm import QEDForCausalLM
from ..model.loading import load
from ..ops import explain
from ..provenance import provenance
from . import mqar, niah, pairs, positions, recall
from .answers import answers
from .prompts import NEEDLES, Needles, Options, Prompt, check_needles, frozen, needle_prompts, progress, recall_prompts
from .records import Results, check_same, digest, text_digest

POSITION_ROWS = 64
READ_FILES = (*recall.DATASETS, "positions")  # tasks that --data names files of
TASKS = (*NEEDLES, *recall.DATASETS, "mqar", "positions")
Job = Callable[[], dict[str, Any]]


class Evaluation:
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
        self.about = {
            **{"checkpoint": _weights(checkpoint), "tokenizer": tokenization.identity(self.tokenizer)},
            **{"strength": options.strength, "dtype": str(self.dtype), "bos": options.bos, "batch": options.batch},
        }
        sizes = self.model.config
        shape = (1, 64, sizes.num_heads)
        q, v = (torch.zeros(*shape, n, dtype=self.dtype, device=device) for n in (sizes.head_dim, sizes.value_head_dim))
        self.provenance = provenance(device) | {"folder": str(checkpoint), "impl": explain(q, q, q, v).route}

    def jobs(self, tasks: list[str], out: Path) -> dict[str, Job]:
        """What is to be done, by the result's name. All that can be wrong with files, options or earlier results in
        `out` is found here, before anything is run or written."""
        check_needles(tasks, self.options, self.tokenizer)
        found: dict[str, Job] = {}
        for task in tasks:
            if task in NEEDLES:
                for length in self.options.lengths:
                    found[f"{task}-{length}"] = self._needles(task, length, out)
            elif task in recall.DATASETS:
                found[f"{task}-{self.options.variant}"] = self._recall(task, out)
            else:
                found[task] = {"mqar": self._mqar, "positions": self._positions}[task](out)
        return found

    def _needles(self, task: str, length: int, out: Path) -> Job:
        samples = Needles(task, length, self.options, self.tokenizer, out)
        samples.verify()
        about = {"task": task, "length": length, "sizing": self.options.sizing, "prompts": samples.path.name}
        judge = pairs.correct if task == pairs.TASK else niah.correct
        new_tokens = pairs.NEW_TOKENS if task == pairs.TASK else niah.NEW_TOKENS
        name = f"{task}-{length}"
        check_same(out, name, self.about | about)

        def job() -> dict[str, Any]:
            path = frozen(task, length, self.options, self.tokenizer, out, self.console)
            prompts = list(needle_prompts(path, self.tokenizer, self.options))
            return self._score(name, prompts, new_tokens, lambda x, golds: judge(x, golds[0]), self.about | about, out)

        return job

    def _recall(self, task: str, out: Path) -> Job:
        options = self.options
        prompts, log = recall_prompts(task, self.tokenizer, options)
        about: dict[str, Any] = {
            "task": task,
            "variant": options.variant,
            "prompts": digest([prompt.text for prompt in prompts]),
        }
        about |= {"context": options.context} if options.variant == "B" else {"max_length": options.max_length}
        name = f"{task}-{options.variant}" + (f"-{options.max_length}" if options.max_length else "")
        check_same(out, name, self.about | about | log)
        return lambda: self._score(name, prompts, recall.NEW_TOKENS, recall.correct, self.about | about | log, out)

    def _mqar(self, out: Path) -> Job:
        if self.model.config.vocab_size < mqar.VOCABULARY:
            raise ValueError(
                f"mqar: expected a model of {mqar.VOCABULARY} tokens, got one of {self.model.config.vocab_size}"
            )
        about = self.about | {"task": "mqar", "seed": self.options.seed}
        check_same(out, "mqar", about)

        def job() -> dict[str, Any]:
            results = Results(out, "mqar", about, self.provenance)
            found = {}
            with progress(self.console) as bar:
                for i, setting in enumerate(bar.track(mqar.TEST, description="mqar")):
                    setting = setting._replace(examples=min(setting.examples, self.options.samples or setting.examples))
                    tokens, targets = mqar.examples(setting, seed=self.options.seed + i)
                    found[f"{setting.length}x{setting.pairs}"] = mqar.accuracy(self.model, tokens, targets)
            return results.finish({"accuracy": found})

        return job

    def _positions(self, out: Path) -> Job:
        folder = self.options.data.get("positions")
        if folder is None:
            raise ValueError("--data: expected positions=FOLDER of `qed prepare`, got none")
        shards, length = TokenShards(folder), max(self.options.lengths)
        if shards.index["tokenizer_sha256"] != self.about["tokenizer"]:
            raise ValueError(f"--data: expected tokens of the checkpoint's tokenizer, got another's in {folder}")
        rows = min(self.options.samples or POSITION_ROWS, (len(shards) - 1) // length)
        if rows < 1:
            raise ValueError(f"--data: expected more than {length} tokens for one row in {folder}, got {len(shards)}")
        about = {"task": "positions", "length": length, "rows": rows, "data": shards.index["shards"]}
        check_same(out, f"positions-{length}", self.about | about)

        def job() -> dict[str, Any]:
            results = Results(out, f"positions-{length}", self.about | about, self.provenance)
            with progress(self.console) as bar:
                task = bar.add_task(f"positions {length}", total=rows)
                found = positions.by_position(
                    self.model, shards, length=length, rows=rows, done=lambda n: bar.update(task, completed=n)
                )
            return results.finish(found)

        return job

    def _score(
        self,
        name: str,
        prompts: list[Prompt],
        new_tokens: int,
        correct: Callable[[str, tuple[str, ...]], bool],
        about: dict[str, Any],
        out: Path,
    ) -> dict[str, Any]:
        """Batches are the same whenever a run is taken up again: by length, the shortest first."""
        results = Results(out, name, about, self.provenance)
        self._check_rows(results, prompts)
        order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i].ids), i))
        batches = [order[i : i + self.options.batch] for i in range(0, len(order), self.options.batch)]
        _, end = tokenization.ends(self.tokenizer)
        ends = {end} | self.model.end_tokens()
        start = time.perf_counter()
        with progress(self.console) as bar:
            shown = bar.add_task(name, total=len(prompts), completed=len(results.rows))
            for batch in batches:
                left = [i for i in batch if i not in results.rows]
                if not left:
                    continue
                ids = [prompts[i].ids for i in batch]
                said = answers(self.model, ids, new_tokens=new_tokens, ends=ends, batch=self.options.batch)
                texts = dict(zip(batch, map(self.tokenizer.decode, said), strict=True))
                results.add([self._row(i, prompts[i], texts[i], correct) for i in left])
                bar.update(shown, completed=len(results.rows))
        rows = results.rows.values()
        right = sum(row["correct"] for row in rows)
        result = {"samples": len(rows), "correct": right, "accuracy": right / len(rows)}
        tokens = sorted(row["tokens"] for row in rows)
        result |= {"tokens": {"least": tokens[0], "median": tokens[len(tokens) // 2], "most": tokens[-1]}}
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

    @staticmethod
    def _row(index: int, prompt: Prompt, said: str, correct: Callable[[str, tuple[str, ...]], bool]) -> dict[str, Any]:
        return {
            "index": index,
            "prompt_sha256": text_digest(prompt.text),
            "prediction": said,
            "gold": prompt.golds[0] if len(prompt.golds) == 1 else list(prompt.golds),
            "correct": int(correct(said, prompt.golds)),
            "tokens": len(prompt.ids),
            **prompt.more,
        }


def matching_tokenizer(checkpoint: Path | None, name: str | None) -> Tokenizer:
    """The checkpoint's own, or the named one if that is the same."""
    own = None if checkpoint is None else checkpoint / "tokenizer.json"
    if own is None or not own.exists():
        if name is None:
            raise ValueError(f"--tokenizer: expected a file, since there is none in {checkpoint}, got nothing")
        if not Path(name).is_file():
            raise ValueError(f"--tokenizer: expected a .model or .json file, got {name}")
        return tokenization.load(name)
    found = tokenization.load(str(own))
    if name is not None and tokenization.identity(tokenization.load(name)) != tokenization.identity(found):
        raise ValueError(f"--tokenizer: expected the checkpoint's own, {own}, got another, {name}")
    return found


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
    """Every task, and a needle task at every length. Returns results by name."""
    run = Evaluation(checkpoint, tokenizer, options, device, console)
    found: dict[str, dict[str, Any]] = {}
    for name, job in run.jobs(tasks, out).items():
        with held(out, f"eval-{name}"):
            found[name] = job()
    table = Table("", "correct", "of", "prompt tokens", "seconds", title=str(checkpoint))
    for name, x in found.items():
        if "correct" in x:
            row = (f"{x['accuracy']:.1%}", str(x["samples"]), str(x["tokens"]["median"]), f"{x['seconds']:.1f}")
            table.add_row(name, *row)
        elif name == "mqar":
            for setting, share in x["accuracy"].items():
                table.add_row(f"mqar {setting}", f"{share:.1%}", "", "", "")
        else:
            for part in x["bins"]:
                table.add_row(f"loss at {part['from']}–{part['to']}", f"{part['loss']:.4f}", "", "", "")
    console.print(table)
    console.print(f"written to {out}", markup=False)
    return found


def _weights(checkpoint: Path) -> str:
    """sha256 of the weights: a result belongs to them, whatever their folder is called."""
    found = hashlib.sha256()
    for path in sorted(checkpoint.glob("*.safetensors")):
        with path.open("rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()
