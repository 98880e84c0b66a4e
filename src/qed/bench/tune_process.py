"""What the processes of `qed bench --tune` do: compile candidates, or time them and check what they compute."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from ..kernels.launching import Prepared
from ..kernels.recurrence import launch
from ..kernels.recurrence.settings import architecture, replacements, use_settings
from ..ops.arguments import Arguments
from ..testing import relative_error
from .measuring import milliseconds
from .ops import STRONG, Raw, Shape
from .tune import ALL, WINS

DIFFERENT = 5e-3  # relative error beyond which a candidate's results are wrong; bfloat16 rounds by 2e-3
REPEATS = 50  # of a candidate that wins, all of which must give the same bits
CALLS, ROUNDS = 10, 5  # launches in a row, and how often they are timed
NAMES = ("o", "final_state", "dq", "dk", "da", "du", "dg", "d_initial_state")


class Launched(NamedTuple):
    """One launch of a kernel."""

    prepared: Prepared
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]

    @property
    def name(self) -> str:
        """The kernel's name, as the settings have it."""
        kernel, constants = self.prepared.kernel.fn.__name__, self.prepared.constants
        return "segment_maps" if constants.get("MAPS") else kernel + ", cut" * bool(constants.get("LEVELS"))

    def again(self) -> None:
        """Launch it once more: it writes the same numbers to the same places."""
        self.prepared(self.grid, *self.arguments)


@contextmanager
def recorded(run: bool) -> Iterator[list[Launched]]:
    """Keep all launches, and run them or not."""
    found: list[Launched] = []
    usual = Prepared.__call__

    def keep(self: Prepared, grid: tuple[int, ...], *arguments: Any) -> None:
        found.append(Launched(self, grid, arguments))
        if run:
            usual(self, grid, *arguments)

    with patch.object(Prepared, "__call__", keep), patch.object(launch, "compile_together", lambda *_: None):
        yield found


@dataclass(frozen=True)
class Problem:
    """Inputs of the op, with the cotangent of its output."""

    arguments: Arguments
    cotangent: Tensor

    @staticmethod
    def draw(shape: Shape, device: str, decay: float) -> Problem:
        """Draw random inputs.

        Args:
            shape: The size of the problem.
            device: Where its tensors are.
            decay: A factor on the log-decay.
        """
        torch.manual_seed(0)
        q, k, a, u, g = Raw.draw(shape, device).operands("qed")
        assert g is not None
        return Problem(Arguments(q, k, a, u, decay * g, None, None, shape.width**-0.5), torch.randn_like(u))

    def results(self) -> list[Tensor]:
        """Run forward and backward, and return everything that they compute."""
        o, state, saved = launch.forward(self.arguments, True)
        found = launch.backward(self.cotangent, None, self.arguments, saved)
        return [o, state, *(x for x in found if x is not None)]

    def launch_of(self, kernel: str) -> Launched:
        """Return a kernel's launch without running any. Of several it is one with most columns of V, since states that
        are left over have narrower programs; and of these the last, which for sequences that are cut into segments does
        all of the kernel's work."""
        with recorded(run=False) as launches:
            self.results()
        own = [x for x in launches if x.name == kernel]
        return max(reversed(own), key=lambda x: x.prepared.constants.get("BV", 0))


def compile(shape: Shape, device: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a function that compiles a task's kernel, which nothing launches, and says what it takes."""
    problem = Problem.draw(shape, device, 1.0)

    def work(task: dict[str, Any]) -> dict[str, Any]:
        found = problem.launch_of(task["kernel"])
        kernel = found.prepared.kernel.warmup(*found.arguments, grid=(1,), **found.prepared.constants)
        kernel._init_handles()  # which raises if the GPU has too little of something
        return {"registers": kernel.n_regs, "spilled": kernel.n_spills, "shared": kernel.metadata.shared // 1024}

    return work


def measure(shape: Shape, device: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a function that times a task's kernel, or everything, and compares results with the usual ones."""
    problems: dict[bool, tuple[Problem, list[Tensor], dict[str, float]]] = {}

    def of(cut: bool) -> tuple[Problem, list[Tensor], dict[str, float]]:
        """Return a problem, its results with the settings in use, and times with them, which fill as kernels come."""
        if cut not in problems:
            use_settings(None)
            problems.clear()  # one at a time: memory
            problem = Problem.draw(shape, device, STRONG if cut else 1.0)
            problems[cut] = problem, problem.results(), {}
        return problems[cut]

    def work(task: dict[str, Any]) -> dict[str, Any]:
        kernel = task["kernel"]
        problem, truth, times = of(kernel.endswith(", cut"))
        _use(task, device)
        with recorded(run=True) as launches:
            found = problem.results()
        errors = {name: relative_error(x, y) for name, x, y in zip(NAMES, found, truth, strict=True)}
        name, error = max(errors.items(), key=lambda x: x[1] if x[1] == x[1] else float("inf"))
        if not error <= DIFFERENT:
            return {"failed": f"{name} is off by {error:.1e}", "error": error}
        ms = _time(device, problem, kernel, launches)
        if kernel not in times:
            times[kernel] = _usual_ms(task, device, problem) if task["settings"] else ms
        if kernel == ALL or ms < WINS * times[kernel]:
            for _ in range(REPEATS):
                if not all(torch.equal(x, y) for x, y in zip(problem.results(), found, strict=True)):
                    return {"failed": "results differ from run to run", "ms": ms}
        return {"ms": ms, "error": error}

    return work


def _usual_ms(task: dict[str, Any], device: str, problem: Problem) -> float:
    """Time a kernel with the settings in use, for a process that did not do it before."""
    use_settings(None)
    with recorded(run=True) as launches:
        problem.results()
    ms = _time(device, problem, task["kernel"], launches)
    _use(task, device)
    return ms


def _time(device: str, problem: Problem, kernel: str, launches: list[Launched]) -> float:
    """Return the milliseconds of a kernel's launches, or of everything, of several in a row: the GPU never waits for
    Python."""
    own = [x for x in launches if x.name == kernel]

    def calls() -> None:
        for _ in range(CALLS):
            if kernel == ALL:
                problem.results()
            for x in own:
                x.again()

    calls()
    return statistics.median(milliseconds(device, calls) for _ in range(ROUNDS)) / CALLS


def _use(task: dict[str, Any], device: str) -> None:
    """Use a task's settings in place of the same kernels' in the package's file."""
    use_settings(None)
    use_settings({**replacements(architecture(torch.device(device))), **task["settings"]})


def serve(way: Callable[[Shape, str], Callable[[dict[str, Any]], dict[str, Any]]]) -> None:
    """Read tasks from standard input and print a line for each. An error that leaves the GPU usable is an answer."""
    job = json.load(sys.stdin)
    shape, device = Shape(**job["shape"]), job["device"]
    work = way(shape, device)
    for task in job["tasks"]:
        _use(task, device)
        try:
            answer = work(task)
            if device.startswith("cuda"):
                torch.cuda.synchronize()
        except Exception as error:
            words = str(error).strip().splitlines() or [""]
            answer = {"failed": f"{type(error).__name__}: {words[0]}"[:100]}
            if "CUDA" in str(error) or "illegal" in str(error):
                # Nothing that this process would compute can be trusted. Its last words are the answer.
                raise SystemExit(answer["failed"]) from error
        print(json.dumps(answer), flush=True)
