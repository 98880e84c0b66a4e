"""Which route every piece of a model takes when it trains, reads a prompt and decodes, and why not the others."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ..layers import Attention, Mixer
from ..layers.routes import BLOCK, CONVOLUTION, NORM, OPERANDS, PRODUCT, PROJECTION
from ..ops.routes import RECURRENCE
from ..routes import AUTO, REFERENCE, Call, Choice
from .causal_lm import QEDForCausalLM, QEDModel
from .fingerprint import fingerprint
from .matrices import converted, matrices
from .routes import GENERATE, PROMPT, Asked, generation_asked

TOKENS = 2048  # of the training sequence and of the prompt that are explained, unless the caller says otherwise


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The choice of every piece, by mode and by kind of layer; prints as a table."""

    title: str
    choices: dict[str, dict[str, dict[str, Choice]]]

    def __str__(self) -> str:
        lines = [self.title]
        for mode, kinds in self.choices.items():
            lines.append(f"\n{mode}")
            for kind, pieces in kinds.items():
                lines.append(f"  {kind}")
                for piece, choice in pieces.items():
                    lines.append(f"    {piece:<12} {choice.route}: {choice.reason}")
                    lines += [f"    {'':<12}   not {name}: {why}" for name, why in choice.passed_over.items()]
        return "\n".join(lines)


def explain_model(
    model: QEDForCausalLM | QEDModel, *, batch: int = 1, tokens: int = TOKENS, **generation: Any
) -> Explanation:
    """Which route each piece of a model takes, and why not the others. Nothing is computed.

    Training is explained as `qed train` runs it: compiled on a GPU, and as written elsewhere. Prefill reads prompts,
    decoding is one token of every sequence.

    Args:
        model: the model, with its head or without.
        batch: how many sequences a prompt and a step of decoding have.
        tokens: how many each prompt has, and a training sequence.
        generation: options of `generate`, such as do_sample=True; those of the model's own generation configuration
            count too.
    """
    model = getattr(model, "get_base_model", lambda: model)()  # which PEFT has wrapped
    weight = next(model.parameters())
    device, dtype = weight.device, weight.dtype
    on_gpu = device.type == "cuda"
    training = Call(device, dtype, batch=1, tokens=tokens, gradient=True, compiling=on_gpu)
    prefill = Call(device, dtype, batch=batch, tokens=tokens)
    token = Call(device, dtype, batch=batch, tokens=1, state=True)
    prompt, generate = _whole(model, prefill, generation)
    modes = {
        "training" + (", compiled" if on_gpu else ""): _layers(model, training),
        f"prefill, {tokens:,} tokens": prompt | _layers(model, prefill),
        "decoding, one token": generate | _decoding(model, token),
    }
    parameters = sum(x.numel() for x in model.parameters())
    title = f"{parameters:,} parameters in {str(dtype).removeprefix('torch.')} on {device}"
    if kinds := converted(model):
        title += (
            f"; {len(kinds)} of {len(matrices(model))} matrices are converted: {', '.join(sorted(set(kinds.values())))}"
        )
    return Explanation(title=title, choices=modes)


class _Explained(Asked):
    """What is asked for, without making the decoder that it would take."""

    @cached_property
    def decoder(self) -> Any:
        return fingerprint(self.model)


def _whole(model: Any, call: Call, generation: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The routes of the pieces that are not of one layer: of a prompt, and of `generate`; none without a head."""
    if not isinstance(model, QEDForCausalLM):
        if generation:
            raise TypeError(f"explain: expected nothing besides a model without a head, got {', '.join(generation)}")
        return {}, {}
    config = deepcopy(model.generation_config)
    unknown = config.update(**generation)
    if unknown:
        raise TypeError(f"explain: expected batch, tokens and options of `generate`, got {', '.join(unknown)}")
    model._prepare_special_tokens(config, True, device=torch.device("cpu"), batch_size=call.batch)
    processors = model._get_logits_processor(config, call.tokens, torch.zeros(1, 0, dtype=torch.long), device="cpu")
    mode = config.get_generation_mode().value
    plain = {mode.replace("_", " "): mode not in ("greedy_search", "sample")}
    asked = generation_asked(model, config, processors, batch=call.batch, cache=None, **plain)
    prompt = _Explained(model=model, batch=call.batch)
    generate = _Explained(**{x.name: getattr(asked, x.name) for x in fields(asked)})
    return (
        {"the whole model": {"prompt": PROMPT.explain(AUTO, call, prompt)}},
        {"the whole model": {"generate": GENERATE.explain(AUTO, call, generate)}},
    )


def _layers(model: Any, call: Call) -> dict[str, dict[str, Choice]]:
    return _alike([(_kind(block), _pieces(block, call)) for block in _blocks(model)])


def _decoding(model: Any, call: Call) -> dict[str, dict[str, Choice]]:
    """A block's own route; where the block runs as its layers, theirs too."""
    if not isinstance(model, QEDForCausalLM):
        return _layers(model, call)
    found, captured = [], fingerprint(model)
    for block in _blocks(model):
        uncaptured = isinstance(captured, str)
        choice = _as_layers(str(captured)) if uncaptured else BLOCK.explain(block.impl, call, block)
        compiling = choice.route == "compiled"
        inside = {} if choice.route == "triton" else _pieces(block, call._replace(compiling=compiling))
        found.append((_kind(block), {"block": choice} | inside))
    return _alike(found)


def _as_layers(why_not: str) -> Choice:
    """The choice of a block that decodes as its layers, because no step can be captured."""
    others = dict.fromkeys(BLOCK.names[:-1], why_not)
    return Choice(route=REFERENCE, reason="the block's own forward, with no captured step", passed_over=others)


def _alike(layers: list[tuple[str, dict[str, Choice]]]) -> dict[str, dict[str, Choice]]:
    """Choices by kind of layer: layers that choose alike are said once."""
    groups: list[tuple[tuple[str, dict[str, Choice]], list[int]]] = []
    for i, layer in enumerate(layers):
        same = next((numbers for known, numbers in groups if known == layer), None)
        if same is None:
            groups.append((layer, [i]))
        else:
            same.append(i)
    return {f"{_numbers(numbers)} ({kind})": choices for (kind, choices), numbers in groups}


def _blocks(model: Any) -> list[Any]:
    return list(model.model.layers if isinstance(model, QEDForCausalLM) else model.layers)


def _kind(block: Any) -> str:
    return block.mixer.rule if isinstance(block.mixer, Mixer) else type(block.mixer).__name__


def _numbers(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"layer {numbers[0]}"
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"layers {numbers[0]} to {numbers[-1]}"
    return f"layers {', '.join(map(str, numbers))}"


def _pieces(block: Any, call: Call) -> dict[str, Choice]:
    mixer, mlp = block.mixer, block.mlp
    choices: dict[str, Choice] = {}
    if isinstance(mixer, Mixer):
        choices["recurrence"] = RECURRENCE.explain(mixer.impl, call, mixer.head_dim, mixer.value_head_dim)
        choices["operands"] = OPERANDS.explain(mixer.impl, call, mixer)
        if choices["operands"].route != "triton":
            choices["convolution"] = CONVOLUTION.explain(mixer.impl, call, mixer.conv.weight.shape[1])
    choices["norm"] = NORM.explain(block.mixer_norm.impl, call)
    choices["product"] = PRODUCT.explain(mlp.impl, call)
    if isinstance(mixer, Mixer | Attention):
        choices["projection"] = _projection(mixer.o_proj, call, mixer.impl)
    return choices


def _projection(linear: nn.Module, call: Call, impl: Any) -> Choice:
    """Of the mixer's last matrix, which is added to the residual stream."""
    residual = torch.empty(1, 1, dtype=call.dtype)
    return PROJECTION.explain(impl, call, linear, residual)
