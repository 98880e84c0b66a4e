"""`qed bench model`: prefill, the first token and generation of the whole model, beside flash-linear-attention's of the
same size.

Nothing is timed before it is right: prefill, captured prompts, decoding token by token and the compiled blocks must
give the logits of a plain pass in float32, and `generate` the tokens of `stream`. Weights are random. Speed depends on
them in one way: chunks of tokens that decay far are cut into parts, and a trained model has many of those, a new one
none. So a model whose every chunk decays far is timed too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from ..model import routes
from ..model.cache import QEDCache
from ..model.causal_lm import QEDForCausalLM, compile_blocks
from ..model.config import QEDConfig
from ..model.decoding import Decoder, recurrent_mixers, stream
from ..model.sampling import Sampling
from ..testing import relative_error
from .measuring import Bench, GateError, Report, seconds

LOGITS_BAR = 5e-2  # of bfloat16 after all layers: 2⁻⁸ a rounding, adding up over 48 of them as a random walk does
PROMPT, NEW, NEW_FLA = 128, 128, 24  # tokens
SAMPLING: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "top_p": 0.95}
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
        Relative errors of prefill, of a captured prompt, of one that continues, of decoding, and of the compiled
        blocks.
    """
    ids = torch.randint(3, config.vocab_size, (2, 300), generator=torch.Generator().manual_seed(0)).to(device)
    model = make(config, device, dtype)
    truth = make(config, device, dtype).float()(ids).logits[:, -16:]  # the same rounded weights
    errors = {"prefill": relative_error(model(ids).logits[:, -16:], truth)}
    for _ in range(3):  # as it is, captured, and replayed
        cache = model(ids[:, :200], use_cache=True, logits_to_keep=1).past_key_values
        continued = model(ids[:, 200:], past_key_values=cache, logits_to_keep=1).logits
        whole = model(ids, use_cache=True, logits_to_keep=1).logits
        for name, logits in (("prompt", whole), ("prompt continued", continued)):
            errors[name] = max(errors.get(name, 0.0), relative_error(logits, truth[:, -1:]))
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
def generate(model: Any, prompt: Tensor, new: int, **options: Any) -> Tensor:
    """Generate exactly `new` tokens with `model.generate`.

    Args:
        model: A model of transformers.
        prompt: Its input, [B, T], without padding.
        new: How many tokens.
        options: Of sampling; none for the likeliest tokens.
    """
    length = {"max_new_tokens": new, "min_new_tokens": new, "eos_token_id": None, "pad_token_id": 0}
    mask = torch.ones_like(prompt)
    return model.generate(prompt, attention_mask=mask, do_sample=bool(options), **length, **options)


def streamed(model: QEDForCausalLM, prompt: Tensor, new: int, **options: Any) -> Tensor:
    """Generate exactly `new` tokens with `stream`, and return them behind their prompts.

    Args:
        model: The model.
        prompt: Its input, [B, T], without padding.
        new: How many tokens.
        options: Of `Sampling`; none for the likeliest tokens.
    """
    return torch.cat([prompt, *stream(model, prompt, max_new_tokens=new, sampling=Sampling(**options))], 1)


def gate_tokens(model: QEDForCausalLM, prompt: Tensor) -> None:
    """Check that `generate` and `stream` give the same tokens, greedy and drawn with one seed; GateError if not.

    Args:
        model: The model.
        prompt: Tokens [B, T].
    """
    for name, options in (("greedy", {}), ("drawn", SAMPLING)):
        found = []
        for way in (streamed, generate, streamed, generate):  # the first of each way runs as it is, the others captured
            torch.manual_seed(0)
            found.append(way(model, prompt, 24, **options))
        if not all(torch.equal(x, found[0]) for x in found):
            raise GateError(f"correctness gate: `generate` gives other {name} tokens than `stream`")


@torch.no_grad()
def prefill(model: Any, ids: Tensor) -> None:
    """Read prompts `ids` [B, T], and keep the states after them."""
    model(input_ids=ids, use_cache=True, logits_to_keep=1)


@torch.no_grad()
def _first_token(model: Any, ids: Tensor) -> list[int]:
    """The token after a prompt, as `generate` and `stream` find it, on the host."""
    return model(ids, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1).tolist()


@torch.no_grad()
def _first_token_plainly(model: QEDForCausalLM, ids: Tensor) -> list[int]:
    """The same on the plain route, whose kernels Python launches."""
    logits = routes.PROMPT.routes[-1].run(routes.Asked(model=model, batch=len(ids)), QEDCache(), ids, None)
    return logits.argmax(-1).tolist()


@torch.no_grad()
def _next_piece(model: QEDForCausalLM, ids: Tensor, cache: QEDCache) -> None:
    model(ids, past_key_values=cache, logits_to_keep=1)


def first_tokens(bench: Bench, models: dict[str, Any], lengths: tuple[int, ...], rounds: int) -> dict[str, Any]:
    """Time the first token after prompts of one sequence, in milliseconds until it is on the host.

    Args:
        bench: Where to run.
        models: Ours as "qed", and fla's if there is one.
        lengths: Tokens of the prompts.
        rounds: How often each counts.
    """
    found: dict[str, Any] = {}
    ours = models["qed"]
    for tokens in lengths:
        ids = torch.randint(3, ours.config.vocab_size, (1, tokens), device=bench.device)
        calls: dict[str, Callable[[], object]] = {"qed": partial(_first_token, ours, ids)}
        calls["qed, plain forward"] = partial(_first_token_plainly, ours, ids)
        cache = ours(ids[:, :64], use_cache=True).past_key_values
        calls["qed, a piece that continues"] = partial(_next_piece, ours, ids, cache)
        if "fla gdn2" in models:
            calls["fla gdn2"] = partial(_first_token, models["fla gdn2"], ids)
        found[str(tokens)] = {name: x["median"] for name, x in bench.take_turns(calls, rounds).items()}
    return found


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

    gate_tokens(models["qed"], ids(2, PROMPT))
    first = first_tokens(bench, models, (128, 512, 2048, 4096) if bench.on_gpu else (128,), 3 * rounds)
    report.add(first_token_ms=first)
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
    titles = {"first token, ms, by tokens of the prompt": first, "generation, tokens/s, by batch": generation}
    for title, rows in (titles | {"prefill, tokens/s": rates}).items():
        table = Table("", *next(iter(rows.values())), title=title)
        for name, row in rows.items():
            table.add_row(name, *(f"{x:,.1f}" if "ms" in title else f"{x:,.0f}" for x in row.values()))
        bench.console.print(table)
    bench.say_written()
    return report


def _generation(device: str, models: dict[str, Any], prompt: Tensor) -> dict[str, float]:
    """Time `stream` and `generate` of our model, greedy and sampled, and transformers' `generate` of fla's."""
    batch, rates = len(prompt), {}
    options: dict[str, Any]
    for sampled, options in (("", {}), (", sampled", SAMPLING)):
        for name, way in (("stream", streamed), ("model.generate", generate)):
            call = partial(way, models["qed"], prompt, **options)
            rates[f"qed, {name}{sampled}"] = tokens_per_second(device, call, batch)
    if "fla gdn2" in models:
        call = partial(generate, models["fla gdn2"], prompt)
        rates["fla gdn2, model.generate"] = tokens_per_second(device, call, batch, NEW_FLA)
    return rates
