"""`generate` after the prompt, with captured steps: the same tokens as transformers' own loop gives.

That loop looks at every token before it makes the next one, so that a GPU waits for Python after each. Here a few
tokens are made at a time, and then looked at in their order. What came after the end of all texts is cut off, and what
it has changed is undone: draws of the random generator, and a cache that the caller has too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import EosTokenCriteria, MaxLengthCriteria

from .decoding import STRIDE, Decoder
from .sampling import Chooser, seen_tokens

if TYPE_CHECKING:
    from .cache import QEDCache


class Ends:
    """Where the texts of a batch end, by transformers' stopping criteria.

    The criteria for end tokens and for a length are known, and look at numbers on the host. Any other is called after
    each token, in the order of the tokens.
    """

    def __init__(self, criteria: Any, pad: Tensor | None, batch: int):
        """
        Args:
            criteria: a list of stopping criteria.
            pad: the token that follows the end of a text; None if there is none.
            batch: how many texts there are.
        """
        self.longest = min((x.max_length for x in criteria if type(x) is MaxLengthCriteria), default=None)
        self.tokens = {
            end for x in criteria if type(x) is EosTokenCriteria for end in x.eos_token_id.flatten().tolist()
        }
        self.others = [x for x in criteria if type(x) not in (MaxLengthCriteria, EosTokenCriteria)]
        pads = any(hasattr(x, "eos_token_id") for x in criteria)
        self.pad = int(pad) if pads and pad is not None else None
        self.unfinished = [True] * batch

    @property
    def all_ended(self) -> bool:
        """Whether every text has ended."""
        return not any(self.unfinished)

    def padded(self, column: Sequence[int]) -> list[int]:
        """Return the next token of every text, with padding for those that have ended."""
        if self.pad is None:
            return list(column)
        return [token if goes_on else self.pad for token, goes_on in zip(column, self.unfinished, strict=True)]

    def look(self, column: list[int], length: int, text: Tensor) -> None:
        """Find out which texts end with their last token.

        Args:
            column: the last token of every text.
            length: how many tokens each text has.
            text: all of them [B, length], on the device; looked at if there are `others`.
        """
        too_long = self.longest is not None and length >= self.longest
        done = [too_long or token in self.tokens for token in column]
        for criterion in self.others:
            said = torch.as_tensor(criterion(text, None)).expand(len(column)).tolist()
            done = [x or y for x, y in zip(done, said, strict=True)]
        self.unfinished = [x and not y for x, y in zip(self.unfinished, done, strict=True)]


@dataclass(kw_only=True)
class Generation:
    """A running `generate`: the texts so far, and what continues them."""

    decoder: Decoder
    cache: QEDCache
    chooser: Chooser
    text: Tensor  # [B, T]
    ends: Ends
    streamer: Any = None
    kept: list[Tensor] = field(default_factory=list)  # states to go back to, where the caller has the cache too

    def add(self, block: Tensor) -> None:
        """Add tokens [B, n] to the texts, up to the one with which all have ended, with padding after the ends. If
        whoever looks at a token raises an error, that token is the last."""
        before, found = self.text, block.t().tolist()
        columns: list[list[int]] = []
        try:
            for column in found:
                columns.append(self.ends.padded(column))
                if self.ends.others:
                    self.text = torch.cat([self.text, block.new_tensor(columns[-1])[:, None]], 1)
                self.ends.look(columns[-1], before.shape[1] + len(columns), self.text)
                if self.streamer is not None:
                    self.streamer.put(torch.tensor(columns[-1]))
                if self.ends.all_ended:
                    break
        finally:
            same = columns == found[: len(columns)]
            added = block[:, : len(columns)] if same else block.new_tensor(columns).t()
            self.text = torch.cat([before, added], 1)

    def go_on(self, count: int) -> None:
        """Make up to `count` tokens more, and take back what came after the end."""
        cache, decoder, length = self.cache, self.decoder, self.text.shape[1]
        generator = _generator_state(self.text.device) if self.chooser.draws else None
        with decoder.lock:
            if cache.given:
                decoder.start(cache)
                self.kept = self.kept or [torch.empty_like(x) for x in decoder.tensors]
                torch._foreach_copy_(self.kept, decoder.tensors)
            block = decoder.follow(cache, self.text, self.chooser, count)
        try:
            self.add(block)
        finally:
            steps = self.text.shape[1] - length
            cache.tokens -= count - steps
            if generator is not None and steps < count:
                _set_generator_state(generator, self.text.device)
                for _ in range(steps):
                    torch.empty_like(decoder.logits, dtype=torch.float32).exponential_()
            if self.kept and not torch.equal(self.text[:, length:], block):  # other tokens were read than there are
                with decoder.lock:
                    decoder.start(cache)
                    torch._foreach_copy_(decoder.tensors, self.kept)
                    for column in self.text[:, length - 1 : -1].split(1, 1):
                        decoder.step(column)


@torch.no_grad()
def generate_captured(
    decoder: Decoder,
    cache: QEDCache,
    logits: Tensor,
    *,
    chooser: Chooser,
    text: Tensor,
    ends: Ends,
    streamer: Any = None,
) -> Tensor:
    """Return the texts [B, T + new] with all that was generated.

    Args:
        decoder: the decoder of the model for so many texts.
        cache: the states after the prompts.
        logits: the logits after the prompts, [B, vocabulary].
        chooser: how tokens are chosen.
        text: the prompts [B, T].
        ends: where texts end.
        streamer: gets the tokens [B] one by one; None for nobody.
    """
    running = Generation(decoder=decoder, cache=cache, chooser=chooser, text=text, ends=ends, streamer=streamer)
    seen = seen_tokens(text, logits.shape[1]) if chooser.counts else None
    running.add(chooser.at(text.shape[1])(logits, seen)[:, None])
    count = 1
    while not ends.all_ended:
        count = min(2 * count, STRIDE)  # few at first, since many texts are short
        left = count if ends.longest is None else ends.longest - running.text.shape[1]
        running.go_on(min(count, left))
    if streamer is not None:
        streamer.end()
    return running.text


def _generator_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_generator_state(state: Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
