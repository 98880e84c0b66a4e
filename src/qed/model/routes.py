"""When a prompt and a `generate` are captured: two pieces of the whole model, as tables of routes with obstacles.

    prompt    tokens that are read at once, from a cache or from the beginning, up to the logits after the last; one
              token of sequences that have begun is a step
    generate  everything after the prompt: steps, the choice of tokens, and where texts end

The routes of single layers are in `layers/routes.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationMixin

from ..routes import REFERENCE, Call, Piece, Route, no_obstacle
from .decoding import LENGTHS, MOST_TOKENS, Decoder, padded_length
from .generating import generate_captured
from .sampling import Chooser

if TYPE_CHECKING:
    from .cache import QEDCache
    from .causal_lm import QEDForCausalLM


@dataclass(kw_only=True)
class Asked:
    """What a call of the model or of `generate` asks for, as far as the routes look at it."""

    model: QEDForCausalLM
    batch: int
    cache: QEDCache | None = None  # None for one that is made when it is needed
    keeps_cache: bool = True
    masked: bool = False  # whether there is a mask of the tokens
    only_plain: tuple[str, ...] = ()  # what is asked for that only the plain way has, in words
    chooser: Chooser = field(default_factory=Chooser)

    @cached_property
    def decoder(self) -> Decoder | str:
        """The decoder, or why there is none. It is looked for when it is first asked for, since that takes time."""
        return self.model.decoders.look(self.model, self.batch, self.cache)

    def steps(self, tokens: int) -> bool:
        """Return whether so many tokens are one step of sequences that have begun."""
        return tokens == 1 and not self.masked and self.cache is not None and self.cache.is_initialized


def generation_asked(
    model: QEDForCausalLM, config: Any, processors: Any, *, batch: int, cache: QEDCache | None, **plain: bool
) -> Asked:
    """Return what a `generate` asks for.

    Args:
        model: the model.
        config: the generation configuration, as transformers has prepared it.
        processors: the processors of scores.
        batch: how many texts there are.
        cache: the cache, if there is one already.
        plain: what else only transformers' own loop has, and whether it is asked for.
    """
    plain = {"results beside the tokens (return_dict_in_generate)": config.return_dict_in_generate} | plain
    return Asked(
        model=model,
        batch=batch,
        cache=cache,
        keeps_cache=config.use_cache is not False,
        only_plain=tuple(words for words, wanted in plain.items() if wanted),
        chooser=Chooser(processors, draws=bool(config.do_sample)),
    )


def _pays(device: torch.device) -> bool:
    """Return whether a device is one on which launching kernels may take longer than running them."""
    return device.type == "cuda"


def _inference_obstacle(call: Call, asked: Asked) -> str | None:
    """What stands in the way of everything captured that does not take long to find out."""
    if not _pays(call.device):
        return f"it pays on a GPU alone, and the tokens are on {call.device}"
    if call.compiling or (call.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return "the call is being compiled or captured into a larger program"
    if asked.model.training or call.gradient:
        return "it has no gradient: it takes a model in evaluation mode, without gradients"
    if not asked.keeps_cache:
        return "no cache is kept (use_cache=False)"
    if asked.cache is not None and asked.cache.rewind:
        return "the cache can go back (rewind), for which every token's operands have to be kept"
    return f"only the plain way has {asked.only_plain[0]}" if asked.only_plain else None


def _prompt_obstacle(call: Call, asked: Asked) -> str | None:
    why_not = _inference_obstacle(call, asked)
    if why_not is not None:
        return why_not
    if not asked.steps(call.tokens) and (call.tokens < 1 or padded_length(call.batch, call.tokens) is None):
        return (
            f"it takes 1 to {LENGTHS[-1]:,} tokens a row and {MOST_TOKENS:,} in all, padded, "
            f"and these are {call.batch} × {call.tokens:,}"
        )
    return asked.decoder if isinstance(asked.decoder, str) else None


def _generate_obstacle(call: Call, asked: Asked) -> str | None:
    why_not = _inference_obstacle(call, asked) or asked.chooser.obstacle()
    if why_not is not None:
        return why_not
    return asked.decoder if isinstance(asked.decoder, str) else None


def _read_plainly(asked: Asked, cache: QEDCache, tokens: Tensor, mask: Tensor | None) -> Tensor:
    """Read tokens [B, T] into a cache, and return the logits [B, vocabulary] after the last column."""
    found = asked.model.model(tokens, attention_mask=mask, past_key_values=cache, use_cache=True)
    logits: Tensor = asked.model.lm_head(found.last_hidden_state[:, -1])
    return logits


def _read_captured(asked: Asked, cache: QEDCache, tokens: Tensor, mask: Tensor | None) -> Tensor:
    """As `_read_plainly`; the logits are in memory that the next call overwrites. For a row whose last column is
    padding they are those after its last token, where the plain way has those of the padding, which mean nothing."""
    assert isinstance(asked.decoder, Decoder)
    if not asked.steps(tokens.shape[1]):
        return asked.decoder.read(cache, tokens, mask)
    asked.decoder.start(cache)
    cache.tokens += 1
    return asked.decoder.step(tokens)


PROMPT = Piece(
    "prompt",
    Route(
        "captured",
        _read_captured,
        _prompt_obstacle,
        "one CUDA graph for each of a few lengths, captured when a length comes a second time",
    ),
    Route(REFERENCE, _read_plainly, no_obstacle, "the model's forward, launched by Python"),
)
GENERATE = Piece(
    "generate",
    Route(
        "captured",
        generate_captured,
        _generate_obstacle,
        "one CUDA graph a token that chooses the next token too; texts are looked at every few tokens",
    ),
    Route(REFERENCE, GenerationMixin._sample, no_obstacle, "transformers' own loop"),
)
