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
    k: Tensor  # [N, T, substeps, H, K]
    a: Tensor  # [N, T, substeps, H, K]
    u: Tensor  # [N, T, substeps, H, V]
    g: Tensor | None  # [N, T, substeps, H, 1 or K]

    def slots(self, index: Tensor, there: Tensor) -> Read:
        """Return the slots with these numbers, index [N, M], as empty ones where `there` [N, M] is false."""

        def taken(x: Tensor) -> Tensor:
            shape = (*index.shape, *(1 for _ in x.shape[2:]))
            return x.gather(1, index.view(shape).expand(*index.shape, *x.shape[2:]))

        inputs, k, a, u = (taken(x) for x in self[:4])
        exists = there[..., None, None, None]
        g = None if self.g is None else torch.where(exists, taken(self.g), 0)
        return Read(inputs, torch.where(exists, k, 0), a, u, g)

    def split(self, at: int) -> tuple[Read, Read]:
        """Return the slots before number `at`, and a copy of the rest, so that the memory of the first is set free."""
        first = (None if x is None else x[:, :at] for x in self)
        rest = (None if x is None else x[:, at:].clone() for x in self)
        return Read(*first), Read(*rest)  # type: ignore[arg-type]

    def after(self, state: Tensor, impl: str) -> Tensor:
        """Return the recurrent state that these tokens lead to from `state`."""
        k, a, u, g = (None if x is None else x.flatten(1, 2) for x in self[1:])
        return erase_write(k, k, a, u, g, initial_state=state, impl=impl)[1]  # type: ignore[arg-type]


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
    new = Read(inputs, *(None if x is None else x.unflatten(1, (-1, substeps)) for x in operands[1:]))  # type: ignore[arg-type]
    if isinstance(before, RewindState):
        start, read = before.start, (*before.read, new)
    else:
        start = torch.zeros_like(now.recurrent) if before is None else before.recurrent
        read = (_window(new, None if before is None else before.conv, now.conv.shape[1]), new)
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


def _window(like: Read, conv: Tensor | None, size: int) -> Read:
    """Return empty slots with the convolution's inputs before a first token, zeros if there are none."""
    empty = Read(*(None if x is None else x.new_zeros(x.shape[0], size, *x.shape[2:]) for x in like))  # type: ignore[arg-type]
    return empty if conv is None else empty._replace(inputs=conv.to(like.inputs.dtype))
