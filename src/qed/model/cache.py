"""The states of layers as transformers' `Cache`. No other file knows that class.

There is one state per layer, which is replaced as a whole when the layer has run. States of recurrent layers have a
fixed size; those of softmax layers grow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from transformers import Cache

from ..layers import AttentionState, MixerState

if TYPE_CHECKING:
    from .decoding import Decoder

State = MixerState | AttentionState


class QEDCache(Cache):
    """The states of all layers after the tokens that the model has read."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.states: dict[int, State] = {}
        self.tokens = 0  # how many columns of tokens were read, padding included
        self.decoder: Decoder | None = None  # the decoder in whose memory the states are, if they are in one's
        self.generating = False  # whether the next call is a later step of a running `generate` …
        self.checked: Decoder | None = None  # … and the decoder that its first step has checked

    def attach(self, decoder: Decoder) -> None:
        """Make the states of a decoder the states of this cache. They change with every step of the decoder."""
        self.states, self.decoder = dict(enumerate(decoder.states)), decoder

    def detach(self) -> None:
        """Copy the states out of a decoder's memory, if they are in one's."""
        if self.decoder is not None:
            self.decoder = None
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
        copied = QEDCache()
        copied.states, copied.tokens = dict(self.states), self.tokens
        return copied

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many tokens were read, padding included; it is the same for every layer."""
        return self.tokens

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return −1: there is no limit."""
        return -1

    def _each(self, change: Any) -> None:
        self.decoder = None
        for layer, state in self.states.items():
            self.states[layer] = type(state)(*(change(x) for x in state))

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

    def crop(self, tokens_to_remove: int) -> NoReturn:
        """Refuse to remove tokens: a recurrent state cannot forget them."""
        raise NotImplementedError(
            "crop: a recurrent state cannot forget its last tokens; keep a `cache.copy()` from before them instead"
        )

    @property
    def batch_size(self) -> int:
        """How many sequences there are."""
        return next(iter(self.states.values()))[0].shape[0]

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
        return False

    @property
    def is_sliding(self) -> list[bool]:
        """Whether layers are of transformers' own kind with a sliding window; none is."""
        return [False]

    def __len__(self) -> int:
        return len(self.states)

    def __repr__(self) -> str:
        size = sum(x.numel() * x.element_size() for state in self.states.values() for x in state)
        return f"QEDCache(layers={len(self.states)}, tokens={self.tokens}, bytes={size})"

    def has_previous_state(self, *_: Any) -> bool:
        """Return whether some layer has run."""
        return bool(self.states)
