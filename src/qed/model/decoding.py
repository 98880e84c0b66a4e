"""Fast inference: the model reads a prompt, and then one token at a time, with its states written in place, on a GPU as
one CUDA graph per prompt and per token.

A token of a 340M model takes a hundred small kernels and more, and launching them from Python takes longer than running
them; so it does for a prompt of a few thousand tokens. So a whole step, from a token to the next one, is captured once
and then replayed, and so is a prompt. The table `layers.routes.BLOCK` says which route a block takes for one token.
Only recurrent layers have states of fixed size, so models with softmax layers are run without all this.

A graph has one shape. So a prompt is captured for a few lengths (`LENGTHS`), and a shorter one is padded at its end:
it is an aligned batch (`layers/sequences.py`), whose padding leaves states as they are. Where the prompts of a batch
were padded by the caller, their tokens move to the front first. (Packed sequences would need no padding, but the
kernels run each of them chunk after chunk. A prompt that has its own row is cut into segments that run in parallel.)
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..layers import Mixer, MixerState, RMSNorm, Sequences
from ..layers.obstacles import contiguity_obstacle, plain_linear_obstacle
from ..layers.routes import BLOCK, normed_projection, write_likeliest
from ..layers.sequences import padding_first
from ..routes import Call
from .arguments import given_inputs, mask_of
from .cache import QEDCache, check_cache
from .fingerprint import fingerprint
from .replaying import Replayed
from .sampling import Chooser, Sampling, seen_tokens

if TYPE_CHECKING:
    from .causal_lm import QEDForCausalLM

STRIDE = 16  # tokens that are yielded together: whoever looks at them waits for the GPU
# Tokens to which prompts are padded at their end: at most half as many again, or a chunk of the recurrence.
LENGTHS = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
MOST_TOKENS = 8192  # of all rows together: more keep a GPU busy for longer than Python needs to launch them
TOGETHER = 4  # steps that are one graph where as many follow each other: the GPU waits a little between two graphs
MOST_STEPS = 8  # captured steps of one decoder that are kept: each way to choose tokens has one


def recurrent_mixers(model: QEDForCausalLM) -> list[Mixer]:
    """Return the mixers of all recurrent layers, in their order."""
    return [block.mixer for block in model.model.layers if isinstance(block.mixer, Mixer)]


def padded_length(batch: int, tokens: int) -> int | None:
    """Return to how many tokens prompts are padded, or None where they are too long or too many to be captured."""
    length = next((x for x in LENGTHS if x >= tokens), None)
    return None if length is None or batch * length > MOST_TOKENS else length


class Decoder:
    """States of `batch` sequences at fixed addresses; what reads prompts into them, and a step from tokens to logits or
    to the next tokens."""

    def __init__(
        self,
        model: QEDForCausalLM,
        batch: int,
        pool: torch.cuda._POOL_HANDLE | None = None,
        lock: AbstractContextManager[Any] | None = None,
    ):
        """
        Args:
            model: the model, of recurrent layers alone.
            batch: how many sequences.
            pool: memory that the graphs of several decoders share.
            lock: what a thread holds that uses this memory, or the graphs of these decoders.
        """
        self.lock = threading.RLock() if lock is None else lock
        if len(recurrent_mixers(model)) != len(model.model.layers):
            raise ValueError("a softmax layer's state grows: expected a model of recurrent layers alone")
        self._model = weakref.ref(model)
        # The embedding's, which are those of the residual stream: a quantised matrix is of whole numbers.
        self.device, dtype = model.device, model.model.embed_tokens.weight.dtype
        kind = self.device.type
        of_logits = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else dtype
        head, norm = model.lm_head, model.model.norm
        is_matrix = plain_linear_obstacle(head) is None
        # As many logits as the head has rows, whatever the configuration says; another head's may be packed.
        vocabulary = head.weight.shape[0] if is_matrix else model.config.vocab_size
        with torch.inference_mode(False):  # memory born in inference mode could not be written outside of it
            self.tokens = torch.zeros(batch, 1, dtype=torch.long, device=self.device)
            self.logits = torch.zeros(batch, vocabulary, dtype=of_logits, device=self.device)
            self.found = torch.zeros(batch, TOGETHER, dtype=torch.long, device=self.device)
            self.seen = seen_tokens(self.tokens, vocabulary)
            self.lengths = torch.zeros(batch, dtype=torch.long, device=self.device)
            self.states = [_empty_state(mixer, batch, dtype, self.device) for mixer in recurrent_mixers(model)]
        self.owner: weakref.ref[QEDCache] | None = None
        self.steps: dict[Hashable, tuple[Chooser | None, Replayed]] = {}  # by what chooses the tokens
        self.prompts: dict[
            int, tuple[Tensor, Replayed]
        ] = {}  # by length: where tokens are written, and what reads them
        self._pool = pool
        call = Call(self.device, dtype, batch=batch, state=True)
        blocks: list[Any] = list(model.model.layers)
        self.routes = [BLOCK.pick(block.impl, call, block) for block in blocks]
        plain_head = is_matrix and all(contiguity_obstacle(x) is None for x in (head, norm))
        plain_head = plain_head and type(norm) is RMSNorm and head.bias is None
        self.fuses_head = plain_head and any(route.name == "triton" for route in self.routes)

    def is_for(self, model: QEDForCausalLM, batch: int) -> bool:
        """Return whether this is a decoder of this model for so many sequences."""
        return self._model() is model and self.tokens.shape[0] == batch

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the states, which a step and a prompt write over."""
        return [x for state in self.states for x in state]

    @property
    def captured(self) -> list[Hashable]:
        """What has been captured so far: the keys of steps and the lengths of prompts."""
        return [key for key, (_, x) in (*self.steps.items(), *self.prompts.items()) if x.graph is not None]

    def start(self, cache: QEDCache) -> None:
        """Continue from the states of a cache, or from the beginning if it is empty. From then on they are in this
        decoder's memory, and change with every step."""
        if cache.rewind:
            raise ValueError(
                f"past_key_values: a captured step keeps nothing to go back to; expected QEDCache(), got {cache!r}"
            )
        before = None if self.owner is None else self.owner()
        if before is cache and cache.decoder is self:
            return
        given = cache.is_initialized
        check_cache(cache, self.tokens.shape[0])
        if before is not None and before.decoder is self:
            before.detach()
        with torch.no_grad():
            if given:
                torch._foreach_copy_(self.tensors, [x for i in range(len(self.states)) for x in cache.get(i)])
            else:
                torch._foreach_zero_(self.tensors)
        self.owner = weakref.ref(cache)
        cache.attach(self)

    @torch.no_grad()
    def read(self, cache: QEDCache, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Read tokens into a cache; return the logits [B, vocabulary] after the last one of every row, in memory that
        the next step or prompt overwrites.

        Args:
            cache: where the tokens continue; it may be empty.
            tokens: [B, T].
            mask: [B, T], 1 at tokens that exist, wherever they stand; None if all do.
        """
        length = padded_length(*tokens.shape)
        assert length is not None
        self.start(cache)
        if length not in self.prompts:
            with torch.inference_mode(False):
                written = torch.zeros(tokens.shape[0], length, dtype=torch.long, device=self.device)
            self.prompts[length] = (written, Replayed(self.device, self._pool))
        written, replayed = self.prompts[length]
        if mask is None:
            self.lengths.fill_(tokens.shape[1])
        else:
            sequences = Sequences.from_mask(mask)
            tokens = sequences.align(tokens)
            assert sequences.lengths is not None
            self.lengths.copy_(sequences.lengths)
        written.zero_()
        written[:, : tokens.shape[1]].copy_(tokens)
        replayed(partial(self._read, written))
        cache.tokens += tokens.shape[1]
        return self.logits

    def _read(self, tokens: Tensor) -> None:
        model = self._model()
        assert model is not None
        cache = QEDCache()
        cache.states = dict(enumerate(self.states))
        hidden = model.model.read_aligned(tokens, Sequences(lengths=self.lengths), cache)
        last = (self.lengths - 1).clamp(min=0)[:, None, None].expand(-1, 1, hidden.shape[-1])
        self.logits.copy_(model.lm_head(hidden.gather(1, last))[:, 0])
        torch._foreach_copy_(self.tensors, [x for i in range(len(self.states)) for x in cache.get(i)])

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Return logits [B, vocabulary] after tokens [B, 1], in memory that the next step overwrites."""
        self.tokens.copy_(tokens)
        self._run(None)
        return self.logits

    @torch.no_grad()
    def follow(self, cache: QEDCache, text: Tensor, chooser: Chooser, count: int) -> Tensor:
        """Return the next tokens after a text, [B, count].

        Args:
            cache: the states after all tokens of the text but the last.
            text: the tokens so far [B, T]. Only the last of them is read, and a repetition penalty counts all.
            chooser: how tokens are chosen.
            count: how many.
        """
        self.start(cache)
        self.tokens.copy_(text[:, -1:])
        if chooser.counts:
            seen_tokens(text, self.logits.shape[1], self.seen)
        found = text.new_empty(text.shape[0], count)
        i = 0
        while i < count:
            now, several = chooser.at(text.shape[1] + i), self.found.shape[1]
            # A step that has not been captured yet is taken alone first: many at once would be launched one by one.
            if count - i >= several > 1 and not chooser.until and (now.key, 1) in self.captured:
                self._run(now, several)
                found[:, i : i + several].copy_(self.found)
                i += several
            else:
                self._run(now)
                found[:, i : i + 1].copy_(self.tokens)
                i += 1
        cache.tokens += count
        return found

    def _run(self, chooser: Chooser | None, count: int = 1) -> None:
        key = (None if chooser is None else chooser.key, count)
        if key not in self.steps:
            if len(self.steps) == MOST_STEPS:
                del self.steps[next(iter(self.steps))]  # the oldest
            self.steps[key] = (chooser, Replayed(self.device, self._pool))
            self.steps[key][1].has_run = count > 1  # as single steps
        kept, replayed = self.steps[key]  # a graph reads the tensors of the chooser that it was captured with
        replayed(partial(self._step, kept) if count == 1 else partial(self._several, kept, count))

    def _several(self, chooser: Chooser | None, count: int) -> None:
        for i in range(count):
            self._step(chooser)
            self.found[:, i : i + 1].copy_(self.tokens)

    def _step(self, chooser: Chooser | None) -> None:
        model = self._model()
        assert model is not None
        x = model.model.embed_tokens(self.tokens[:, 0])
        for route, block, state in zip(self.routes, model.model.layers, self.states, strict=True):
            x = route.run(block, x, state.conv, state.recurrent)
        if self.fuses_head:
            normed_projection(model.lm_head, x, model.model.norm, out=self.logits)
        else:
            self.logits.copy_(model.lm_head(model.model.norm(x)))
        if chooser is not None and self.fuses_head and chooser.is_plain:
            write_likeliest(self.logits, self.tokens)
        elif chooser is not None:
            self.tokens.copy_(chooser(self.logits, self.seen)[:, None])
            if chooser.counts:
                self.seen.scatter_(1, self.tokens, True)


def _empty_state(mixer: Mixer, batch: int, dtype: torch.dtype, device: torch.device) -> MixerState:
    channels, width = mixer.conv.weight.shape
    conv = torch.zeros(batch, width - 1, channels, dtype=dtype, device=device)
    shape = (batch, mixer.num_heads, mixer.head_dim, mixer.value_head_dim)
    wide = torch.promote_types(dtype, torch.float32)
    return MixerState(conv, torch.zeros(shape, dtype=wide, device=device))


class Decoders:
    """The decoders of one model, by batch size. They are made anew when anything that they captured has changed.

    Several threads may generate with one model: they take turns with its decoders, a few tokens at a time.

    Copies of a model start without any, because a graph holds the addresses of the tensors it was captured with.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._fingerprint: Any = None
        self._by_batch: dict[int, Decoder] = {}
        self._pool: Any = None

    def __deepcopy__(self, _: Any) -> Decoders:
        return Decoders()

    def __reduce__(self) -> tuple[type[Decoders], tuple[()]]:
        return Decoders, ()

    def look(self, model: QEDForCausalLM, batch: int, cache: QEDCache | None = None) -> Decoder | str:
        """Return the decoder of `batch` sequences; or, where nothing captured would be right, why not.

        The check that nothing has changed looks at every module, so one `generate` does it only once. What a callback
        changes in the model while `generate` runs takes effect from the next call on.

        Args:
            model: the model whose decoders these are.
            batch: how many sequences it decodes at once.
            cache: the cache of a running `generate`, which remembers that the model was checked.
        """
        if cache is not None and cache.generating:
            cache.generating = False
            if cache.checked is not None and cache.checked.is_for(model, batch):
                return cache.checked
        now = fingerprint(model)
        with self.lock:
            if now != self._fingerprint:
                self._fingerprint, self._by_batch = now, {}
                self._pool = torch.cuda.graph_pool_handle() if model.device.type == "cuda" else None
            if isinstance(now, str):
                return now
            if batch not in self._by_batch:
                self._by_batch[batch] = Decoder(model, batch, self._pool, self.lock)
            found = self._by_batch[batch]
        if cache is not None:
            cache.checked = found
        return found

    def of(self, model: QEDForCausalLM, batch: int, cache: QEDCache | None = None) -> Decoder | None:
        """Return what `look` returns, and None where there is no decoder.

        Args:
            model, batch, cache: as in `look`.
        """
        found = self.look(model, batch, cache)
        return None if isinstance(found, str) else found


@torch.no_grad()
def stream(
    model: QEDForCausalLM,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    attention_mask: Tensor | None = None,
    together: int = STRIDE,
) -> Iterator[Tensor]:
    """Generate tokens, and yield them [B, n] as they come, `max_new_tokens` in all. The caller decides where a text
    ends.

    Args:
        model: the model.
        input_ids: the prompts [B, T].
        max_new_tokens: how many tokens to generate.
        sampling: how tokens are chosen; None for the likeliest.
        attention_mask: [B, T], 1 at the tokens of padded prompts, wherever they stand; None without padding.
        together: how many tokens are yielded at a time, where decoding is captured: with 1 they come one by one, and
            the GPU waits for the caller after each. The first comes alone.
    """
    for name, count in (("max_new_tokens", max_new_tokens), ("together", together)):
        if count < 1:
            raise ValueError(f"{name}: expected a number of tokens, 1 or more, got {count}")
    if given_inputs(input_ids, None).shape[1] == 0:
        raise ValueError("input_ids: expected at least one token to go on from")
    if attention_mask is not None:
        input_ids, attention_mask = padding_first(input_ids, mask_of(input_ids, attention_mask, None))
    output = model(input_ids, attention_mask=attention_mask, use_cache=True, logits_to_keep=1)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "sampling": sampling or Sampling()}
    logits, cache = output.logits[:, -1], output.past_key_values
    yield from continued(model, logits, cache, **options, text=input_ids, together=together)


@torch.no_grad()
def continued(
    model: QEDForCausalLM,
    logits: Tensor,
    cache: QEDCache,
    *,
    max_new_tokens: int,
    sampling: Sampling,
    text: Tensor | None = None,
    together: int = STRIDE,
) -> Iterator[Tensor]:
    """Generate as `stream` does, after prompts that the model has already read.

    Args:
        model: the model.
        logits: logits after the last token, [B, vocabulary].
        cache: the states after the last token.
        max_new_tokens, sampling, together: as in `stream`.
        text: the prompts [B, T], which a repetition penalty counts; None to count what is generated alone.
    """
    chooser, vocabulary = sampling.chooser(), logits.shape[1]
    text = torch.empty(logits.shape[0], 0, dtype=torch.long, device=logits.device) if text is None else text
    part = chooser(logits, seen_tokens(text, vocabulary) if chooser.counts else None)[:, None]
    yield part.clone()
    left = max_new_tokens - 1
    while left > 0:
        text = torch.cat([text, part], 1) if chooser.counts else part
        # The caller may have done anything since the last tokens: decoded something else, changed the model.
        decoder = None if cache.rewind else model.decoders.of(model, part.shape[0])
        if decoder is None:
            logits = model(part[:, -1:], past_key_values=cache, use_cache=True).logits[:, -1]
            part = chooser(logits, seen_tokens(text, vocabulary) if chooser.counts else None)[:, None]
        else:
            with decoder.lock:
                part = decoder.follow(cache, text, chooser, min(left, together))
        left -= part.shape[1]
        yield part.clone()
