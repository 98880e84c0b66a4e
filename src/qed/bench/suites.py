"""`qed bench eval --suite`: lm-eval's tasks through our batches, and through its own `hf` model, in turns in one run.

Both have the same model in the same process, the same requests and the same batch size. Before anything is timed their
answers are compared. The model has random weights, and examples are made up unless files are given: their lengths are
about those of the real data sets, and so are the proportions between their numbers.
"""

from __future__ import annotations

import math
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from ..data.tokenizer_files import as_transformers
from ..eval.harness.running import HarnessRun, Job
from ..eval.harness.suites import SUITES
from ..eval.harness.tasks import quiet
from ..eval.options import Options
from ..eval.run import matching_tokenizer
from ..model.causal_lm import QEDForCausalLM
from ..model.config import QEDConfig
from . import made_up
from .measuring import Bench, GateError, Report, seconds

ROUNDS = 2  # each candidate's best time counts
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # of loglikelihoods, for every token or so
Asked = dict[str, list[Any]]  # requests by their kind


def measure(bench: Bench, *, size: dict[str, Any], tokenizer: str, suite: str, options: Options) -> Report:
    """Time a suite, print and write what was found.

    Args:
        bench: where to run, print and write.
        size: arguments of QEDConfig.
        tokenizer: a file of a tokenizer; the model's vocabulary is at least as large.
        suite: its name.
        options: samples, lengths, files and batch.
    """
    encoder = matching_tokenizer(None, tokenizer)
    options = replace(options, bos=False)  # as lm-eval's `hf` model has it unless it is told
    config = QEDConfig(**(size | {"vocab_size": max(encoder.get_vocab_size(), QEDConfig(**size).vocab_size)}))
    asked = {"suite": suite, "samples": options.samples, "batch": options.batch, "data": "files"}
    report = bench.report(config=config.to_diff_dict(), **asked)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.manual_seed(0)
        with quiet():
            QEDForCausalLM(config).save_pretrained(folder / "model")
        encoder.save(str(folder / "model" / "tokenizer.json"))
        if not options.data:
            report |= {"data": "made up"}
            made = made_up.write(folder / "data", list(SUITES[suite]), options.samples or 100, in_proportion=True)
            options = replace(options, data=made)
            options = replace(options, essays=options.essays or made_up.essays(folder / "data"))
        (folder / "words").mkdir()
        place: dict[str, Any] = {"out": folder / "results", "device": bench.device, "console": bench.console}
        work = HarnessRun(folder / "model", None, options, folder=folder / "words", **place)
        candidates = {"qed": work.model, "hf": _theirs(work.model.model, encoder, options)}
        tasks = {job.name: _times(bench, job, candidates, options) for job in work.jobs([suite])}
    total = {name: sum(x[name] for x in tasks.values()) for name in candidates}
    report.add(tasks=tasks, seconds=total, ratio=total["hf"] / total["qed"])
    table = Table("", "requests", "qed, s", "hf, s", "hf / qed", title=f"lm-eval's suite {suite}")
    for name, x in tasks.items():
        table.add_row(name, str(x["requests"]), f"{x['qed']:.2f}", f"{x['hf']:.2f}", f"{x['hf'] / x['qed']:.1f}")
    table.add_row("all", "", f"{total['qed']:.2f}", f"{total['hf']:.2f}", f"{report['ratio']:.1f}")
    bench.console.print(table)
    bench.say_written()
    return report


def _theirs(model: QEDForCausalLM, encoder: Any, options: Options) -> Any:
    """lm-eval's own `hf` model, around the same model."""
    from lm_eval.models.huggingface import HFLM

    longest = max(options.lengths) + 1024
    with quiet():
        return HFLM(pretrained=model, tokenizer=as_transformers(encoder), batch_size=options.batch, max_length=longest)


def _times(bench: Bench, job: Job, candidates: dict[str, Any], options: Options) -> dict[str, float]:
    """The seconds that each candidate takes for the requests of a task; a wrong answer is a GateError."""
    asked: Asked = defaultdict(list)
    with quiet():
        task = job.make()
        task.build_all_requests(limit=options.samples)
    for x in task.instances:
        asked[x.request_type].append(x)
    said = {name: _answers(candidate, {k: x[:8] for k, x in asked.items()}) for name, candidate in candidates.items()}
    _gate(job.name, said["qed"], said["hf"], candidates["qed"].model.dtype)
    best = dict.fromkeys(candidates, math.inf)
    for turn in range(ROUNDS):
        for name in list(candidates)[:: 1 if turn % 2 else -1]:
            took = seconds(bench.device, lambda name=name: _answers(candidates[name], asked))  # type: ignore[misc]
            best[name] = min(best[name], took)
    return best | {"requests": sum(map(len, asked.values()))}


def _answers(candidate: Any, asked: Asked) -> list[Any]:
    """What a language model of lm-eval answers to requests."""
    with quiet():
        return [x for kind, requests in asked.items() for x in getattr(candidate, kind)(requests)]


def _gate(name: str, ours: list[Any], theirs: list[Any], dtype: torch.dtype) -> None:
    """Raise GateError unless loglikelihoods are close, and in float32 what is generated the same."""
    for a, b in zip(ours, theirs, strict=True):
        if isinstance(a, str):
            if dtype == torch.float32 and a != b:
                raise GateError(f"{name}: correctness gate: generated {a!r:.60}, lm-eval's own model {b!r:.60}")
            continue
        x, y = (float(value[0] if isinstance(value, tuple) else value) for value in (a, b))
        if abs(x - y) > CLOSE[dtype] * max(1.0, abs(y)):
            raise GateError(f"{name}: correctness gate: loglikelihood {x:.6f}, by lm-eval's own model {y:.6f}")
