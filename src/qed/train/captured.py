"""A piece of a batch, forward and backward, as one CUDA graph.

At 340M parameters a piece is two thousand kernels. Python takes as long to launch them one by one as a fast GPU takes
to run them, so that a step becomes slower whenever the CPU is busy. A graph is a single launch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..model.replaying import end_failed_capture, recorded


class Captured:
    """A function that is called as it is at first, and afterwards captured once and replayed.

    A replay uses the same weights and adds to the same gradients, which therefore have to stay in place in memory.
    """

    def __init__(self, pool: torch.cuda._POOL_HANDLE | None = None):
        """`pool`: memory (torch.cuda.graph_pool_handle) shared with graphs that never run at the same time."""
        self.pool = pool
        self.rows: Tensor | None = None
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, work: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        """Call `work`, which maps rows to a scalar, or replay what was captured of it."""
        if self.rows is None:  # this call compiles programs and allocates gradients
            self.rows = rows.clone()
            return work(rows)
        if rows.shape != self.rows.shape:  # the smaller last piece of a batch
            return work(rows)
        if self.graph is None:
            self.result = torch.zeros((), device=rows.device)
            self.graph = self._capture(work, self.rows)
        self.rows.copy_(rows)
        self.graph.replay()
        return self.result

    def _capture(self, work: Callable[[Tensor], Tensor], rows: Tensor) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        try:
            with recorded(graph, self.pool):  # another thread copies the next batch to the GPU meanwhile
                self.result.copy_(work(rows))
        except RuntimeError as error:
            end_failed_capture()
            message = "a piece of the batch could not be captured as a CUDA graph (with compile=false none is)"
            raise RuntimeError(f"{message}: {error}") from error
        return graph
