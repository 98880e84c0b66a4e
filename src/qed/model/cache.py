"""The states of layers as transformers' `Cache`. No other file knows that class.

There is one state per layer, which is replaced as a whole when the layer has run. States of recurrent layers have a
fixed size; those of softmax layers grow.

A cache can go back if it was asked for that: `QEDCache(rewind=n)` forgets up to n of the last tokens by `crop`, as
assisted generation does with rejected candidates. Its recurrent layers keep an earlier state and what they have read
since (`layers/rewind.py`), and sliding windows keep n keys more.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import Cache

from ..layers import AttentionState, MixerState, RewindState, Sequences

if TYPE_CHECKING:
    from .decoding import Decoder

State = MixerState | RewindState | AttentionState


class QEDCache(Cache):
    """The states of all layers after the tokens that the model has read."""

    def __init__(self, rewind: int = 0) -> None:
        """Make an empty cache.

        Args:
            rewind: how many of the last tokens `crop` can remove. With more than 0 recurrent layers keep a second state
                and the operands of up to 2 · (rewind + 3) tokens, and decoding on a GPU is not captured.
        """
        if isinstance(rewind, bool) or not isinstance(rewind, int) or rewind < 0:
            raise ValueError(f"rewind: expected a number of tokens, 0 or more, got {rewind!r}")
        super().__init__(layers=[])
        self.states: dict[int, State] = {}
        self.tokens = 0  # how many columns of tokens were read, padding included
        self.rewind = rewind
        self.depth = rewind  # how many tokens the next call must be able to forget
        self.removable = 0  # how many columns `crop` can remove now …
        self.there: Tensor | None = None  # … and which of them exist, [B, removable] bool; None if all do
        self.decoder: Decoder | None = None  # the decoder in whose memory the states are, if they are in one's
        self.generating = False  # whether the next call is one of a running `generate` …
        self.checked: Decoder | None = None  # … and the decoder of the model that it has checked
        self.given = False  # whether the caller of a running `generate` has this cache too
        self.known = 0  # how many tokens of the text the next call of a running `generate` must not read again

    def attach(self, decoder: Decoder) -> None:
        """Make the states of a decoder the states of this cache. They change with every step of the decoder."""
        self.states, self.decoder = dict(enumerate(decoder.states)), decoder

    def detach(self) -> None:
        """Copy the states out of a decoder's memory, if they are in one's."""
        if self.decoder is not None:
            self._each(torch.clone)

    def get(self, layer: int) -> Any:
        """Return the state of a layer; None before it has run."""
        return self.states.get(layer)

    def put(self, layer: int, state: State) -> None:
        """Replace the state of a layer."""
        self.detach()
        self.states[layer] = state

    def copy(self) -> QEDCache:
        """Return a copy, to continue from here more than once. It shares the states' memory, which is safe
        because states are replaced, never changed."""
        self.detach()
        copied = QEDCache(self.rewind)
        copied.states, copied.tokens = dict(self.states), self.tokens
        copied.removable, copied.there = self.removable, self.there
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles hold: the states, and nothing of a model's decoders."""
        self.detach()
        return self.__dict__ | {"states": dict(self.states), "generating": False, "checked": None}

    def expect(self, candidates: int) -> None:
        """Say that so many of the next call's last tokens may be removed again. A cache that can go back then keeps as
        much as that takes, even if it is more than `rewind`."""
        self.depth = max(self.rewind, candidates) if self.rewind else 0

    def advance(self, tokens: int, sequences: Sequences) -> None:
        """Count tokens that all layers have read.

        Args:
            tokens: how many columns.
            sequences: which of them exist.
        """
        there = sequences.there(tokens)
        if self.depth and (there is not None or self.there is not None):
            shape, device = (self.batch_size, max(tokens, self.removable)), next(iter(self.states.values()))[0].device
            ones = torch.ones(shape, dtype=torch.bool, device=device)
            known = ones[:, : self.removable] if self.there is None else self.there
            self.there = torch.cat([known, ones[:, :tokens] if there is None else sequences.restore(there)], 1)
            self.there = self.there[:, -self.depth :]
        self.tokens += tokens
        self.removable = min(self.removable + tokens, self.depth)
        self.depth = self.rewind

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many tokens were read, padding included; it is the same for every layer."""
        return self.tokens

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return −1: there is no limit."""
        return -1

    def _each(self, change: Any) -> None:
        decoder = None if torch.compiler.is_compiling() else self.decoder  # torch.compile knows no locks
        with nullcontext() if decoder is None else decoder.lock:  # another thread may be about to take its memory
            self.states, self.there = tree_map_only(Tensor, change, (self.states, self.there))
            self.decoder = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Give every sequence the state of the sequence `beam_idx` [B] names for it, as beam search does."""
        self._each(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the sequences with these indices, in their order."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence so many times in a row."""
        self._each(lambda x: x.repeat_interleave(repeats, 0))

    def reset(self) -> None:
        """Forget everything that was read."""
        self.states, self.tokens, self.decoder = {}, 0, None
        self.removable, self.there = 0, None

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, so that the states are those after the tokens before them.

        Args:
            tokens_to_remove: how many, as a negative number, as transformers writes it: −3 for the last three columns,
                padding included. 0 changes nothing.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop: expected 0, or how many tokens to remove as a negative number, got {tokens_to_remove}"
            )
        removed = -tokens_to_remove
        if removed > self.removable:
            raise ValueError(
                f"crop: this cache, QEDCache(rewind={self.rewind}), can go back {self.removable} tokens now, got "
                f"{removed}: a recurrent state cannot forget more. Make the cache with a larger rewind, or keep a "
                "`cache.copy()` from before the tokens"
            )
        if removed == self.tokens:
            self.reset()
        elif removed:
            device = next(iter(self.states.values()))[0].device
            rows = torch.full((self.batch_size,), removed, device=device)
            if self.there is not None:
                rows, self.there = self.there[:, -removed:].sum(1), self.there[:, :-removed]
            for layer, state in self.states.items():
                assert not isinstance(state, MixerState)
                self.states[layer] = state.without(rows)
            self.tokens, self.removable = self.tokens - removed, self.removable - removed

    def activate_past_recording(self) -> None:
        """Refuse a cache that cannot go back: transformers calls this before it begins to generate what it may have to
        remove."""
        if not self.rewind:
            raise ValueError(
                "past_key_values: assisted generation removes rejected tokens, which QEDCache() cannot; "
                "expected QEDCache(rewind=1) or more, or None: then the right cache is made"
            )

    @property
    def batch_size(self) -> int:
        """How many sequences there are; −1 before some layer has run, as in transformers."""
        return next(iter(self.states.values()))[0].shape[0] if self.states else -1

    @property
    def is_compileable(self) -> bool:
        """Whether `generate` may compile a step with this cache."""
        return False

    @property
    def is_initialized(self) -> bool:
        """Whether some layer has run."""
        return bool(self.states)

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` works."""
        return self.rewind > 0

    @property
    def is_sliding(self) -> list[bool]:
        """Whether layers are of transformers' own kind with a sliding window; none is."""
        return [False]

    def __len__(self) -> int:
        return len(self.states)

    def __repr__(self) -> str:
        tensors = [x for x in tree_leaves(self.states) if isinstance(x, Tensor)]
        size = sum(x.numel() * x.element_size() for x in tensors)
        return f"QEDCache(rewind={self.rewind}, layers={len(self.states)}, tokens={self.tokens}, bytes={size})"

    def has_previous_state(self, *_: Any) -> bool:
        """Return whether some layer has run."""
        return bool(self.states)


def check_cache(cache: Any, batch: int | None = None) -> QEDCache | None:
    """Return a cache that is ours, or None for none; refuse any other, before anything runs.

    Args:
        cache: what was given.
        batch: how many sequences it must have if it has read any; None for any number.
    """
    if isinstance(cache, QEDCache) and cache.is_initialized and batch not in (None, cache.batch_size):
        raise ValueError(f"past_key_values: expected {batch} sequences, got {cache.batch_size}")
    if cache is None or isinstance(cache, QEDCache):
        return cache
    raise TypeError(
        "past_key_values: expected a QEDCache (`from qed import QEDCache`; QEDCache() is an empty one) or None, got "
        f"{type(cache).__name__}; transformers' own caches count no tokens in recurrent layers and keep no positions"
    )
