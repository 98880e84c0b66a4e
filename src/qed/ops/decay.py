"""Decayed pair products inside a chunk, with no positive exponent and no difference of exponents.

For i > j in one chunk the chunk form needs

    M_ij = Σ_c x_ic · k_jc · exp(g_{j+1,c} + … + g_{i,c})            g ≤ 0.

Writing the exponential as exp(G_i)·exp(−G_j) overflows as soon as the decay is strong. Here the chunk is halved
again and again instead: when i lies in the second half of a block and j in the first,

    exp(g_{j+1} + … + g_i) = (product of the decays after j, to the end of the first half)
                           · (product of the decays from the start of the second half, up to i),

two factors in [0, 1], so that quarter of M is one matrix product. The factors of the next larger block are
products of those of its two halves: one `exp` per entry of g serves all levels, nothing overflows, nothing
cancels, and g = −inf is simply a factor 0. When the whole chunk is one block, the factors are those by which x
meets the chunk's start state and k its end state. The gradient of g runs back down the same tree as sums over the
paths that pass through a step, so a small gradient keeps its relative accuracy.

A decay that is one number per head needs no sum over channels: M = (x kᵀ) ∘ D, with D from the same tree.

Shapes: b = chunks × heads; x [2, b, C, K] holds a and q; k [b, C, K]; g [b, C, K] or [b, C, 1].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from .scratch import Scratch


def half_sizes(chunk: int) -> list[int]:
    """Return the sizes of the halves at every level of the tree: 1, 2, 4, …, chunk / 2."""
    return [1 << level for level in range(chunk.bit_length() - 1)]


def halves(x: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """Return the first and second halves of every block of 2·half tokens, as views [..., blocks, half, K] of x
    [..., C, K]."""
    first, second = x.unflatten(-2, (-1, 2, half)).unbind(-3)
    return first, second


def lower_left(m: Tensor, half: int) -> Tensor:
    """Return the lower-left quarter of every diagonal block of 2·half rows, as a view [..., blocks, half, half] of m
    [..., C, C]."""
    *batch, row, column = m.stride()
    shape = (*m.shape[:-2], m.shape[-1] // (2 * half), half, half)
    return m.as_strided(shape, (*batch, 2 * half * (row + column), row, column), m.storage_offset() + half * row)


class Decayed(NamedTuple):
    """The terms by which a chunk meets the states at its two ends."""

    x_tilde: Tensor  # [2, b, C, K] a and q times the decay from the chunk's start through their token
    k_bar: Tensor  # [b, C, K] k times the decay after its token, through the chunk's end
    gamma: Tensor  # [b, K or 1, 1] the decay of the whole chunk


class Decay(ABC):
    """The decays of a slab's chunks: between their tokens, and from their tokens to both ends. The memory of g is
    overwritten."""

    def __init__(self, g: Tensor, x: Tensor, k: Tensor, scratch: Scratch):
        self.each = g.exp_()
        self.x, self.k, self.scratch = x, k, scratch
        self.half_sizes = half_sizes(g.shape[1])

    @abstractmethod
    def pairs(self, m: Tensor) -> Decayed:
        """Fill m [2, b, C, C] with the pair products below the diagonal and zeros elsewhere."""

    @abstractmethod
    def keep_pairs(self) -> Decayed:
        """Build the tree as `pairs` does, and keep what `backward` needs instead of the products."""

    @abstractmethod
    def backward(self, dm: Tensor, dx: Tensor, dk: Tensor, d_gamma: Tensor) -> Tensor:
        """Return the gradient of g, and turn the gradients of x̃ and k̄ in place into those of x and k, pairs included.

        Args:
            dm: gradient of M, [2, b, C, C]; only what is below the diagonal counts.
            dx: gradient of x̃, [2, b, C, K], which becomes that of x.
            dk: gradient of k̄, [b, C, K], which becomes that of k.
            d_gamma: gradient of log γ_C, [b, K].
        """

    def _begin_gradient(self, dx: Tensor, dk: Tensor, d_gamma: Tensor, decayed: Decayed) -> None:
        """Start with the gradients of the logarithms of the whole chunk's factors. Those of the pairs' factors are
        added on the way down to single tokens."""
        x_tilde, k_bar, _ = decayed
        self.d_prefix = torch.mul(x_tilde[0], dx[0], out=self.scratch("d_prefix", *dk.shape))
        self.d_prefix.addcmul_(x_tilde[1], dx[1])
        self.d_prefix[:, -1] += d_gamma
        self.d_suffix = torch.mul(k_bar, dk, out=self.scratch("d_suffix", *dk.shape))

    def _unmerge(self, half: int) -> tuple[Tensor, Tensor]:
        """Go from the factors of blocks of 2·half tokens to those of their halves. Return the views that this level's
        own terms have to be added to: the first half's suffix and the second half's prefix."""
        first_prefix, second_prefix = halves(self.d_prefix, half)
        first_suffix, _ = halves(self.d_suffix, half)
        first_prefix.select(-2, -1).add_(second_prefix.sum(-2) if half > 1 else second_prefix.squeeze(-2))
        second_prefix.select(-2, -1).add_(first_suffix.sum(-2) if half > 1 else first_suffix.squeeze(-2))
        return first_suffix, second_prefix


class Level(NamedTuple):
    """One level of the tree, blocks of 2·half tokens, as the backward needs it."""

    half: int
    rows: Tensor  # [b, blocks, 2, half, K] a and q of the second halves, decayed from those halves' start
    columns: Tensor  # [b, blocks, half, K] k of the first halves, decayed to those halves' end
    first_total: Tensor  # [b, blocks, 1, K] the decay over the first halves
    second_total: Tensor  # [b, blocks, 1, K] the decay over the second halves


class ChannelDecay(Decay):
    """Every channel has its own decay. Copies of x and k are decayed in place, block by larger block."""

    def pairs(self, m: Tensor) -> Decayed:
        """Fill m as `Decay.pairs` says, with one batched product for every level of the tree."""
        m.zero_()
        self._begin()
        b, chunk, width = self.k.shape
        for half in self.half_sizes:
            blocks = chunk // (2 * half)
            columns = self.k_bar.view(-1, 2 * half, width)[:, :half].mT
            product = self.scratch("product", 2, b * blocks, half, half)
            for i in (0, 1):
                torch.bmm(self.x_tilde[i].view(-1, 2 * half, width)[:, half:], columns, out=product[i])
            lower_left(m, half).copy_(product.view(2, b, blocks, half, half))
            self._merge(half)
        return self._decayed()

    def keep_pairs(self) -> Decayed:
        """Keep both operands of every level's product."""
        self._begin()
        self.levels = []
        b, chunk, width = self.k.shape
        for half in self.half_sizes:
            blocks = chunk // (2 * half)
            rows = self.scratch(f"rows {half}", b, blocks, 2, half, width)
            columns = self.scratch(f"columns {half}", b, blocks, half, width)
            rows.copy_(halves(self.x_tilde, half)[1].movedim(0, 2))
            columns.copy_(halves(self.k_bar, half)[0])
            self.levels.append(Level(half, rows, columns, *self._merge(half)))
        return self._decayed()

    def backward(self, dm: Tensor, dx: Tensor, dk: Tensor, d_gamma: Tensor) -> Tensor:
        """Go down the tree, from the whole chunk to single tokens.

        Args:
            dm, dx, dk, d_gamma: as in `Decay.backward`.
        """
        self._begin_gradient(dx, dk, d_gamma, self._decayed())
        for half, rows, columns, first_total, second_total in reversed(self.levels):
            b, blocks, _, _, width = rows.shape
            d_product = self.scratch("product", b, blocks, 2, half, half).copy_(lower_left(dm, half).movedim(0, 2))
            d_rows = self.scratch("d_rows", *rows.shape)
            d_columns = self.scratch("d_columns", *columns.shape)
            if half == 1:  # outer products of two numbers and one are cheaper entry by entry
                torch.mul(d_product, columns.unsqueeze(2), out=d_rows)
                torch.mul(d_product[:, :, 0], rows[:, :, 0], out=d_columns)
                d_columns.addcmul_(d_product[:, :, 1], rows[:, :, 1])
            else:
                flat = d_product.view(-1, 2 * half, half)
                torch.bmm(flat, columns.view(-1, half, width), out=d_rows.view(-1, 2 * half, width))
                torch.bmm(flat.mT, rows.view(-1, 2 * half, width), out=d_columns.view(-1, half, width))
            dx_second, dk_first = halves(dx, half)[1], halves(dk, half)[0]
            torch.addcmul(d_rows.movedim(2, 0), dx_second, first_total, out=dx_second)
            torch.addcmul(d_columns, dk_first, second_total, out=dk_first)
            d_suffix, d_prefix = self._unmerge(half)
            d_suffix.addcmul_(columns, d_columns)
            for i in (0, 1):
                d_prefix.addcmul_(rows[:, :, i], d_rows[:, :, i])
        dx *= self.each
        return self.d_prefix

    def _begin(self) -> None:
        """Start with blocks of one token, where x has decayed once and k not yet."""
        self.x_tilde = torch.mul(self.x, self.each, out=self.scratch("x_tilde", *self.x.shape))
        self.k_bar = self.scratch("k_bar", *self.k.shape).copy_(self.k)
        self.total = self.each

    def _merge(self, half: int) -> tuple[Tensor, Tensor]:
        """Make blocks of 2·half tokens from their halves, and return the decays over these halves."""
        first, second = halves(self.total, 1)
        halves(self.x_tilde, half)[1].mul_(first)
        halves(self.k_bar, half)[0].mul_(second)
        self.total = torch.mul(first, second, out=self.scratch(f"total {half}", *first.shape)).squeeze(-2)
        return first, second

    def _decayed(self) -> Decayed:
        return Decayed(self.x_tilde, self.k_bar, self.total.mT)


class HeadDecay(Decay):
    """There is one decay per head: M is a plain product times a matrix of decays, which come from a tree of small
    [b, C, 1] factors."""

    def pairs(self, m: Tensor) -> Decayed:
        """Fill m as `Decay.pairs` says, with one product of the whole chunk."""
        b, chunk, _ = self.k.shape
        after_start, until_end = self.each, torch.ones_like(self.each)
        self.between = self.scratch("between", b, chunk, chunk).zero_()  # decay between j and i
        for half in self.half_sizes:
            first_prefix, second_prefix = halves(after_start, half)
            first_suffix, _ = halves(until_end, half)
            torch.mul(second_prefix, first_suffix.mT, out=lower_left(self.between, half))
            first_suffix *= second_prefix.narrow(-2, half - 1, 1)
            second_prefix *= first_prefix.narrow(-2, half - 1, 1)
        for i in (0, 1):
            torch.bmm(self.x[i], self.k.mT, out=m[i]).mul_(self.between)
        self.after_start, self.until_end = after_start, until_end
        x_tilde = torch.mul(self.x, after_start, out=self.scratch("x_tilde", *self.x.shape))
        k_bar = torch.mul(self.k, until_end, out=self.scratch("k_bar", *self.k.shape))
        return Decayed(x_tilde, k_bar, after_start[:, -1:])

    def keep_pairs(self) -> Decayed:
        """Keep the products themselves: the gradient of g needs them."""
        self.m = self.scratch("m", *self.x.shape[:3], self.x.shape[2])
        self.decayed = self.pairs(self.m)
        return self.decayed

    def backward(self, dm: Tensor, dx: Tensor, dk: Tensor, d_gamma: Tensor) -> Tensor:
        """Take the whole chunk's factors down the tree, and the pairs by products of the whole chunk.

        Args:
            dm, dx, dk, d_gamma: as in `Decay.backward`.
        """
        self._begin_gradient(dx, dk, d_gamma, self.decayed)
        self.d_prefix, self.d_suffix = (d.sum(-1, keepdim=True) for d in (self.d_prefix, self.d_suffix))
        for half in reversed(self.half_sizes):
            self._unmerge(half)
        dx *= self.after_start
        dk *= self.until_end
        b, chunk = self.between.shape[:2]
        d_product = self.scratch("d_product", b, chunk, chunk)
        paths = self.scratch("paths", b, chunk, chunk).zero_()
        for i in (0, 1):
            torch.mul(dm[i], self.between, out=d_product)
            dx[i].baddbmm_(d_product, self.k)
            dk.baddbmm_(d_product.mT, self.x[i])
            paths.addcmul_(dm[i], self.m[i])
        # g_l lies on the path of every pair j < l ≤ i.
        onwards = torch.ones(chunk, chunk, dtype=paths.dtype, device=paths.device).triu_()
        return self.d_prefix + torch.matmul(onwards, paths).tril_(-1).sum(-1, keepdim=True)
