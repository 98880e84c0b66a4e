"""Batches as a pure function of (seed, step): rows of a global batch never depend on how many processes share it.

The corpus is one row of tokens, cut into windows of T + 1 that overlap by one. An epoch visits every window once, in an
order that a keyed permutation gives without a table: nothing to keep, nothing to restore.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from .generated import Generated
from .shards import TokenShards


class Loader:
    """The rows of a corpus that a process trains on, by the number of the step. Rows that are made have no order: the
    run's sample of a number is the row of that number."""

    def __init__(
        self,
        source: TokenShards | Generated,
        *,
        tokens: int,
        batch: int,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
    ):
        """`tokens` of a row, and `batch` rows of the global batch, of which this process has those of its rank."""
        if batch % world:
            raise ValueError(f"batch: expected a multiple of {world} processes, got {batch}")
        self.source, self.tokens, self.batch, self.seed = source, tokens, batch, seed
        self.rows = range(rank * (batch // world), (rank + 1) * (batch // world))
        self.windows = source.windows(tokens)
        self.targets = source.targets(batch, tokens)  # of the global batch, the same at every step
        if isinstance(source, TokenShards) and self.windows == 0:
            raise ValueError(f"corpus: expected more than {tokens} tokens for one window, got {len(source)}")

    def window(self, sample: int) -> int:
        """Which window the run's sample number `sample` is."""
        if self.windows is None:
            return sample
        epoch, place = divmod(sample, self.windows)
        return permuted(place, self.windows, f"{self.seed}/{epoch}")

    def step(self, step: int) -> Tensor:
        """This process's rows [batch / world, T + 1], or [batch / world, T + 1, 2], of a step's global batch."""
        return self.source.rows([self.window(step * self.batch + row) for row in self.rows], self.tokens)


class ReadAhead:
    """A loader's steps on a device, each read from disk and copied while the one before is worked on."""

    def __init__(self, loader: Loader, device: str):
        self.loader, self.device, self.thread = loader, device, ThreadPoolExecutor(1)
        self.next: tuple[int, Future[Tensor]] | None = None

    def step(self, step: int) -> Tensor:
        """The rows of a step on the device; begins to read those of the next."""
        read = self.next[1] if self.next and self.next[0] == step else self._begin(step)
        self.next = step + 1, self._begin(step + 1)
        return read.result()

    def _begin(self, step: int) -> Future[Tensor]:
        return self.thread.submit(self._read, step)

    def _read(self, step: int) -> Tensor:
        rows = self.loader.step(step)
        if self.device.startswith("cuda"):
            rows = rows.pin_memory()  # from elsewhere a copy waits for all that was asked of the device before
        return rows.to(self.device, non_blocking=True)


def permuted(place: int, count: int, key: str) -> int:
    """Where a permutation of range(count) puts a place: four Feistel rounds over the next power of four, repeated until
    the result is inside.

    Args:
        place: in range(count).
        count: how many there are.
        key: which permutation.
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    keys = hashlib.sha256(key.encode()).digest()
    while True:
        left, right = place >> half, place & mask
        for i in range(4):
            mixed = hashlib.blake2b(right.to_bytes(8, "little"), digest_size=8, key=keys[8 * i : 8 * i + 8]).digest()
            left, right = right, left ^ (int.from_bytes(mixed, "little") & mask)
        place = (left << half) | right
        if place < count:
            return place
