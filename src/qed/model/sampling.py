"""How the next token is chosen, in `generate` and in `stream` alike: processors of transformers change the scores, and
then the likeliest token is taken or one is drawn.

A captured step holds the values that these processors had, and cannot look at a text that grows. Most processors look
at the scores alone. A repetition penalty looks at which tokens the text has, which is kept as a mask of fixed size. The
two that forbid the end of a text before a length are dropped once the length is reached. Any other processor is not
known here, and says so in `Chooser.obstacle`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import (
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

OF_SCORES_ALONE = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How `stream` chooses the next token; the same words mean the same in `generate`.

    With temperature 0 it takes the likeliest token, otherwise it draws one. `top_k` and `top_p` restrict the draw to so
    many tokens, or to so much probability, and `min_p` to tokens that have at least this part of the likeliest one's
    probability. `repetition_penalty` makes tokens that the text already has less likely, if it is more than 1.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature: expected 0 or more, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k: expected 0 (all) or more, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: expected more than 0 and at most 1, got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p: expected a number from 0 to 1, got {self.min_p}")
        if not self.repetition_penalty > 0:
            raise ValueError(f"repetition_penalty: expected more than 0, got {self.repetition_penalty}")

    def chooser(self) -> Chooser:
        """Return what chooses so: the processors that `generate` would make, in its order."""
        found: list[Any] = []
        if self.repetition_penalty != 1:
            found.append(RepetitionPenaltyLogitsProcessor(float(self.repetition_penalty)))
        if self.temperature == 0:
            return Chooser(found, draws=False)
        if self.temperature != 1:
            found.append(TemperatureLogitsWarper(float(self.temperature)))
        if self.top_k:
            found.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            found.append(TopPLogitsWarper(self.top_p))
        if self.min_p:
            found.append(MinPLogitsWarper(self.min_p))
        return Chooser(found, draws=True)


class Chooser:
    """Processors in their order, and whether a token is then drawn. Two with the same `key` choose alike."""

    def __init__(self, processors: Iterable[Any] = (), *, draws: bool = False):
        """
        Args:
            processors: transformers' processors of scores.
            draws: whether a token is drawn by its probability; otherwise it is the likeliest.
        """
        self.processors, self.draws = tuple(processors), draws

    def obstacle(self) -> str | None:
        """Return why these processors cannot be part of a captured step, or None."""
        for processor in self.processors:
            penalty = type(processor) is RepetitionPenaltyLogitsProcessor
            if penalty and processor.prompt_ignore_length:
                return "it knows no repetition penalty that ignores the prompt"
            if not penalty and type(processor) not in (*OF_SCORES_ALONE, *_UNTIL):
                return f"it does not know the processor {type(processor).__name__}"
        return None

    @cached_property
    def key(self) -> Hashable:
        """All that a captured step depends on. Tensors of end tokens are read from the device."""
        return self.draws, *(_settings(x) for x in self.processors)

    @cached_property
    def is_plain(self) -> bool:
        """Whether it takes the likeliest token by the logits as they are."""
        return not self.draws and not self.processors

    @cached_property
    def counts(self) -> bool:
        """Whether it looks at which tokens the text has."""
        return any(type(x) is RepetitionPenaltyLogitsProcessor for x in self.processors)

    @cached_property
    def until(self) -> tuple[int, ...]:
        """The lengths of the text at which a processor ceases to count."""
        return tuple(sorted({_UNTIL[type(x)](x) for x in self.processors if type(x) in _UNTIL}))

    def at(self, length: int) -> Chooser:
        """Return what chooses the token after a text of so many tokens: without the processors that cease before."""
        if not self.until or length < self.until[0]:
            return self
        return self._later.at(length)

    @cached_property
    def _later(self) -> Chooser:
        rest = (x for x in self.processors if type(x) not in _UNTIL or _UNTIL[type(x)](x) > self.until[0])
        return Chooser(rest, draws=self.draws)

    def __call__(self, logits: Tensor, seen: Tensor | None = None) -> Tensor:
        """Return tokens [B], chosen by logits [B, vocabulary]. The host does not wait for the device.

        Args:
            logits: of the model, in any precision.
            seen: [B, vocabulary + 1] bool, which tokens each text has (`seen_tokens`); needed if the chooser `counts`.
        """
        scores = logits.to(torch.float32)  # as `generate` does
        nothing = torch.empty(scores.shape[0], 0, dtype=torch.long, device=scores.device)
        for processor in self.processors:
            if type(processor) is RepetitionPenaltyLogitsProcessor:
                assert seen is not None
                penalised = torch.where(scores < 0, scores * processor.penalty, scores / processor.penalty)
                scores = torch.where(seen[:, : scores.shape[1]], penalised, scores)
            else:  # a text without tokens is shorter than any length before which a text must not end
                scores = processor(nothing, scores)
        return draw(scores.softmax(-1)) if self.draws else scores.argmax(-1)


def draw(probabilities: Tensor) -> Tensor:
    """Return one index for each row of probabilities, drawn by them. It is the token that `torch.multinomial` draws
    with the same state of the generator, without waiting for the device: the largest of p / E, where every E is drawn
    from the exponential distribution, is index i with probability pᵢ."""
    return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(-1)


def seen_tokens(text: Tensor, vocabulary: int, out: Tensor | None = None) -> Tensor:
    """Return which tokens each row of a text has, [B, vocabulary + 1] bool. The last column has those that are beyond
    the vocabulary.

    Args:
        text: tokens [B, T].
        vocabulary: how many tokens there are.
        out: where the result is written; None for new memory.
    """
    if out is None:
        out = torch.empty(text.shape[0], vocabulary + 1, dtype=torch.bool, device=text.device)
    return out.zero_().scatter_(1, text.clamp(max=vocabulary), True)


# Processors that forbid the end of a text until it has a length: that length.
_UNTIL: dict[type, Any] = {
    MinLengthLogitsProcessor: lambda x: x.min_length,
    MinNewTokensLengthLogitsProcessor: lambda x: x.prompt_length_to_skip + x.min_new_tokens,
}


def _settings(processor: Any) -> Hashable:
    """Return what a processor computes, as one value: two with the same change the scores in the same way."""
    if type(processor) in _UNTIL:  # as long as one counts, the length does not matter
        return "no end", tuple(processor.eos_token_id.flatten().tolist())
    return type(processor), *vars(processor).items()
