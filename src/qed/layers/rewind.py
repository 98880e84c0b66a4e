"""A mixer's state that can go back a few tokens: an earlier state, and what the mixer has read since.

A recurrent state cannot forget its last tokens, but it can be computed again from an earlier one. That takes the
recurrence alone, over the operands that are kept here, and none of the layer's matrices. The convolution's state is cut
out of its inputs, which are kept too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..ops import erase_write
from .sequences import Sequences

if TYPE_CHECKING:
    from ..rules import Operands
    from .mixer import MixerState


class Read(NamedTuple):
    """What a mixer has read, in slots of one token each. The last slots are the last tokens of every row. A row with
    fewer tokens than slots has empty ones before them, whose k = 0 and g = 0 leave the state as it is."""

    inputs: Tensor  # [N, T, 2·H·K + H·V] the convolution's inputs
    k: Tensor  # [N, T × substeps, H, K]
    a: Tensor  # [N, T × substeps, H, K]
    u: Tensor  # [N, T × substeps, H, V]
    g: Tensor | None  # [N, T × substeps, H, 1 or K]

    @property
    def substeps(self) -> int:
        """How many steps of the recurrence a token has."""
        return self.k.shape[1] // self.inputs.shape[1]

    def slots(self, index: Tensor, there: Tensor) -> Read:
        """Return the slots with these numbers, index [N, M], as empty ones where `there` [N, M] is false."""

        def taken(x: Tensor) -> Tensor:
            tokens = x.unflatten(1, (self.inputs.shape[1], -1))
            shape = (*index.shape, *(1 for _ in tokens.shape[2:]))
            return tokens.gather(1, index.view(shape).expand(*index.shape, *tokens.shape[2:])).flatten(1, 2)

        inputs, k, a, u = (taken(x) for x in self[:4])
        exists = there.repeat_interleave(self.substeps, 1)[..., None, None]
        g = None if self.g is None else torch.where(exists, taken(self.g), 0)
        return Read(inputs, torch.where(exists, k, 0), a, u, g)

    def split(self, at: int) -> tuple[Read, Read]:
        """Return the slots before number `at`, and a copy of the rest, so that the memory of the first is set free."""
        places = (at, *4 * (at * self.substeps,))
        first = (None if x is None else x[:, :i] for x, i in zip(self, places, strict=True))
        rest = (None if x is None else x[:, i:].clone() for x, i in zip(self, places, strict=True))
        return Read(*first), Read(*rest)  # type: ignore[arg-type]

    def after(self, state: Tensor, impl: str) -> Tensor:
        """Return the recurrent state that these tokens lead to from `state`."""
        return erase_write(self.k, *self[1:], initial_state=state, impl=impl)[1]


def _joined(parts: tuple[Read, ...]) -> Read:
    if len(parts) == 1:
        return parts[0]
    return Read(*(None if xs[0] is None else torch.cat(xs, 1) for xs in zip(*parts, strict=True)))  # type: ignore[arg-type]


class RewindState(NamedTuple):
    """Where a mixer leaves off, as `MixerState`, and what it takes to go back from there."""

    conv: Tensor
    recurrent: Tensor
    start: Tensor  # [N, H, K, V], the recurrent state before all that was read …
    read: tuple[Read, ...]  # … in one part for each call, so that decoding a token copies nothing
    impl: str  # the route of the recurrence

    def without(self, removed: Tensor) -> RewindState:
        """Return the state without the last `removed` [N] tokens of every row."""
        read = _joined(self.read)
        slots = read.inputs.shape[1]
        index = torch.arange(slots, device=removed.device) - removed[:, None]
        read = read.slots(index.clamp(min=0), index >= 0)
        conv = read.inputs[:, slots - self.conv.shape[1] :].clone()
        return RewindState(conv, read.after(self.start, self.impl), self.start, (read,), self.impl)


def recorded(
    before: MixerState | RewindState | None,
    now: MixerState,
    inputs: Tensor,
    operands: Operands,
    sequences: Sequences,
    *,
    substeps: int,
    tokens: int,
    impl: str,
) -> RewindState:
    """Return the state after a call of a mixer, so that it can go back.

    Args:
        before: the state that the call started from; None for the beginning of a sequence.
        now: the state after it.
        inputs: the convolution's inputs of the call [B, T, channels].
        operands: the operands of its recurrence [B, T × substeps, H, ·].
        sequences: where sequences begin and end.
        substeps: of the rule, how many the recurrence runs for each token.
        tokens: how many of the last tokens can be removed later.
        impl: the route of the recurrence.
    """
    if sequences.cu_seqlens is not None:
        raise ValueError("rewind: packed sequences have no state to go back to; expected 0")
    new = Read(inputs, *operands[1:])
    if isinstance(before, RewindState):
        start, read = before.start, (*before.read, new)
    else:
        start = torch.zeros_like(now.recurrent) if before is None else before.recurrent
        read = (_window(new, None if before is None else before.conv, now.conv.shape[1], substeps), new)
    there = sequences.there(inputs.shape[1])
    if there is not None:  # the empty slots move to the front, and the tokens close up
        known = there.new_ones(there.shape[0], sum(part.inputs.shape[1] for part in read[:-1]))
        there = torch.cat([known, there], 1)
        order = there.to(torch.uint8).argsort(dim=1, stable=True)
        read = (_joined(read).slots(order, there.gather(1, order)),)
    # The convolution's window reaches back from the first token that can be left. Folding the oldest slots into the
    # start only when there are twice as many as needed makes it rare.
    kept, slots = tokens + now.conv.shape[1], sum(part.inputs.shape[1] for part in read)
    if slots >= 2 * kept:
        old, rest = _joined(read).split(slots - kept)
        start, read = old.after(start, impl), (rest,)
    return RewindState(now.conv, now.recurrent, start, read, impl)


def _window(like: Read, conv: Tensor | None, size: int, substeps: int) -> Read:
    """Return empty slots with the convolution's inputs before a first token, zeros if there are none.

    Args:
        like: what has the shapes and dtypes to take.
        conv: the inputs [N, size, channels], or None.
        size: how many slots.
        substeps: of the rule.
    """
    inputs = like.inputs.new_zeros(like.inputs.shape[0], size, like.inputs.shape[2])
    shapes = ((x.shape[0], size * substeps, *x.shape[2:]) if x is not None else () for x in like[1:])
    empty = (None if x is None else x.new_zeros(shape) for x, shape in zip(like[1:], shapes, strict=True))
    return Read(inputs if conv is None else conv.to(inputs.dtype), *empty)  # type: ignore[arg-type]
