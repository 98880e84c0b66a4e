"""Fast decoding: the model runs one token at a time with its states written in place, on a GPU as one CUDA graph per
token.

A token of a 340M model takes a hundred small kernels and more, and launching them from Python takes longer than running
them. So a whole step, from a token to the next one, is captured once and then replayed. The table `layers.routes.BLOCK`
says which route a block takes. Only recurrent layers have states of fixed size, so models with softmax layers are
decoded without all this.
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

WARM_UP = 3  # runs before a capture, in which kernels are compiled and memory is allocated
STRIDE = 16  # tokens that are yielded together: whoever looks at them waits for the GPU


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen. With temperature 0 it is the likeliest. top_k and top_p restrict the choice to so
    many tokens, or to so much probability."""

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
        """Return tokens [B], chosen by logits [B, vocabulary]. The host does not wait for the device."""
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
    """Return the mixers of all recurrent layers, in their order."""
    return [block.mixer for block in model.model.layers if isinstance(block.mixer, Mixer)]


class Decoder:
    """States of `batch` sequences at fixed addresses, and a step from tokens to logits or to the next tokens."""

    def __init__(self, model: QEDForCausalLM, batch: int):
        if len(recurrent_mixers(model)) != len(model.model.layers):
            raise ValueError("a softmax layer's state grows: expected a model of recurrent layers alone")
        self._model = weakref.ref(model)
        # The embedding's, which are those of the residual stream: a quantised matrix is of whole numbers.
        self.device, dtype = model.device, model.model.embed_tokens.weight.dtype
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
        """Return whether this is a decoder of this model for so many sequences."""
        return self._model() is model and self.tokens.shape[0] == batch

    def start(self, cache: QEDCache) -> None:
        """Continue from the states of a cache. From then on they are in this decoder's memory, and change with every
        step."""
        if cache.rewind:
            raise ValueError(
                f"past_key_values: a captured step keeps nothing to go back to; expected QEDCache(), got {cache!r}"
            )
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
        """Return logits [B, vocabulary] after tokens [B, 1], in memory that the next step overwrites."""
        self.tokens.copy_(tokens)
        self._run(None)
        return self.logits

    @torch.no_grad()
    def advance(self, sampling: Sampling) -> None:
        """Replace `self.tokens` by the next tokens, in place."""
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
        """Return a captured step. The runs before the capture change tokens and states, which are then restored."""
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
    """The decoders of one model, by batch size. They are made anew when anything that their steps captured has changed.

    Copies of a model start without any, because a graph holds the addresses of the tensors it was captured with.
    """

    def __init__(self) -> None:
        self._fingerprint: Any = None
        self._by_batch: dict[int, Decoder] = {}

    def __deepcopy__(self, _: Any) -> Decoders:
        return Decoders()

    def __reduce__(self) -> tuple[type[Decoders], tuple[()]]:
        return Decoders, ()

    def of(self, model: QEDForCausalLM, batch: int, cache: QEDCache | None = None) -> Decoder | None:
        """Return the decoder of `batch` sequences; None where no captured step would be right.

        The check that nothing has changed looks at every module, so one `generate` does it only at its first step. What
        a callback changes in the model while `generate` runs takes effect from the next call on.

        Args:
            model: the model whose decoders these are.
            batch: how many sequences it decodes at once.
            cache: the cache of a running `generate`, which remembers that its first step has checked the model.
        """
        if cache is not None and cache.generating:
            cache.generating = False
            if cache.checked is not None and cache.checked.is_for(model, batch):
                return cache.checked
        now = fingerprint(model)
        if now != self._fingerprint:
            self._fingerprint, self._by_batch = now, {}
        if isinstance(now, str):
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
    """Generate tokens, and yield them [B, n] as they come, `max_new_tokens` in all. The caller decides where a text
    ends.

    Args:
        model: the model.
        input_ids: the prompts [B, T].
        max_new_tokens: how many tokens to generate.
        sampling: how tokens are chosen; None for the likeliest.
        attention_mask: [B, T], 1 at the tokens of padded prompts; None without padding.
    """
    output = model(input_ids, attention_mask=attention_mask, use_cache=True, logits_to_keep=1)
    logits, cache, sampling = output.logits[:, -1], output.past_key_values, sampling or Sampling()
    yield from continued(model, logits, cache, max_new_tokens=max_new_tokens, sampling=sampling)


@torch.no_grad()
def continued(
    model: QEDForCausalLM, logits: Tensor, cache: QEDCache, *, max_new_tokens: int, sampling: Sampling
) -> Iterator[Tensor]:
    """Generate as `stream` does, after prompts that the model has already read.

    Args:
        model: the model.
        logits: logits after the last token, [B, vocabulary].
        cache: the states after the last token.
        max_new_tokens, sampling: as in `stream`.
    """
    tokens = sampling.choose(logits)[:, None]
    yield tokens.clone()
    left = max_new_tokens - 1
    while left > 0:
        # The caller may have done anything since the last tokens: decoded something else, changed the model.
        decoder = None if cache.rewind else model.decoders.of(model, tokens.shape[0])
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
