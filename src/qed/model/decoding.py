"""Fast decoding: the model one token at a time, its states written in place; on a GPU one CUDA graph a token.

A token of a 340M model is a hundred small kernels and more, and starting them from Python takes longer than running
them. So a whole step, from a token to the next one, is captured once and then replayed. Which route a block takes is
said by the table `layers.routes.BLOCK`. Only recurrent layers have states of fixed size: stacks with softmax layers
decode without it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..layers import Mixer, MixerState, RMSNorm
from ..layers.obstacles import plain_linear_obstacle
from ..layers.routes import BLOCK, normed_projection
from ..routes import Call
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
        call = Call(self.device, dtype, batch=batch, state=True)
        blocks: list[Any] = list(model.model.layers)
        self.routes = [BLOCK.pick(block.impl, call, block) for block in blocks]
        plain_head = plain_linear_obstacle(model.lm_head) is None and model.lm_head.bias is None
        plain_head = plain_head and type(model.model.norm) is RMSNorm
        self.fuses_head = plain_head and any(route.name == "triton" for route in self.routes)

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
        for route, block, state in zip(self.routes, model.model.layers, self.states, strict=True):
            x = route.run(block, x, state.conv, state.recurrent)
        if self.fuses_head:
            self.logits.copy_(normed_projection(model.lm_head, x, model.model.norm))
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


class Decoders:
    """The captured steps of one model, by batch size, made anew when anything that they captured has changed.

    Copies of a model start without any: a graph holds addresses of the tensors of the model it was captured from.
    """

    def __init__(self) -> None:
        self._fingerprint: Any = None
        self._by_batch: dict[int, Decoder] = {}

    def __deepcopy__(self, _: Any) -> Decoders:
        return Decoders()

    def __reduce__(self) -> tuple[type[Decoders], tuple[()]]:
        return Decoders, ()

    def of(self, model: QEDForCausalLM, batch: int, cache: QEDCache | None = None) -> Decoder | None:
        """Return the decoder of `batch` sequences; None where no captured step is right.

        To see that nothing has changed takes a look at every module, so the steps of one `generate` look once, at the
        first: what a callback changes in the model while `generate` runs acts from the next call on.

        Args:
            model: the model whose decoders these are.
            batch: how many sequences it decodes at once.
            cache: the cache of a running `generate`, which remembers that its first step has looked.
        """
        if cache is not None and cache.generating:
            cache.generating = False
            if cache.checked is not None and cache.checked.is_for(model, batch):
                return cache.checked
        now = fingerprint(model)
        if now != self._fingerprint:
            self._fingerprint, self._by_batch = now, {}
        if now is None:
            return None
        if batch not in self._by_batch:
            self._by_batch[batch] = Decoder(model, batch)
        if cache is not None:
            cache.checked = self._by_batch[batch]
        return self._by_batch[batch]


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
        decoder = model.decoders.of(model, tokens.shape[0])
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
