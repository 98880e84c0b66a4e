"""Layer states as transformers' Cache: the one file that knows that class.

One state per layer, replaced as a whole when a layer has run. Recurrent layers' have one size; softmax layers' grow.
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
    def __init__(self) -> None:
        super().__init__(layers=[])
        self.states: dict[int, State] = {}
        self.tokens = 0  # columns read, padding included
        self.decoder: Decoder | None = None  # whose memory the states are, if they are a decoder's
        self.generating = False  # whether the next call is one step further of a running `generate` …
        self.checked: Decoder | None = None  # … and the decoder that its first step found to be the model's

    def attach(self, decoder: Decoder) -> None:
        self.states, self.decoder = dict(enumerate(decoder.states)), decoder

    def detach(self) -> None:
        """States of one's own again."""
        if self.decoder is not None:
            self.decoder = None
            self._each(torch.clone)

    def get(self, layer: int) -> Any:
        return self.states.get(layer)

    def put(self, layer: int, state: State) -> None:
        self.detach()
        self.states[layer] = state

    def copy(self) -> QEDCache:
        """To go on from here more than once. Costs nothing: states are replaced, never changed."""
        self.detach()
        copied = QEDCache()
        copied.states, copied.tokens = dict(self.states), self.tokens
        return copied

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.tokens

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def _each(self, change: Any) -> None:
        self.decoder = None
        for layer, state in self.states.items():
            self.states[layer] = type(state)(*(change(x) for x in state))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._each(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._each(lambda x: x.repeat_interleave(repeats, 0))

    def reset(self) -> None:
        self.states, self.tokens, self.decoder = {}, 0, None

    def crop(self, tokens_to_remove: int) -> NoReturn:
        raise NotImplementedError(
            "crop: a recurrent state cannot forget its last tokens; keep a `cache.copy()` from before them instead"
        )

    @property
    def batch_size(self) -> int:
        return next(iter(self.states.values()))[0].shape[0]

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_initialized(self) -> bool:
        return bool(self.states)

    @property
    def is_croppable(self) -> bool:
        return False

    @property
    def is_sliding(self) -> list[bool]:
        return [False]

    def __len__(self) -> int:
        return len(self.states)

    def __repr__(self) -> str:
        size = sum(x.numel() * x.element_size() for state in self.states.values() for x in state)
        return f"QEDCache(layers={len(self.states)}, tokens={self.tokens}, bytes={size})"

    def has_previous_state(self, *_: Any) -> bool:
        return bool(self.states)
