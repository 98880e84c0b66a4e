"""`qed bench eval`: how long S-NIAH-1 takes at every length: making prompts, reading, 128 new tokens and scoring.

The model has random weights, which never find a needle and never end early, so that the time is the longest possible.
Beside it stands flash-linear-attention's GDN-2 of the same size through transformers' `generate`, one prompt at a time
as its own instructions have it, on a few prompts, extrapolated.
"""

from __future__ import annotations

import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from ..eval.options import Options
from ..eval.prompts import NEEDLE_SAMPLES, check_needles, frozen, needle_prompts
from ..eval.run import evaluate, matching_tokenizer
from ..eval.tasks import niah
from ..model.causal_lm import QEDForCausalLM
from ..model.config import QEDConfig
from .measuring import Bench, Report, seconds
from .model import fla_model, generate

TASK = "niah_single_1"
FLA_PROMPTS, FLA_TOKENS = 2, 16  # of each length; the rest of 128 tokens is extrapolated


def measure(bench: Bench, *, size: dict[str, Any], tokenizer: str, options: Options) -> Report:
    """Time an evaluation, print and write what was found.

    Args:
        bench: Where to run, print and write.
        size: Arguments of QEDConfig.
        tokenizer: A file of a tokenizer; the model's vocabulary is at least as large.
        options: Lengths, samples and what else decides the prompts.
    """
    encoder, samples = matching_tokenizer(None, tokenizer), options.samples or NEEDLE_SAMPLES
    check_needles([TASK], options, encoder)
    config = QEDConfig(**(size | {"vocab_size": max(encoder.get_vocab_size(), QEDConfig(**size).vocab_size)}))
    report = bench.report(config=config.to_diff_dict(), samples=samples, new_tokens=niah.NEW_TOKENS)
    prompts: dict[int, list[list[int]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, results = Path(folder) / "model", Path(folder) / "results"
        torch.manual_seed(0)
        QEDForCausalLM(config).bfloat16().save_pretrained(checkpoint)
        encoder.save(str(checkpoint / "tokenizer.json"))
        start = time.perf_counter()
        evaluated = evaluate(
            checkpoint, [TASK], options, out=results, tokenizer=None, device=bench.device, console=bench.console
        )
        report.add(seconds=time.perf_counter() - start, by_length={n: x["seconds"] for n, x in evaluated.items()})
        for n in options.lengths if bench.fla else ():
            file = frozen(TASK, n, options, encoder, results, bench.console)
            prompts[n] = [x.ids for x in needle_prompts(file, encoder, options)]
    table = Table("", "seconds", title=f"S-NIAH-1, {samples} samples of each length")
    for name, took in report["by_length"].items():
        table.add_row(name, f"{took:.1f}")
    table.add_row("all, with prompts and loading", f"{report['seconds']:.1f}")
    if bench.fla:
        model = fla_model(config, bench.device, torch.bfloat16 if bench.on_gpu else torch.float32)
        each = {str(n): _seconds_of_a_prompt(model, prompts[n], bench.device) for n in options.lengths}
        total = samples * sum(each.values())
        report.add(fla_seconds_a_prompt=each, fla_seconds_extrapolated=total)
        table.add_row(f"fla GDN-2, extrapolated from {FLA_PROMPTS} prompts of each length", f"{total:,.0f}")
    bench.console.print(table)
    bench.say_written()
    return report


def _seconds_of_a_prompt(model: Any, prompts: list[list[int]], device: str) -> float:
    """Return the seconds of one prompt with 128 new tokens, from a few prompts with fewer."""

    def took(ids: list[int], new: int) -> float:
        return seconds(device, partial(generate, model, torch.tensor([ids], device=device), new))

    took(prompts[0], 2)  # compiles
    estimates = []
    for ids in prompts[:FLA_PROMPTS]:
        one, more = took(ids, 1), took(ids, 1 + FLA_TOKENS)
        estimates.append(one + (more - one) / FLA_TOKENS * (niah.NEW_TOKENS - 1))
    return sum(estimates) / len(estimates)
