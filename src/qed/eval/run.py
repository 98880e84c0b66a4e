"""`qed eval`: frozen examples, predictions, scores."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from tokenizers import Tokenizer
from transformers.utils import logging as transformers_logging

from ..data import tokenization
from ..data.shards import TokenShards
from ..files import write_json
from ..locks import held
from ..model.base import weights_dtype
from ..model.causal_lm import QEDForCausalLM
from ..ops import explain
from ..testing import environment, git_state
from . import keys, mqar, niah, pairs, positions, recall
from .answers import answers
from .records import Results, digest, lines, read_rows, text_digest, write_lines, write_rows

NEEDLE_SAMPLES, POSITION_ROWS = 500, 64
NEEDLES = (*niah.TASKS, pairs.TASK)  # tasks that have lengths
TASKS = (*NEEDLES, *recall.DATASETS, "mqar", "positions")


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


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """An example ready to be read."""

    ids: list[int]
    text: str
    golds: tuple[str, ...]
    more: dict[str, Any]  # kept with the prediction


# Examples, frozen


def frozen(task: str, length: int, options: Options, tokenizer: Tokenizer, out: Path, console: Console) -> Path:
    """The file of a needle task's samples, made unless it is there."""
    least = pairs.SHORTEST if task == pairs.TASK else niah.SHORTEST
    if length < least:
        raise ValueError(f"--lengths: expected {least} or more, got {length}")
    samples = NEEDLE_SAMPLES if options.samples is None else options.samples
    if samples < 1:
        raise ValueError(f"--samples: expected 1 or more, got {samples}")
    about = {
        **{"task": task, "length": length, "samples": samples, "seed": options.seed},
        **{"tokenizer": tokenization.identity(tokenizer), "format": 1},
    }

    recent: dict[str, list[int]] = {}  # tokens of the last texts that were counted: a sample is one of them

    def count(texts: list[str]) -> list[int]:
        recent.clear()
        recent.update(zip(texts, _encoded(tokenizer, texts), strict=True))
        return [len(recent[text]) for text in texts]

    if task == pairs.TASK:
        found = pairs.generate(length, samples=samples, count=count, seed=options.seed)
    else:
        names, text, splitter = keys.load(options.words), "", "none"
        haystack = niah.Haystack()
        if niah.TASKS[task].haystack == "essay":
            text = niah.essays(options.essays)
            split, splitter = niah.splitter()
            haystack = niah.Haystack(text=text) if split is None else niah.Haystack(text=text, split=split)
        about |= {"sizing": options.sizing, "keys": names.identity()}
        about |= {"essays": text_digest(text) if text else None, "sentences": splitter}
        found = niah.generate(
            niah.TASKS[task],
            length,
            samples=samples,
            keys=names,
            haystack=haystack,
            count=count,
            seed=options.seed,
            sizing=options.sizing,
        )
    path = (options.prompts or out / "prompts") / f"{task}-{length}-{digest(about)[:12]}.jsonl"
    if path.exists() and path.with_suffix(".npz").exists():
        return path
    ids: list[list[int]] = []

    def rows(samples: Iterable[niah.Sample]) -> Iterator[dict[str, Any]]:
        for sample in samples:
            ids.append(recent[sample.prompt])
            yield asdict(sample)
        write_rows(path.with_suffix(".npz"), ids)

    with _progress(console) as bar:
        write_lines(path, rows(bar.track(found, total=samples, description=f"{task} {length}: prompts")))
    write_json(path.with_suffix(".json"), about)
    return path


def needle_prompts(path: Path, tokenizer: Tokenizer, options: Options) -> Iterator[Prompt]:
    for row, ids in zip(lines(path), read_rows(path.with_suffix(".npz")), strict=True):
        ids = _with_bos(ids, tokenizer, options)
        yield Prompt(ids=ids, text=row["prompt"], golds=(row["answer"],), more={"depth": row["depth"]})


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
    log = {"golds_in_prompt": golds, "truncated": truncated, "forms": {k: v for k, v in forms.items() if v}}
    return found, log


def _rows(task: str, options: Options) -> tuple[Iterator[dict[str, Any]], str]:
    path = options.data.get(task)
    if path is not None:
        return lines(path), str(path)
    name = recall.DATASETS[task]
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(f"--data: expected {task}=FILE, or the `data` extra to read {name}; got neither") from error
    return iter(load_dataset(name, split="validation")), name


def _encoded(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Over all cores."""
    return [found.ids for found in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def _with_bos(ids: list[int], tokenizer: Tokenizer, options: Options) -> list[int]:
    begin, _ = tokenization.ends(tokenizer)
    return [begin, *ids] if options.bos and begin is not None else ids


# Predictions


class Evaluation:
    def __init__(self, checkpoint: Path, tokenizer: str | None, options: Options, device: str, console: Console):
        if not checkpoint.is_dir():
            raise ValueError(f"CHECKPOINT: expected a folder that save_pretrained wrote, got {checkpoint}")
        self.options, self.device, self.console = options, device, console
        transformers_logging.disable_progress_bar()  # one bar is enough
        self.tokenizer = matching_tokenizer(checkpoint, tokenizer)
        self.dtype = weights_dtype(device)
        self.model: QEDForCausalLM = QEDForCausalLM.from_pretrained(checkpoint, dtype=self.dtype).to(device).eval()
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
        self.provenance = {"environment": environment(device), "git": git_state(), "folder": str(checkpoint)}
        self.provenance |= {"impl": explain(q, q, q, v).form}

    def needles(self, task: str, length: int, out: Path) -> dict[str, Any]:
        path = frozen(task, length, self.options, self.tokenizer, out, self.console)
        about = {"task": task, "length": length, "sizing": self.options.sizing, "prompts": path.name}
        judge = pairs.correct if task == pairs.TASK else niah.correct
        return self._score(
            f"{task}-{length}",
            list(needle_prompts(path, self.tokenizer, self.options)),
            pairs.NEW_TOKENS if task == pairs.TASK else niah.NEW_TOKENS,
            lambda said, golds: judge(said, golds[0]),
            self.about | about,
            out,
        )

    def recall(self, task: str, out: Path) -> dict[str, Any]:
        options = self.options
        prompts, log = recall_prompts(task, self.tokenizer, options)
        about: dict[str, Any] = {
            "task": task,
            "variant": options.variant,
            "prompts": digest([prompt.text for prompt in prompts]),
        }
        about |= {"context": options.context} if options.variant == "B" else {"max_length": options.max_length}
        name = f"{task}-{options.variant}" + (f"-{options.max_length}" if options.max_length else "")
        return self._score(name, prompts, recall.NEW_TOKENS, recall.correct, self.about | about | log, out)

    def mqar(self, out: Path) -> dict[str, Any]:
        results = Results(out, "mqar", self.about | {"task": "mqar", "seed": self.options.seed}, self.provenance)
        found = {}
        with _progress(self.console) as bar:
            for i, setting in enumerate(bar.track(mqar.TEST, description="mqar")):
                setting = setting._replace(examples=min(setting.examples, self.options.samples or setting.examples))
                tokens, targets = mqar.examples(setting, seed=self.options.seed + i)
                found[f"{setting.length}x{setting.pairs}"] = mqar.accuracy(self.model, tokens, targets)
        return results.finish({"accuracy": found})

    def positions(self, out: Path) -> dict[str, Any]:
        folder = self.options.data.get("positions")
        if folder is None:
            raise ValueError("--data: expected positions=FOLDER of `qed prepare`, got none")
        shards, length = TokenShards(folder), max(self.options.lengths)
        if shards.index["tokenizer_sha256"] != self.about["tokenizer"]:
            raise ValueError(f"--data: expected tokens of the checkpoint's tokenizer, got another's in {folder}")
        rows = min(self.options.samples or POSITION_ROWS, (len(shards) - 1) // length)
        about = {"task": "positions", "length": length, "rows": rows, "data": shards.index["shards"]}
        results = Results(out, f"positions-{length}", self.about | about, self.provenance)
        with _progress(self.console) as bar:
            task = bar.add_task(f"positions {length}", total=rows)
            found = positions.by_position(
                self.model,
                shards,
                length=length,
                rows=rows,
                done=lambda n: bar.update(task, completed=n),
            )
        return results.finish(found)

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
        order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i].ids), i))
        batches = [order[i : i + self.options.batch] for i in range(0, len(order), self.options.batch)]
        _, end = tokenization.ends(self.tokenizer)
        ends = {end} | self.model.end_tokens()
        start = time.perf_counter()
        with _progress(self.console) as bar:
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
            raise ValueError("--tokenizer: expected a file, since there is none with the checkpoint; got nothing")
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
    for task in tasks:
        with held(out, f"eval-{task}"):
            if task in NEEDLES:
                for length in options.lengths:
                    found[f"{task}-{length}"] = run.needles(task, length, out)
            elif task in recall.DATASETS:
                found[f"{task}-{options.variant}"] = run.recall(task, out)
            else:
                found[task] = getattr(run, task)(out)
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


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=console)
