"""`generate` after the prompt, with captured steps: the same tokens as transformers' own loop gives.

That loop looks at every token before it makes the next one, so that a GPU waits for Python after each. Here a few
tokens are made at a time, and then looked at in their order. What came after the end of all texts is cut off, and what
it has changed is undone: draws of the random generator, and a cache that the caller has too.
"""

from __future__ import annotations

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

    The criteria for end tokens and for a length are known, and need no tensors on the device. Any other is called after
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
        ends = [x.eos_token_id.flatten().cpu() for x in criteria if type(x) is EosTokenCriteria]
        self.tokens = torch.cat([*ends, torch.empty(0, dtype=torch.long)])
        self.others = [x for x in criteria if type(x) not in (MaxLengthCriteria, EosTokenCriteria)]
        pads = any(hasattr(x, "eos_token_id") for x in criteria)
        self.pad = pad.cpu() if pads and pad is not None else None
        self.unfinished = torch.ones(batch, dtype=torch.bool)

    @property
    def all_ended(self) -> bool:
        """Whether every text has ended."""
        return not bool(self.unfinished.any())

    def padded(self, column: Tensor) -> Tensor:
        """Return the next token of every text [B], with padding for those that have ended."""
        return column if self.pad is None else torch.where(self.unfinished, column, self.pad)

    def look(self, column: Tensor, length: int, text: Tensor) -> None:
        """Find out which texts end with their last token.

        Args:
            column: the last token of every text [B], on the host.
            length: how many tokens each text has.
            text: all of them [B, length], on the device; looked at if there are `others`.
        """
        done = torch.isin(column, self.tokens)
        if self.longest is not None and length >= self.longest:
            done = torch.ones_like(done)
        for criterion in self.others:
            done = done | torch.as_tensor(criterion(text, None)).cpu()
        self.unfinished = self.unfinished & ~done


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

    def add(self, block: Tensor) -> Tensor:
        """Add tokens [B, n] to the texts, up to the one with which all have ended. Return those that were added, on the
        host, with padding after the ends."""
        found, before = block.cpu(), self.text
        added = found.clone()
        for i in range(block.shape[1]):
            added[:, i] = self.ends.padded(found[:, i])
            if self.ends.others:
                self.text = torch.cat([self.text, added[:, i : i + 1].to(block.device)], 1)
            self.ends.look(added[:, i], before.shape[1] + i + 1, self.text)
            if self.streamer is not None:
                self.streamer.put(added[:, i].clone())
            if self.ends.all_ended:
                added = added[:, : i + 1]
                break
        self.text = torch.cat([before, added.to(block.device)], 1)
        return added

    def go_on(self, count: int) -> None:
        """Make up to `count` tokens more, and take back what came after the end."""
        cache, decoder, last = self.cache, self.decoder, self.text[:, -1:]
        if cache.given:
            decoder.start(cache)
            self.kept = self.kept or [torch.empty_like(x) for x in decoder.tensors]
            torch._foreach_copy_(self.kept, decoder.tensors)
        generator = _generator_state(last.device) if self.chooser.draws else None
        block = decoder.follow(cache, self.text, self.chooser, count)
        added = self.add(block)
        steps = added.shape[1]
        cache.tokens -= count - steps
        if generator is not None and steps < count:
            _set_generator_state(generator, last.device)
            for _ in range(steps):
                torch.empty_like(decoder.logits, dtype=torch.float32).exponential_()
        if self.kept and not added.equal(block.cpu()):  # other tokens were read than the texts have
            decoder.start(cache)
            torch._foreach_copy_(decoder.tensors, self.kept)
            for i in range(steps):
                decoder.step(last if i == 0 else added[:, i - 1 : i].to(last.device))


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
