"""Where sequences begin and end in a batch: one object, made once, passed whole to every layer.

Three layouts, one meaning, and never two of them at once:

    dense     [B, T, …]      B sequences of T tokens
    aligned   [B, T, …]      B sequences of up to T tokens, each at the start of its row; what follows is not there
    packed    [1, total, …]  N sequences one behind the other, `cu_seqlens` [N + 1]

A padded batch becomes an aligned one: real tokens move to the front of their row, in their order, whether padding was
left, right or in between. Shapes stay, nothing waits for the device, and a state passes what is not there unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Sequences:
    lengths: Tensor | None = None  # [B], aligned
    order: Tensor | None = None  # [B, T] the column each token of an aligned row comes from
    cu_seqlens: Tensor | None = None  # [N + 1], packed

    @staticmethod
    def from_mask(mask: Tensor) -> Sequences:
        """`mask` [B, T], true (or 1) at real tokens."""
        if mask.dim() != 2:
            raise ValueError(f"mask: expected shape [B, T], got {list(mask.shape)}")
        mask = mask.bool()
        order = torch.argsort(mask.to(torch.uint8), dim=1, descending=True, stable=True)
        return Sequences(lengths=mask.sum(1), order=order)

    def align(self, x: Tensor) -> Tensor:
        """Padded [B, T, …] → aligned."""
        if self.order is None:
            return x
        return x.gather(1, _expand(self.order, x))

    def restore(self, x: Tensor) -> Tensor:
        """Aligned [B, T, …] → padded as it came. At padding there is something finite, without meaning."""
        if self.order is None:
            return x
        return x.new_empty(x.shape).scatter(1, _expand(self.order, x), x)

    def there(self, tokens: int) -> Tensor | None:
        """[B, T] bool: which tokens of aligned rows exist; None where all do."""
        if self.lengths is None:
            return None
        return torch.arange(tokens, device=self.lengths.device) < self.lengths[:, None]

    def positions(self, x: Tensor) -> Tensor:
        """[B, T]: every token's place in its sequence."""
        places = torch.arange(x.shape[1], device=x.device)
        if self.cu_seqlens is not None:
            places = (places - self.cu_seqlens.clamp(min=0)[self.owners(x)]).clamp(min=0)
            return places[None]
        return places.expand(x.shape[0], -1)

    def owners(self, x: Tensor) -> Tensor:
        """[total]: the packed sequence every token belongs to.

        This and `positions` are inside of what kernels may read whatever the offsets are; the op then refuses wrong
        ones, without anybody having waited for the device to see them."""
        assert self.cu_seqlens is not None
        ended = torch.searchsorted(self.cu_seqlens, torch.arange(x.shape[1], device=x.device), right=True)
        return (ended - 1).clamp(0, self.cu_seqlens.shape[0] - 2)


def _expand(order: Tensor, x: Tensor) -> Tensor:
    return order.reshape(*order.shape, *(1 for _ in x.shape[2:])).expand(x.shape)


DENSE = Sequences()
