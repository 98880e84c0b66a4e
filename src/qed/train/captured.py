"""A piece of a batch, forward and backward, as one CUDA graph.

At 340M parameters a piece is two thousand kernels. Asking for them one by one takes Python as long as a fast GPU takes
to run them, so that what the machine's CPU does shows in the step. A graph is asked for at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Captured:
    """Calls `work` once, then captures it and replays that: on the same weights, adding to the same gradients, which
    therefore have to stay where they are. `pool`: memory shared with others that never run at the same time."""

    def __init__(self, pool: Any = None):
        self.pool = pool
        self.rows: Tensor | None = None
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, work: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        """`work` takes rows and gives a scalar."""
        if self.rows is None:  # programs are compiled now, and gradients come to be
            self.rows = rows.clone()
            return work(rows)
        if rows.shape != self.rows.shape:  # what is left over of a batch
            return work(rows)
        if self.graph is None:
            self.found = torch.zeros((), device=rows.device)
            self.graph = self._capture(work, self.rows)
        self.rows.copy_(rows)
        self.graph.replay()
        return self.found

    def _capture(self, work: Callable[[Tensor], Tensor], rows: Tensor) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        try:
            # Of this thread alone: another one reads the next batch.
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                self.found.copy_(work(rows))
        except RuntimeError as error:
            message = "a piece of the batch could not be captured as a CUDA graph (with compile=false none is)"
            raise RuntimeError(f"{message}: {error}") from error
        return graph
