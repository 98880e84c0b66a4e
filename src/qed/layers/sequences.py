"""Where sequences begin and end in a batch: one object, made once and passed to every layer.

A batch has one of three layouts:

    dense     [B, T, …]      B sequences of T tokens
    aligned   [B, T, …]      B sequences of up to T tokens, each at the start of its row; what follows is ignored
    packed    [1, total, …]  N sequences one behind the other, `cu_seqlens` [N + 1]

A padded batch becomes an aligned one: real tokens move to the front of their row, in their order, whether padding was
left, right or in between. Shapes stay the same, the host does not wait for the device, and padding leaves a state
unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """The layout of a batch: dense if nothing is given, otherwise aligned or packed."""

    lengths: Tensor | None = None  # [B], how many tokens each row of an aligned batch has
    order: Tensor | None = None  # [B, T], the column that each token of an aligned row comes from
    cu_seqlens: Tensor | None = None  # [N + 1], the offsets of packed sequences

    @staticmethod
    def from_mask(mask: Tensor) -> Sequences:
        """Return the layout of a padded batch, whose `mask` [B, T] is true (or 1) at real tokens."""
        if mask.dim() != 2:
            raise ValueError(f"mask: expected shape [B, T], got {list(mask.shape)}")
        mask = mask.bool()
        order = torch.argsort(mask.to(torch.uint8), dim=1, descending=True, stable=True)
        return Sequences(lengths=mask.sum(1), order=order)

    def align(self, x: Tensor) -> Tensor:
        """Return the padded x [B, T, …] aligned."""
        if self.order is None:
            return x
        return x.gather(1, _expand(self.order, x))

    def restore(self, x: Tensor) -> Tensor:
        """Return the aligned x [B, T, …] padded as it came. At padding there are finite numbers without meaning."""
        if self.order is None:
            return x
        return x.new_empty(x.shape).scatter(1, _expand(self.order, x), x)

    def there(self, tokens: int) -> Tensor | None:
        """Return which tokens of aligned rows exist, [B, T] bool; None where all do."""
        if self.lengths is None:
            return None
        return torch.arange(tokens, device=self.lengths.device) < self.lengths[:, None]

    def positions(self, x: Tensor) -> Tensor:
        """Return every token's place in its sequence, [B, T]."""
        places = torch.arange(x.shape[1], device=x.device)
        if self.cu_seqlens is not None:
            places = (places - self.cu_seqlens.clamp(min=0)[self.owners(x)]).clamp(min=0)
            return places[None]
        return places.expand(x.shape[0], -1)

    def owners(self, x: Tensor) -> Tensor:
        """Return the number of the packed sequence that every token belongs to, [total].

        Whatever the offsets are, the results of this and of `positions` are within what kernels may read. Wrong offsets
        are refused later by the op, so that nothing here has to wait for the device to look at them."""
        assert self.cu_seqlens is not None
        ended = torch.searchsorted(self.cu_seqlens, torch.arange(x.shape[1], device=x.device), right=True)
        return (ended - 1).clamp(0, self.cu_seqlens.shape[0] - 2)


def padding_first(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the padded x [B, T, …] and its mask [B, T] with all padding before the tokens: the last column then has
    the last token of every row."""
    order = torch.argsort(mask.bool().to(torch.uint8), dim=1, stable=True)
    return x.gather(1, _expand(order, x)), mask.gather(1, order)


def _expand(order: Tensor, x: Tensor) -> Tensor:
    return order.reshape(*order.shape, *(1 for _ in x.shape[2:])).expand(x.shape)


DENSE = Sequences()
