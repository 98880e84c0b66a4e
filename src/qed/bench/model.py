"""`qed bench model`: prefill and generation of the whole model, beside flash-linear-attention's of the same size.

Nothing is timed before it is right: prefill, decoding token by token and the compiled blocks must give the logits of a
plain pass in float32. Weights are random. Speed depends on them in one way: chunks of tokens that decay far are worked
on in parts, and a trained model has many, a new one none. So a model whose every chunk decays far is timed too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ..model.causal_lm import QEDForCausalLM, compile_blocks
from ..model.config import QEDConfig
from ..model.generation import Decoder, recurrent_mixers, stream
from ..provenance import environment
from ..testing import relative_error
from .ops import GateError, Report, take_turns

LOGITS_BAR = 5e-2  # of bfloat16 after all layers: 2⁻⁸ a rounding, adding up over 48 of them as a random walk does
PROMPT, NEW, NEW_THEIRS = 128, 128, 24
FASTER = 32.0  # times a new model's decay: then a channel falls below exp(−110) in every chunk


def make(config: QEDConfig, device: str, dtype: torch.dtype) -> QEDForCausalLM:
    torch.manual_seed(0)
    return QEDForCausalLM(config).to(device=device, dtype=dtype).eval()


@torch.no_grad()
def decay_faster(model: QEDForCausalLM) -> QEDForCausalLM:
    for mixer in recurrent_mixers(model):
        mixer.A_log.add_(math.log(FASTER))
    return model


def theirs(config: QEDConfig, device: str, dtype: torch.dtype) -> Any:
    """fla's GDN-2 layers in its own stack, with as many layers and heads."""
    from fla.layers.gdn2 import GatedDeltaNet2
    from fla.models.kda import KDAConfig, KDAForCausalLM

    sizes = {"hidden_size": config.hidden_size, "num_heads": config.num_heads, "head_dim": config.head_dim}
    model = KDAForCausalLM(
        KDAConfig(
            **sizes,
            num_hidden_layers=config.num_hidden_layers,
            intermediate_size=config.intermediate_size,
            vocab_size=config.vocab_size,
            tie_word_embeddings=True,
        )
    )
    for i, block in enumerate(model.model.layers):
        block.attn = GatedDeltaNet2(**sizes, layer_idx=i)
    return model.to(device=device, dtype=dtype).eval()


@torch.no_grad()
def gate(config: QEDConfig, device: str, dtype: torch.dtype) -> dict[str, float]:
    """Relative errors of the last 16 logits of 300 tokens, against a plain pass of the same weights in float32."""
    ids = torch.randint(3, config.vocab_size, (2, 300), generator=torch.Generator().manual_seed(0)).to(device)
    model = make(config, device, dtype)
    truth = make(config, device, dtype).float()(ids).logits[:, -16:]  # the same rounded weights
    found = {"prefill": relative_error(model(ids).logits[:, -16:], truth)}
    cache = model(ids[:, :-16], use_cache=True).past_key_values
    decoder = Decoder(model, 2)
    decoder.start(cache)
    steps = [decoder.step(ids[:, t : t + 1]).clone() for t in range(284, 300)]
    found["decoding"] = relative_error(torch.stack(steps, 1), truth)
    compile_blocks(model)
    found["compiled"] = relative_error(model(ids).logits[:, -16:], truth)
    return found


def tokens_per_second(device: str, generate: Callable[[int], object], batch: int, new: int = NEW) -> float:
    """Of `new` tokens after a few: a longer call less a shorter one, so that the prompt and set-up do not count."""

    def seconds(tokens: int) -> float:
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        start = time.perf_counter()
        generate(tokens)
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        return time.perf_counter() - start

    seconds(8)
    return batch * new / (seconds(8 + new) - seconds(8))


@torch.no_grad()
def _prefill(model: Any, ids: Tensor) -> None:
    model(input_ids=ids, use_cache=True, logits_to_keep=1)


def measure(
    console: Console, *, out: Path | None, device: str, config: QEDConfig, fla: bool, rounds: int
) -> dict[str, Any]:
    """Gate, time, print, write. Raises GateError if the gate is not passed."""
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    errors = gate(config, device, dtype)
    console.print("relative errors of logits: " + ", ".join(f"{name} {x:.1e}" for name, x in errors.items()))
    over = {name: x for name, x in errors.items() if not x <= LOGITS_BAR}
    if over:
        raise GateError(f"correctness gate: logits further from float32 than {LOGITS_BAR}: {over}")
    report = Report(out, environment=environment(device), config=config.to_diff_dict(), logits_errors=errors)
    models = {"qed": make(config, device, dtype), "qed compiled": make(config, device, dtype)}
    compile_blocks(models["qed compiled"])
    models["qed, strong decay"] = decay_faster(make(config, device, dtype))
    if fla:
        models["fla gdn2"] = theirs(config, device, dtype)

    def ids(batch: int, tokens: int) -> Tensor:
        return torch.randint(3, config.vocab_size, (batch, tokens), device=device)

    def hf(model: Any, prompt: Tensor, tokens: int) -> Tensor:
        mask = torch.ones_like(prompt)
        length = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        return model.generate(prompt, attention_mask=mask, do_sample=False, pad_token_id=0, **length)

    prefill: dict[str, dict[str, float]] = {}
    for batch, tokens in ((1, 32768), (16, 4096)) if device.startswith("cuda") else ((1, 512),):
        given = ids(batch, tokens)

        calls = {name: partial(_prefill, model, given) for name, model in models.items()}
        times = take_turns(device, calls, rounds, console)
        prefill[f"{batch} x {tokens}"] = {n: batch * tokens / x["median"] * 1e3 for n, x in times.items()}
        report.add(prefill_tokens_per_second=prefill)

    generation: dict[str, dict[str, float]] = {}
    for batch in (1, 64):
        prompt, row = ids(batch, PROMPT), {}

        def streamed(tokens: int, prompt: Tensor = prompt) -> Tensor:
            return torch.cat(list(stream(models["qed"], prompt, max_new_tokens=tokens)), 1)

        row["qed, stream"] = tokens_per_second(device, streamed, batch)
        for name, model in models.items():
            if name in ("qed", "fla gdn2"):
                new = NEW_THEIRS if name.startswith("fla") else NEW
                row[f"{name}, model.generate"] = tokens_per_second(device, partial(hf, model, prompt), batch, new)
            generation[str(batch)] = row
            report.add(generation_tokens_per_second=generation)

    for title, rows in (("generation, tokens/s, by batch", generation), ("prefill, tokens/s", prefill)):
        table = Table("", *next(iter(rows.values())), title=title)
        for name, row in rows.items():
            table.add_row(name, *(f"{x:,.0f}" for x in row.values()))
        console.print(table)
    if out is not None:
        console.print(f"written to {out}")
    return report
