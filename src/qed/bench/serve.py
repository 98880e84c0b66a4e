"""`qed bench serve`: how fast vLLM serves the model, beside this package's own `stream` of one sequence.

Nothing is timed before it is right: vLLM has to answer prompts with the tokens that `stream` gives. The same weights
are then timed in turns, in one run: `stream` with one sequence, vLLM with one request, and vLLM with many at the same
time. vLLM is timed twice: with its engine in processes of its own, as a server has it, and in this process, as a
program that calls it may have it. On a CPU `stream` is timed with one thread and with all, because a model may be too
small for more than one; vLLM chooses its own, and in processes of its own it leaves a core to the one that talks to
clients. Weights are random, with a deviation that keeps logits apart, so that rounding does not decide between tokens.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.table import Table

from ..model.causal_lm import QEDForCausalLM
from ..model.config import QEDConfig
from ..model.decoding import stream
from .measuring import Bench, GateError, Report
from .model import PROMPT, make, tokens_per_second

Answer = Callable[[torch.Tensor, int], list[list[int]]]
DEVIATION = 0.1  # of the weights
GATED, GATED_TOKENS = 8, 32  # prompts and tokens that are compared before anything is timed
# In this order: once an engine runs in this process, vLLM looks at its environment no more.
ENGINES = {"in processes of its own": True, "in this process": False}
STATES = 2**30  # bytes for the states of each engine; vLLM would take nearly all memory


def measure(bench: Bench, *, size: dict[str, Any], requests: int, rounds: int) -> Report:
    """Compare vLLM's answers with those of `stream`, time both, print and write what was found; GateError if an answer
    differs.

    Args:
        bench: Where to run, print and write.
        size: Arguments of QEDConfig.
        requests: How many requests vLLM has at the same time.
        rounds: How often each candidate is timed.
    """
    config = QEDConfig(**(size | {"initializer_range": DEVIATION, "bos_token_id": None, "eos_token_id": None}))
    dtype = torch.bfloat16 if bench.on_gpu else torch.float32
    model = make(config, bench.device, dtype)
    prompts = torch.randint(3, config.vocab_size, (requests, PROMPT), generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        engines = {name: _engine(Path(folder), dtype, requests, processes) for name, processes in ENGINES.items()}
    for name, answer in engines.items():
        _gate(model, prompts[:GATED], answer, name)
    streams = {f"stream, {n} thread{'s' * (n > 1)}": n for n in sorted({1, torch.get_num_threads()})}
    candidates: dict[str, tuple[Callable[[int], object], int]] = {
        name: (partial(_streamed, model, prompts[:1], threads=n), 1) for name, n in streams.items()
    }
    for name, answer in engines.items():
        for n in (1, requests):
            candidates[f"vLLM {name}, {n} request{'s' * (n > 1)}"] = (partial(answer, prompts[:n]), n)
    report = bench.report(config=config.to_diff_dict(), requests=requests, prompt_tokens=PROMPT)
    rates: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, (generate, batch) in candidates.items():
            rates[name].append(tokens_per_second(bench.device, generate, batch))
        report.add(tokens_per_second=rates)
    best = [max(x) for x in zip(*(rates[name] for name in streams), strict=True)]
    ratios = {name: median(x / y for x, y in zip(row, best, strict=True)) for name, row in rates.items()}
    report.add(ratios_to_stream=ratios)
    table = Table("", "tokens/s", "of the faster stream in its round", title="medians; prompts do not count")
    for name, row in rates.items():
        table.add_row(name, f"{median(row):,.0f}", f"{ratios[name]:.2f}")
    bench.console.print(table)
    bench.say_written()
    return report


def _engine(folder: Path, dtype: torch.dtype, requests: int, processes: bool) -> Answer:
    """Start vLLM, in processes of its own or in this one; return what answers prompts [N, T] with so many tokens."""
    from vllm import LLM, SamplingParams

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(processes))
    llm = LLM(
        str(folder),
        skip_tokenizer_init=True,
        dtype=str(dtype).removeprefix("torch."),
        max_model_len=1024,
        max_num_seqs=requests,
        enable_prefix_caching=False,
        disable_log_stats=True,
        kv_cache_memory_bytes=STATES,
    )

    def answer(prompts: torch.Tensor, new: int) -> list[list[int]]:
        sampling = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        given = [{"prompt_token_ids": prompt} for prompt in prompts.tolist()]
        return [list(x.outputs[0].token_ids) for x in llm.generate(given, sampling, use_tqdm=False)]

    return answer


def _streamed(model: QEDForCausalLM, prompt: torch.Tensor, new: int, *, threads: int = 1) -> list[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        tokens: list[int] = torch.cat(list(stream(model, prompt.to(model.device), max_new_tokens=new)), 1)[0].tolist()
    finally:
        torch.set_num_threads(before)
    return tokens


def _gate(model: QEDForCausalLM, prompts: torch.Tensor, answer: Answer, name: str) -> None:
    expected = [_streamed(model, prompt[None], GATED_TOKENS) for prompt in prompts]
    wrong = sum(x != y for x, y in zip(answer(prompts, GATED_TOKENS), expected, strict=True))
    if wrong:
        raise GateError(
            f"correctness gate: {wrong} of {len(expected)} answers of vLLM {name} are not those of `stream`"
        )
