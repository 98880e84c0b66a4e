"""MQAR: multi-query associative recall, at zoology's settings.

    k₁ v₁ k₂ v₂ … kₙ vₙ  then queries, each once, among random tokens: … kᵢ → vᵢ …

Keys are tokens 1 … 4095 and values 4096 … 8191, without repetition. A query's place is an even offset after the pairs,
drawn without replacement with probability ∝ i^(0.01 − 1) for the i-th. Settings are those that zoology tests at; the
random stream is our own, so that examples are other draws of the same distribution.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..options import Options
from ..task import MeasuredTask, Measurement

if TYPE_CHECKING:
    from ...model.causal_lm import QEDForCausalLM

VOCABULARY, POWER = 8192, 0.01


class Setting(NamedTuple):
    """How long rows are, how many pairs each has, and how many rows there are."""

    length: int
    pairs: int
    examples: int


SETTINGS = (
    *(Setting(64, 4, 1000), Setting(64, 8, 1000), Setting(64, 16, 1000), Setting(128, 32, 1000)),
    *(Setting(256, 64, 1000), Setting(512, 128, 1000), Setting(1024, 256, 1000)),
)


def examples(setting: Setting, seed: int, vocabulary: int = VOCABULARY) -> tuple[Tensor, Tensor]:
    """Tokens and targets [examples, length]; targets are −100 except at queries.

    Args:
        setting: length, pairs and number of rows.
        seed: of everything random.
        vocabulary: tokens that there are; keys are of its first half, values of its second.
    """
    length, pairs, count = setting
    room = (length - 2 * pairs) // 2
    if pairs > room:
        raise ValueError(f"pairs: expected at most a quarter of {length} tokens, got {pairs}")
    random, half = np.random.default_rng(seed), vocabulary // 2
    keys = np.stack([random.choice(half - 1, pairs, replace=False) + 1 for _ in range(count)])
    values = np.stack([random.choice(half, pairs, replace=False) + half for _ in range(count)])
    tokens = random.integers(vocabulary, size=(count, length))
    tokens[:, 0 : 2 * pairs : 2], tokens[:, 1 : 2 * pairs : 2] = keys, values
    # The largest of log p plus Gumbel noise, in order, are draws without replacement.
    weight = (POWER - 1) * np.log(np.arange(1, room + 1))
    gaps = np.argsort(-(weight + random.gumbel(size=(count, room))), axis=1)[:, :pairs]
    places = 2 * pairs + 2 * gaps
    targets = np.full((count, length), -100)
    np.put_along_axis(tokens, places, keys, axis=1)
    np.put_along_axis(targets, places, values, axis=1)
    return torch.from_numpy(tokens), torch.from_numpy(targets)


@torch.no_grad()
def accuracy(model: QEDForCausalLM, tokens: Tensor, targets: Tensor, batch: int = 32) -> float:
    """The share of all queries after which the likeliest token is the right one.

    Args:
        model: to be asked.
        tokens: rows of `examples`, [examples, length].
        targets: of the same shape, −100 where nothing is asked.
        batch: rows at a time.
    """
    if model.config.vocab_size < int(tokens.max()) + 1:
        raise ValueError(f"mqar: expected a model of {VOCABULARY} tokens, got {model.config.vocab_size}")
    device, right, asked = model.device, 0, 0
    for rows, wanted in zip(tokens.split(batch), targets.split(batch), strict=True):
        predicted = model(rows.to(device), use_cache=False).logits.argmax(-1).cpu()
        there = wanted != -100
        right, asked = right + int((predicted == wanted)[there].sum()), asked + int(there.sum())
    return right / asked


def prepare(model: QEDForCausalLM, options: Options, tokenizer: str) -> Measurement:
    """The accuracy at every setting, in tokens of its own; at most `options.samples` rows of each.

    Args:
        model: which must have at least MQAR's tokens.
        options: of which `seed` and `samples` are read.
        tokenizer: not used, since there is no text.
    """
    if model.config.vocab_size < VOCABULARY:
        raise ValueError(f"mqar: expected a model of {VOCABULARY} tokens, got one of {model.config.vocab_size}")

    def run(done: Callable[[int], None]) -> dict[str, Any]:
        accuracies = {}
        for i, setting in enumerate(SETTINGS):
            setting = setting._replace(examples=min(setting.examples, options.samples or setting.examples))
            tokens, targets = examples(setting, seed=options.seed + i)
            accuracies[f"{setting.length}x{setting.pairs}"] = accuracy(model, tokens, targets)
            done(i + 1)
        return {"accuracy": accuracies}

    return Measurement(about={"seed": options.seed}, steps=len(SETTINGS), run=run)


TASKS = (
    MeasuredTask(
        name="mqar",
        title="MQAR",
        columns=("", "correct"),
        rows=lambda name, result: [(f"mqar {x}", f"{share:.1%}") for x, share in result["accuracy"].items()],
        prepare=prepare,
    ),
)
