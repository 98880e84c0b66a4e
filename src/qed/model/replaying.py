"""Work over tensors at fixed addresses as a CUDA graph: one launch instead of hundreds from Python."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch


class Replayed:
    """Work that runs as it is the first time, is captured the second time, and is replayed from then on.

    The first run compiles kernels and allocates what libraries need. Work that is done once only is then never
    captured, which takes as long as to run it. Elsewhere than on a GPU the work always runs as it is.

    The work must always be the same: it takes its inputs from tensors that stay where they are, and leaves its results
    in such tensors.
    """

    def __init__(self, device: torch.device, pool: torch.cuda._POOL_HANDLE | None = None):
        """
        Args:
            device: where the work runs.
            pool: memory (`torch.cuda.graph_pool_handle`) that is shared with graphs which never run at the same time.
        """
        self.device, self.pool = device, pool
        self.has_run = False
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, work: Callable[[], None]) -> None:
        """Do the work. It always runs outside of inference mode and without gradients, whatever the caller's mode."""
        on_device = torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()
        with torch.inference_mode(False), torch.no_grad(), on_device:
            if self.graph is not None:
                self.graph.replay()
                return
            kind = self.device.type
            dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
            # Autocast keeps weights in low precision until it ends; a graph would read them afterwards.
            with torch.autocast(kind, dtype, enabled, cache_enabled=False):
                if kind != "cuda" or not self.has_run:
                    work()
                    self.has_run = True
                    return
                graph = torch.cuda.CUDAGraph()
                # Only this thread's launches are captured: another thread may be busy on the GPU.
                with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                    work()
            self.graph = graph
            self.graph.replay()
