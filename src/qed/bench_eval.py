"""`qed bench eval`: how long S-NIAH-1 takes, prompts, reading, 128 new tokens and scoring, at every length.

The model has random weights, which never find a needle and never end early: the time is the longest there is. Beside it
flash-linear-attention's GDN-2 of the same size through transformers' `generate`, one prompt at a time as its own
instructions have it, on a few prompts, extrapolated.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from .bench import Report
from .bench_model import theirs
from .eval.options import Options
from .eval.prompts import NEEDLE_SAMPLES, check_needles, frozen, needle_prompts
from .eval.run import evaluate, matching_tokenizer
from .eval.tasks import niah
from .model.causal_lm import QEDForCausalLM
from .model.config import QEDConfig
from .testing import environment

TASK = "niah_single_1"
THEIR_PROMPTS, THEIR_TOKENS = 2, 16  # of each length; the rest of 128 tokens is extrapolated


def measure(
    console: Console,
    *,
    out: Path | None,
    device: str,
    size: dict[str, Any],
    tokenizer: str,
    options: Options,
    fla: bool,
) -> dict[str, Any]:
    """Time, print, write."""
    encoder, samples = matching_tokenizer(None, tokenizer), options.samples or NEEDLE_SAMPLES
    check_needles([TASK], options, encoder)
    config = QEDConfig(**(size | {"vocab_size": max(encoder.get_vocab_size(), QEDConfig(**size).vocab_size)}))
    report = Report(out, environment=environment(device), samples=samples, new_tokens=niah.NEW_TOKENS)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, results = Path(folder) / "model", Path(folder) / "results"
        torch.manual_seed(0)
        QEDForCausalLM(config).bfloat16().save_pretrained(checkpoint)
        encoder.save(str(checkpoint / "tokenizer.json"))
        start = time.perf_counter()
        found = evaluate(checkpoint, [TASK], options, out=results, tokenizer=None, device=device, console=console)
        report.add(seconds=time.perf_counter() - start, by_length={n: x["seconds"] for n, x in found.items()})
        if fla:
            prompts = {
                n: list(needle_prompts(frozen(TASK, n, options, encoder, results, console), encoder, options))
                for n in options.lengths
            }
    table = Table("", "seconds", title=f"S-NIAH-1, {samples} samples of each length")
    for name, seconds in report["by_length"].items():
        table.add_row(name, f"{seconds:.1f}")
    table.add_row("all, with prompts and loading", f"{report['seconds']:.1f}")
    if fla:
        dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
        model = theirs(config, device, dtype)
        each = {str(n): _theirs(model, [x.ids for x in prompts[n]], device) for n in options.lengths}
        total = samples * sum(each.values())
        report.add(fla_seconds_a_prompt=each, fla_seconds_extrapolated=total)
        table.add_row(f"fla GDN-2, extrapolated from {THEIR_PROMPTS} prompts of each length", f"{total:,.0f}")
    console.print(table)
    if out is not None:
        console.print(f"written to {out}", markup=False)
    return report


@torch.no_grad()
def _theirs(model: Any, prompts: list[list[int]], device: str) -> float:
    """Seconds of one prompt with 128 new tokens."""

    def seconds(ids: list[int], new: int) -> float:
        given = torch.tensor([ids], device=device)
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        start = time.perf_counter()
        model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
        )
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        return time.perf_counter() - start

    seconds(prompts[0], 2)  # compiles
    found = []
    for ids in prompts[:THEIR_PROMPTS]:
        one, more = seconds(ids, 1), seconds(ids, 1 + THEIR_TOKENS)
        found.append(one + (more - one) / THEIR_TOKENS * (niah.NEW_TOKENS - 1))
    return sum(found) / len(found)
