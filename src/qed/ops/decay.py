"""Decayed pair products inside a chunk, with no positive exponent and no difference of exponents.

For i > j in one chunk the chunk form needs

    M_ij = Σ_c x_ic · k_jc · exp(g_{j+1,c} + … + g_{i,c})            g ≤ 0.

Writing the exponential as exp(G_i)·exp(−G_j) overflows as soon as the decay is strong. Here the chunk is halved
again and again instead: when i lies in the second half of a block and j in the first,

    exp(g_{j+1} + … + g_i) = (product of the decays after j, to the end of the first half)
                           · (product of the decays from the start of the second half, up to i),

two factors in [0, 1], so that quarter of M is one matrix product. The factors of the next larger block are
products of those of its two halves: one `exp` per entry of g serves all levels, nothing overflows, nothing
cancels, and g = −inf is simply a factor 0. The gradient of g runs back down the same tree as sums over the paths
that pass through a step, so a small gradient keeps its relative accuracy.

A decay that is one number per head needs no sum over channels: M = (x kᵀ) ∘ D, with D from the same tree.

Shapes: b = chunks × heads; x [2, b, C, K] holds a and q; k [b, C, K]; g [b, C, K] or [b, C, 1].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .scratch import Scratch


def half_sizes(chunk: int) -> list[int]:
    """1, 2, 4, …, chunk / 2."""
    return [1 << level for level in range(chunk.bit_length() - 1)]


def halves(x: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """First and second halves of every block of 2·half tokens: views [..., blocks, half, K] of x [..., C, K]."""
    first, second = x.unflatten(-2, (-1, 2, half)).unbind(-3)
    return first, second


def lower_left(m: Tensor, half: int) -> Tensor:
    """Lower-left quarter of every diagonal block of 2·half: a view [..., blocks, half, half] of m [..., C, C]."""
    *batch, row, column = m.stride()
    shape = (*m.shape[:-2], m.shape[-1] // (2 * half), half, half)
    return m.as_strided(shape, (*batch, 2 * half * (row + column), row, column), m.storage_offset() + half * row)


class Decay(ABC):
    """The decays of a slab's chunks, and the products over them.

    after_start [b, C, K or 1]: decay from the chunk's start through token i (how much of S₀ token i sees)
    until_end   [b, C, K or 1]: decay after token j through the chunk's end (how much of token j's write is left)

    Both begin as those of single tokens; `_merge` makes them those of blocks twice the size.
    """

    def __init__(self, g: Tensor, scratch: Scratch):
        self.scratch = scratch
        self.after_start = torch.exp(g, out=scratch("after_start", *g.shape))
        self.until_end = scratch("until_end", *g.shape).fill_(1)

    def _merge(self, half: int) -> None:
        first_prefix, second_prefix = halves(self.after_start, half)
        first_suffix, _ = halves(self.until_end, half)
        first_suffix *= second_prefix.narrow(-2, half - 1, 1)
        second_prefix *= first_prefix.narrow(-2, half - 1, 1)

    def begin_gradient(self, d_after_start: Tensor, d_until_end: Tensor) -> None:
        """Take the gradients of the logarithms of the whole chunk's two factors; the pairs' own go on top on the way
        down to single tokens."""
        self.dg, self._d_suffix = d_after_start, d_until_end

    def _unmerge(self, half: int) -> tuple[Tensor, Tensor]:
        """`_merge`, differentiated. Returns the views that take this level's own terms: of the first half's suffix
        and of the second half's prefix."""
        first_prefix, second_prefix = halves(self.dg, half)
        first_suffix, _ = halves(self._d_suffix, half)
        first_prefix.select(-2, -1).add_(second_prefix.sum(-2) if half > 1 else second_prefix.squeeze(-2))
        second_prefix.select(-2, -1).add_(first_suffix.sum(-2) if half > 1 else first_suffix.squeeze(-2))
        return first_suffix, second_prefix

    @abstractmethod
    def pairs(self, x: Tensor, k: Tensor, m: Tensor) -> None:
        """Fill m [2, b, C, C] with the pair products: strictly lower, zero elsewhere."""

    @abstractmethod
    def keep_pairs(self, x: Tensor, k: Tensor) -> None:
        """Grow the tree as `pairs` does, and keep what `pairs_backward` needs instead of the products."""

    @abstractmethod
    def pairs_backward(self, dm: Tensor, x: Tensor, k: Tensor, dx: Tensor, dk: Tensor) -> None:
        """Add the pairs' share to dx [2, b, C, K], dk [b, C, K] and dg. Of dm [2, b, C, C], only the strict lower
        part counts."""


class Level(NamedTuple):
    """One level of the tree: blocks of 2·half tokens."""

    half: int
    suffix: Tensor  # [b, blocks, half, K] decay after each token of the first halves, to their end
    prefix: Tensor  # [b, blocks, half, K] decay from the start of the second halves through each token
    rows: Tensor  # [b, blocks, 2, half, K] a and q of the second halves times prefix
    columns: Tensor  # [b, blocks, half, K] k of the first halves times suffix


class ChannelDecay(Decay):
    """A decay of its own in every channel."""

    def _levels(self, x: Tensor, k: Tensor, keep: bool) -> Iterator[Level]:
        _, b, chunk, width = x.shape
        for half in half_sizes(chunk):
            blocks, tag = chunk // (2 * half), str(half) if keep else ""
            suffix, prefix = halves(self.until_end, half)[0], halves(self.after_start, half)[1]
            rows = self.scratch("rows" + tag, b, blocks, 2, half, width)
            columns = self.scratch("columns" + tag, b, blocks, half, width)
            torch.mul(halves(x, half)[1], prefix, out=rows.permute(2, 0, 1, 3, 4))
            torch.mul(halves(k, half)[0], suffix, out=columns)
            if keep:
                suffix = self.scratch("suffix" + tag, *suffix.shape).copy_(suffix)
                prefix = self.scratch("prefix" + tag, *prefix.shape).copy_(prefix)
            yield Level(half, suffix, prefix, rows, columns)
            self._merge(half)

    def pairs(self, x: Tensor, k: Tensor, m: Tensor) -> None:
        m.zero_()
        for half, _, _, rows, columns in self._levels(x, k, keep=False):
            b, blocks, _, _, width = rows.shape
            product = self.scratch("product", b * blocks, 2 * half, half)
            torch.bmm(rows.view(-1, 2 * half, width), columns.view(-1, half, width).mT, out=product)
            lower_left(m, half).copy_(product.view(b, blocks, 2, half, half).movedim(2, 0))

    def keep_pairs(self, x: Tensor, k: Tensor) -> None:
        self.levels = list(self._levels(x, k, keep=True))

    def pairs_backward(self, dm: Tensor, x: Tensor, k: Tensor, dx: Tensor, dk: Tensor) -> None:
        for half, suffix, prefix, rows, columns in reversed(self.levels):
            b, blocks, _, _, width = rows.shape
            d_product = self.scratch("product", b, blocks, 2, half, half).copy_(lower_left(dm, half).movedim(0, 2))
            d_rows = self.scratch("d_rows", *rows.shape)
            d_columns = self.scratch("d_columns", *columns.shape)
            if half == 1:  # a batch of outer products of two numbers and one: cheaper entry by entry
                torch.mul(d_product, columns.unsqueeze(2), out=d_rows)
                torch.mul(d_product[:, :, 0], rows[:, :, 0], out=d_columns)
                d_columns.addcmul_(d_product[:, :, 1], rows[:, :, 1])
            else:
                flat = d_product.view(-1, 2 * half, half)
                torch.bmm(flat, columns.view(-1, half, width), out=d_rows.view(-1, 2 * half, width))
                torch.bmm(flat.mT, rows.view(-1, 2 * half, width), out=d_columns.view(-1, half, width))
            halves(dx, half)[1].addcmul_(d_rows.movedim(2, 0), prefix)
            halves(dk, half)[0].addcmul_(d_columns, suffix)
            d_suffix, d_prefix = self._unmerge(half)
            d_suffix.addcmul_(columns, d_columns)
            for i in (0, 1):
                d_prefix.addcmul_(rows[:, :, i], d_rows[:, :, i])


class HeadDecay(Decay):
    """One decay per head: a plain product times a matrix of decays."""

    def pairs(self, x: Tensor, k: Tensor, m: Tensor) -> None:
        _, b, chunk, _ = x.shape
        self.between = self.scratch("between", b, chunk, chunk).zero_()  # decay between j and i
        for half in half_sizes(chunk):
            suffix, prefix = halves(self.until_end, half)[0], halves(self.after_start, half)[1]
            torch.mul(prefix, suffix.mT, out=lower_left(self.between, half))
            self._merge(half)
        for i in (0, 1):
            torch.bmm(x[i], k.mT, out=m[i]).mul_(self.between)

    def keep_pairs(self, x: Tensor, k: Tensor) -> None:
        self.m = self.scratch("m", 2, *x.shape[1:3], x.shape[2])
        self.pairs(x, k, self.m)

    def pairs_backward(self, dm: Tensor, x: Tensor, k: Tensor, dx: Tensor, dk: Tensor) -> None:
        b, chunk = self.between.shape[:2]
        d_product = self.scratch("d_product", b, chunk, chunk)
        paths = self.scratch("paths", b, chunk, chunk).zero_()
        for i in (0, 1):
            torch.mul(dm[i], self.between, out=d_product)
            dx[i].baddbmm_(d_product, k)
            dk.baddbmm_(d_product.mT, x[i])
            paths.addcmul_(dm[i], self.m[i])
        for half in reversed(half_sizes(chunk)):
            self._unmerge(half)
        # g_l lies on the path of every pair j < l ≤ i.
        onwards = torch.ones(chunk, chunk, dtype=paths.dtype, device=paths.device).triu_()
        self.dg += torch.matmul(onwards, paths).tril_(-1).sum(-1, keepdim=True)
