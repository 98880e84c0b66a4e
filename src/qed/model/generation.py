"""Fast decoding: the model one token at a time, its states written in place; on a GPU one CUDA graph a token.

A token of a 340M model is a hundred small kernels and more, and starting them from Python takes longer than running
them. So a whole step, from a token to the next one, is captured once and then replayed. Blocks are `one_token.py`'s
kernels, or, where those cannot run them, compiled (all layers share one program). Only recurrent layers have states of
fixed size: stacks with softmax layers decode without it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..layers import Mixer, MixerState, one_token
from ..layers.sequences import DENSE
from .fingerprint import fingerprint

if TYPE_CHECKING:
    from .cache import QEDCache
    from .causal_lm import QEDForCausalLM

WARM_UP = 3  # runs before a capture: compile, allocate
STRIDE = 16  # tokens between two looks at what was generated: a look waits for the GPU


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """temperature 0: the likeliest token. top_k, top_p: only among so many tokens, or so much probability."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature: expected 0 or more, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k: expected 0 (all) or more, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: expected more than 0 and at most 1, got {self.top_p}")

    def choose(self, logits: Tensor) -> Tensor:
        """logits [B, vocabulary] → tokens [B]. Nothing here waits for the device."""
        if self.temperature == 0:
            return logits.argmax(-1)
        logits = logits.float() / self.temperature
        if self.top_k:
            least = logits.topk(min(self.top_k, logits.shape[-1])).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        if self.top_p < 1:
            ordered, index = logits.sort(descending=True)
            probability = ordered.softmax(-1)
            beyond = probability.cumsum(-1) - probability >= self.top_p
            logits = logits.masked_fill(beyond.scatter(-1, index, beyond), -torch.inf)
        # The largest of logits plus Gumbel noise is a draw from their softmax.
        return (logits - torch.empty_like(logits).exponential_().log()).argmax(-1)


def recurrent_mixers(model: QEDForCausalLM) -> list[Mixer]:
    return [block.mixer for block in model.model.layers if isinstance(block.mixer, Mixer)]


def _is_plain(block: Any) -> bool:
    """Whether a block is our own class, which `one_token.block_step` says once more, and runs as that says."""
    from .causal_lm import QEDBlock

    return type(block) is QEDBlock and "forward" not in block.__dict__


def _block_step(block: Any, x: Tensor, conv: Tensor, recurrent: Tensor) -> Tensor:
    """One block, one token x [B, hidden]; both states are written over."""
    y, state = block.forward(x[:, None], MixerState(conv, recurrent), DENSE, inplace=True)
    conv.copy_(state.conv)
    return y[:, 0]


class Decoder:
    """States of `batch` sequences at fixed addresses, and a step from tokens to logits or to the next tokens."""

    def __init__(self, model: QEDForCausalLM, batch: int):
        if len(recurrent_mixers(model)) != len(model.model.layers):
            raise ValueError("a softmax layer's state grows: expected a model of recurrent layers alone")
        self._model = weakref.ref(model)
        self.device, dtype = model.lm_head.weight.device, model.lm_head.weight.dtype
        self.tokens = torch.zeros(batch, 1, dtype=torch.long, device=self.device)
        self.logits = torch.zeros(batch, model.config.vocab_size, dtype=dtype, device=self.device)
        self.states = [_empty_state(mixer, batch, dtype, self.device) for mixer in recurrent_mixers(model)]
        self.owner: weakref.ref[QEDCache] | None = None
        self.graphs: dict[Sampling | None, torch.cuda.CUDAGraph] = {}
        compiled = torch.compile(_block_step, fullgraph=True) if self.device.type == "cuda" else _block_step
        self.block_steps = [
            one_token.block_step if _is_plain(x) and one_token.runs(x, batch) else compiled for x in model.model.layers
        ]

    def is_for(self, model: QEDForCausalLM, batch: int) -> bool:
        return self._model() is model and self.tokens.shape[0] == batch

    def start(self, cache: QEDCache) -> None:
        """Go on from where a cache is. Its states are this decoder's from then on, and change with every step."""
        before = None if self.owner is None else self.owner()
        if before is cache and cache.decoder is self:
            return
        if cache.batch_size != self.tokens.shape[0]:
            raise ValueError(f"past_key_values: expected {self.tokens.shape[0]} sequences, got {cache.batch_size}")
        if before is not None and before.decoder is self:
            before.detach()
        for i, mine in enumerate(self.states):
            for x, y in zip(mine, cache.get(i), strict=True):
                x.copy_(y)
        self.owner = weakref.ref(cache)
        cache.attach(self)

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """tokens [B, 1] → logits [B, vocabulary], in memory that the next step writes over."""
        self.tokens.copy_(tokens)
        self._run(None)
        return self.logits

    @torch.no_grad()
    def advance(self, sampling: Sampling) -> None:
        """From `self.tokens` to the next ones, in place."""
        self._run(sampling)

    def _run(self, sampling: Sampling | None) -> None:
        if self.device.type != "cuda":
            self._step(sampling)
            return
        with torch.cuda.device(self.device):
            if sampling not in self.graphs:
                self.graphs[sampling] = self._capture(sampling)
            self.graphs[sampling].replay()

    def _step(self, sampling: Sampling | None) -> None:
        model = self._model()
        assert model is not None
        x = model.model.embed_tokens(self.tokens[:, 0])
        for run, block, state in zip(self.block_steps, model.model.layers, self.states, strict=True):
            x = run(block, x, state.conv, state.recurrent)
        if one_token.block_step in self.block_steps:
            self.logits.copy_(one_token.project(model.lm_head, x, norm=model.model.norm))
        else:
            self.logits.copy_(model.lm_head(model.model.norm(x)))
        if sampling is not None:
            self.tokens.copy_(sampling.choose(self.logits)[:, None])

    def _capture(self, sampling: Sampling | None) -> torch.cuda.CUDAGraph:
        """Runs before the capture move the states on; they are put back."""
        kept = [self.tokens.clone(), *(x.clone() for state in self.states for x in state)]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                self._step(sampling)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step(sampling)
        for x, y in zip([self.tokens, *(x for state in self.states for x in state)], kept, strict=True):
            x.copy_(y)
        return graph


def _empty_state(mixer: Mixer, batch: int, dtype: torch.dtype, device: torch.device) -> MixerState:
    channels, width = mixer.conv.weight.shape
    conv = torch.zeros(batch, width - 1, channels, dtype=dtype, device=device)
    shape = (batch, mixer.num_heads, mixer.head_dim, mixer.value_head_dim)
    wide = torch.promote_types(dtype, torch.float32)
    return MixerState(conv, torch.zeros(shape, dtype=wide, device=device))


# Of every model its fingerprint, and the decoders that were made for it, by batch size.
_DECODERS: weakref.WeakKeyDictionary[Any, tuple[Any, dict[int, Decoder]]] = weakref.WeakKeyDictionary()


def decoder_of(model: QEDForCausalLM, batch: int, cache: QEDCache | None = None) -> Decoder | None:
    """The model's decoder for a batch size; None where the model has to run as it is, layer by layer.

    It is made once, and anew when anything of the model that a captured step holds on to has changed (`fingerprint`).
    To look costs a fraction of a millisecond, so the steps of one `generate` look once, at the first: what a callback
    changes in the model while `generate` runs acts from the next call on.
    """
    if cache is not None and cache.generating:
        cache.generating = False
        if cache.checked is not None and cache.checked.is_for(model, batch):
            return cache.checked
    found = fingerprint(model)
    known, decoders = _DECODERS.get(model, (None, {}))
    if known != found:
        _DECODERS[model] = found, (decoders := {})
    if found is None:
        return None
    if batch not in decoders:
        decoders[batch] = Decoder(model, batch)
    if cache is not None:
        cache.checked = decoders[batch]
    return decoders[batch]


@torch.no_grad()
def stream(
    model: QEDForCausalLM,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    attention_mask: Tensor | None = None,
) -> Iterator[Tensor]:
    """Generate; yields tokens [B, n] as they come, `max_new_tokens` in all: where to stop is the caller's business."""
    found = model(input_ids, attention_mask=attention_mask, use_cache=True, logits_to_keep=1)
    logits, cache, sampling = found.logits[:, -1], found.past_key_values, sampling or Sampling()
    yield from continued(model, logits, cache, max_new_tokens=max_new_tokens, sampling=sampling)


@torch.no_grad()
def continued(
    model: QEDForCausalLM, logits: Tensor, cache: QEDCache, *, max_new_tokens: int, sampling: Sampling
) -> Iterator[Tensor]:
    """As `stream`, from the last token's logits [B, vocabulary] and where the model is."""
    tokens = sampling.choose(logits)[:, None]
    yield tokens.clone()
    left = max_new_tokens - 1
    while left > 0:
        # Whoever takes the tokens may have done anything in between: decoded something else, changed the model.
        decoder = decoder_of(model, tokens.shape[0])
        if decoder is None:
            tokens = sampling.choose(model(tokens, past_key_values=cache, use_cache=True).logits[:, -1])[:, None]
            part = [tokens]
        else:
            decoder.start(cache)
            decoder.tokens.copy_(tokens)
            part = []
            for _ in range(min(left, STRIDE)):
                decoder.advance(sampling)
                part.append(decoder.tokens.clone())
            tokens = part[-1]
            cache.tokens += len(part)
        left -= len(part)
        yield torch.cat(part, 1)
