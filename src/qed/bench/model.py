"""`qed bench model`: prefill and generation of the whole model, beside flash-linear-attention's of the same size.

Nothing is timed before it is right: prefill, decoding token by token and the compiled blocks must give the logits of a
plain pass in float32. Weights are random. Speed depends on them in one way: chunks of tokens that decay far are cut
into parts, and a trained model has many of those, a new one none. So a model whose every chunk decays far is timed too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from ..model.causal_lm import QEDForCausalLM, compile_blocks
from ..model.config import QEDConfig
from ..model.decoding import Decoder, recurrent_mixers, stream
from ..testing import relative_error
from .measuring import Bench, GateError, Report, seconds

LOGITS_BAR = 5e-2  # of bfloat16 after all layers: 2⁻⁸ a rounding, adding up over 48 of them as a random walk does
PROMPT, NEW, NEW_FLA = 128, 128, 24  # tokens
FASTER = 32.0  # times a new model's decay: then a channel falls below exp(−110) in every chunk


def make(config: QEDConfig, device: str, dtype: torch.dtype) -> QEDForCausalLM:
    """Make a model for inference, whose random weights are always the same.

    Args:
        config: The model's configuration.
        device: Where it is to be.
        dtype: The precision of its weights.
    """
    torch.manual_seed(0)
    return QEDForCausalLM(config).to(device=device, dtype=dtype).eval()


@torch.no_grad()
def decay_faster(model: QEDForCausalLM) -> QEDForCausalLM:
    """Make every layer of a new model decay so fast that all its chunks are cut; return the model."""
    for mixer in recurrent_mixers(model):
        mixer.A_log.add_(math.log(FASTER))
    return model


def fla_model(config: QEDConfig, device: str, dtype: torch.dtype) -> Any:
    """Make a model of flash-linear-attention's GDN-2 layers in its own stack, with as many layers and heads.

    Args:
        config: The configuration of our model of the same size.
        device: Where it is to be.
        dtype: The precision of its weights.
    """
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
def gate(config: QEDConfig, device: str, dtype: torch.dtype, compiled: bool = True) -> dict[str, float]:
    """Compare the last 16 logits of 300 tokens with a plain pass of the same weights in float32.

    Args:
        config: The model's configuration.
        device: Where to compare.
        dtype: The precision of the model's weights.
        compiled: Whether compiled blocks are compared too.

    Returns:
        Relative errors of prefill, of decoding, and of the compiled blocks.
    """
    ids = torch.randint(3, config.vocab_size, (2, 300), generator=torch.Generator().manual_seed(0)).to(device)
    model = make(config, device, dtype)
    truth = make(config, device, dtype).float()(ids).logits[:, -16:]  # the same rounded weights
    errors = {"prefill": relative_error(model(ids).logits[:, -16:], truth)}
    cache = model(ids[:, :-16], use_cache=True).past_key_values
    decoder = Decoder(model, 2)
    decoder.start(cache)
    steps = [decoder.step(ids[:, t : t + 1]).clone() for t in range(284, 300)]
    errors["decoding"] = relative_error(torch.stack(steps, 1), truth)
    if compiled:
        compile_blocks(model)
        errors["compiled"] = relative_error(model(ids).logits[:, -16:], truth)
    return errors


def tokens_per_second(device: str, generate: Callable[[int], object], batch: int, new: int = NEW) -> float:
    """Time generation: a long call less a short one, so that the prompt and the set-up do not count.

    Args:
        device: Where `generate` runs.
        generate: Generates as many tokens for each row as it is told.
        batch: Rows that it generates at a time.
        new: Tokens by which the long call is longer.
    """
    seconds(device, partial(generate, 8))
    return batch * new / (seconds(device, partial(generate, 8 + new)) - seconds(device, partial(generate, 8)))


@torch.no_grad()
def generate_greedily(model: Any, prompt: Tensor, new: int) -> Tensor:
    """Generate exactly `new` tokens with transformers' `generate`.

    Args:
        model: A model of transformers.
        prompt: Its input, [B, T], without padding.
        new: How many tokens.
    """
    length = {"max_new_tokens": new, "min_new_tokens": new}
    mask = torch.ones_like(prompt)
    return model.generate(prompt, attention_mask=mask, do_sample=False, pad_token_id=0, **length)


@torch.no_grad()
def prefill(model: Any, ids: Tensor) -> None:
    """Read prompts `ids` [B, T], and keep the states after them."""
    model(input_ids=ids, use_cache=True, logits_to_keep=1)


def measure(bench: Bench, *, config: QEDConfig, rounds: int) -> Report:
    """Compare the model with a plain pass, time it, print and write what was found; GateError if it is not right.

    Args:
        bench: Where to run, print and write.
        config: The model's configuration.
        rounds: Prefills of each candidate that count.
    """
    dtype = torch.bfloat16 if bench.on_gpu else torch.float32
    errors = gate(config, bench.device, dtype)
    bench.console.print("relative errors of logits: " + ", ".join(f"{name} {x:.1e}" for name, x in errors.items()))
    over = {name: x for name, x in errors.items() if not x <= LOGITS_BAR}
    if over:
        raise GateError(f"correctness gate: logits further from float32 than {LOGITS_BAR}: {over}")
    report = bench.report(config=config.to_diff_dict(), logits_errors=errors)
    models = {"qed": make(config, bench.device, dtype), "qed compiled": make(config, bench.device, dtype)}
    compile_blocks(models["qed compiled"])
    models["qed, strong decay"] = decay_faster(make(config, bench.device, dtype))
    if bench.fla:
        models["fla gdn2"] = fla_model(config, bench.device, dtype)

    def ids(batch: int, tokens: int) -> Tensor:
        return torch.randint(3, config.vocab_size, (batch, tokens), device=bench.device)

    rates: dict[str, dict[str, float]] = {}
    for batch, tokens in ((1, 32768), (16, 4096)) if bench.on_gpu else ((1, 512),):
        given = ids(batch, tokens)
        times = bench.take_turns({name: partial(prefill, model, given) for name, model in models.items()}, rounds)
        rates[f"{batch} x {tokens}"] = {n: batch * tokens / x["median"] * 1e3 for n, x in times.items()}
        report.add(prefill_tokens_per_second=rates)
    generation: dict[str, dict[str, float]] = {}
    for batch in (1, 64):
        generation[str(batch)] = _generation(bench.device, models, ids(batch, PROMPT))
        report.add(generation_tokens_per_second=generation)
    for title, rows in (("generation, tokens/s, by batch", generation), ("prefill, tokens/s", rates)):
        table = Table("", *next(iter(rows.values())), title=title)
        for name, row in rows.items():
            table.add_row(name, *(f"{x:,.0f}" for x in row.values()))
        bench.console.print(table)
    bench.say_written()
    return report


def _generation(device: str, models: dict[str, Any], prompt: Tensor) -> dict[str, float]:
    """Time `stream` of our model, and transformers' `generate` of ours and of fla's."""

    def streamed(tokens: int) -> Tensor:
        return torch.cat(list(stream(models["qed"], prompt, max_new_tokens=tokens)), 1)

    batch = len(prompt)
    rates = {"qed, stream": tokens_per_second(device, streamed, batch)}
    for name, new in (("qed", NEW), ("fla gdn2", NEW_FLA)):
        if name in models:
            generate = partial(generate_greedily, models[name], prompt)
            rates[f"{name}, model.generate"] = tokens_per_second(device, generate, batch, new)
    return rates
