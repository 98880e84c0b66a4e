"""Work over tensors at fixed addresses as a CUDA graph: one launch instead of hundreds from Python."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch

_log = logging.getLogger(__name__)


@contextmanager
def recorded(graph: torch.cuda.CUDAGraph, pool: torch.cuda._POOL_HANDLE | None = None) -> Iterator[None]:
    """Record what this thread launches into a graph; another thread may be busy on the GPU.

    The caller's stream then waits for the stream of the capture. On that one, versions of torch set the seed and the
    offset from which graphs draw at random. Where others use the GPU too, this might come while the graph is replayed,
    which would then draw other numbers.

    Args:
        graph: a new graph.
        pool: as in `Replayed`.
    """
    caller = torch.cuda.current_stream()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        stream = torch.cuda.current_stream()
        yield
    caller.wait_stream(stream)


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
        self.refused = False  # whether a capture has failed
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
                self.graph = None if self.refused else self._captured(work)
                if self.graph is None:
                    work()
                    return
            self.graph.replay()

    def _captured(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        """Return the graph of the work; None if something in it cannot be captured, such as waiting for the GPU."""
        graph = torch.cuda.CUDAGraph()
        try:
            with recorded(graph, self.pool):
                work()
        except RuntimeError as error:
            end_failed_capture()
            _log.warning("could not be captured as a CUDA graph, and is run kernel by kernel: %s", error)
            self.refused = True
            return None
        return graph


def end_failed_capture() -> None:
    """Let the process draw random numbers on the GPU again. torch leaves its generator as it is during a capture when
    that fails; the end of a capture that succeeds sets it right."""
    with recorded(torch.cuda.CUDAGraph()):
        torch.zeros((), device="cuda")
