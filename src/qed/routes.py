"""How a piece of the model that has a fast way is run: a table of routes, and one function that picks.

A *piece* is something the model computes: the recurrence, a norm, a whole block for one token. A *route* is one way to
compute it. It has a name, a function, and an *obstacle*: a function of the call that returns why the route cannot run
there, or None. Routes stand in the order in which "auto" prefers them. The last one is "reference": plain torch, which
runs everywhere and defines what the others have to compute.

The tables are `ops/routes.py` for the recurrence and `layers/routes.py` for everything else of a layer. Kernels are
reached through those tables alone.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Triton is looked for once, and not imported, because torch.compile cannot trace the search. TRITON_INTERPRET is
# Triton's own switch: with it, Triton's interpreter runs kernels on CPU tensors.
TRITON_INSTALLED = find_spec("triton") is not None
TRITON_INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
# The dtypes in which the interpreter computes what a GPU does. It multiplies the bits of bfloat16 as if they were whole
# numbers.
INTERPRETED = (torch.float16, torch.float32)
AUTO, REFERENCE = "auto", "reference"
Impl = str | tuple[tuple[str, str], ...]  # one name for every piece, or pairs of a piece and a name


class Call(NamedTuple):
    """What is known of a call before it runs: all that an obstacle may look at besides the layer itself."""

    device: torch.device
    dtype: torch.dtype
    batch: int = 1
    tokens: int = 1
    gradient: bool = False  # gradients are recorded
    compiling: bool = False  # torch.compile is tracing it into a larger program
    packed: bool = False  # sequences are packed along the tokens
    state: bool = False  # it starts from a given state …
    state_gradient: bool = False  # … which needs a gradient
    transformed: bool = False  # torch.func or forward-mode differentiation is at work
    named: bool = False  # the route was asked for by its name

    @staticmethod
    def of(x: Tensor, batch: int = 1, tokens: int = 1, **more: bool) -> Call:
        """A call with x as its main input.

        Args:
            x: the tensor whose device and dtype count.
            batch: how many sequences there are.
            tokens: how many tokens each of them has.
            more: the other fields.
        """
        gradient, compiling = torch.is_grad_enabled(), torch.compiler.is_compiling()
        return Call(x.device, x.dtype, batch, tokens, gradient, compiling, **more)


@dataclass(frozen=True)
class Route:
    """One way to compute a piece. `obstacle` takes the call and whatever else the piece passes to `pick`."""

    name: str
    run: Callable[..., Any]
    obstacle: Callable[..., str | None]
    what: str  # what it is, in a few words


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The route that a piece takes and why, with the reason for every route that it does not take."""

    route: str
    reason: str
    passed_over: dict[str, str]

    def __str__(self) -> str:
        others = "".join(f"\n  not {name}: {why}" for name, why in self.passed_over.items())
        return f"{self.route}: {self.reason}{others}"


class Piece:
    """A piece's table of routes."""

    def __init__(self, name: str, *routes: Route):
        self.name, self.routes = name, routes
        self.names = tuple(route.name for route in routes)
        assert self.names[-1] == REFERENCE, f"{name}: the last route has to be plain torch"

    def wanted(self, impl: Impl) -> str:
        """Return the name that `impl` has for this piece: "auto", one of its routes, or "reference" where a name for
        the whole model is no route of this piece."""
        if not isinstance(impl, str):
            for piece, name in impl:
                if piece == self.name:
                    return name
            return AUTO
        return impl if impl == AUTO or impl in self.names else REFERENCE

    def pick(self, impl: Impl, call: Call, *more: Any) -> Route:
        """Return the route that runs: for "auto" the first without an obstacle, for a name that route or an error.

        Args:
            impl: "auto", the name of a route, or pairs of a piece and a name.
            call: what is known of the call.
            more: what else the obstacles of this piece look at.
        """
        wanted = self.wanted(impl)
        if wanted == AUTO:
            for route in self.routes:
                if route.obstacle(call, *more) is None:
                    return route
            raise AssertionError(f"{self.name}: plain torch runs everywhere")
        route = self.routes[self.names.index(wanted)]
        why_not = route.obstacle(call._replace(named=True), *more)
        if why_not is not None:
            raise RuntimeError(f"impl={wanted!r} cannot run here: {self.name}: {why_not}")
        return route

    def explain(self, impl: Impl, call: Call, *more: Any) -> Choice:
        """Return which route `pick` would take for the same arguments, and why it takes none of the others.

        Args:
            impl: "auto", the name of a route, or pairs of a piece and a name, as for `pick`.
            call: what is known of the call.
            more: what else the obstacles of this piece look at.
        """
        picked, wanted = self.pick(impl, call, *more), self.wanted(impl)
        passed_over = {}
        for route in self.routes:
            if route is not picked:
                why_not = f"impl={wanted!r} was asked for" if wanted != AUTO else route.obstacle(call, *more)
                passed_over[route.name] = f"{picked.name!r} is preferred" if why_not is None else why_not
        return Choice(route=picked.name, reason=picked.what, passed_over=passed_over)


def check_name(impl: Any, names: tuple[str, ...], what: str = "impl") -> None:
    """Refuse a name that is no route, before anything is run or changed.

    Args:
        impl: what the caller asked for.
        names: the routes there are.
        what: what the caller calls it.
    """
    if impl != AUTO and impl not in names:
        raise ValueError(f"{what}: expected one of {', '.join(map(repr, (AUTO, *names)))}, got {impl!r}")


def kernel(module: str, name: str) -> Callable[..., Any]:
    """Return a function of `qed.kernels`. Its module, and Triton with it, is imported when the function is first
    called.

    Args:
        module: the module's name below `qed.kernels`, such as "recurrence.launch".
        name: the function's name there.
    """

    function: Callable[..., Any] | None = None  # kept: to look it up takes as long as to launch a kernel

    def call(*arguments: Any, **options: Any) -> Any:
        nonlocal function
        if function is None:
            function = getattr(importlib.import_module(f"qed.kernels.{module}"), name)
        return function(*arguments, **options)

    call.__name__ = name
    return call


def no_obstacle(call: Call, *more: Any) -> str | None:
    """Return None: plain torch runs everywhere."""
    return None


def kernel_obstacle(call: Call) -> str | None:
    """Return what stands in the way of every Triton kernel, or None."""
    if not TRITON_INSTALLED:
        return "the package triton is not installed"
    if call.device.type == "cuda":
        too_old = gpu_obstacle(call.device)
        if too_old is not None:
            return too_old
    elif not (call.named and TRITON_INTERPRETS):
        return f"it needs CUDA tensors, and these are on {call.device}"
    if call.dtype == torch.float64:
        return "it computes in float32, and the inputs are torch.float64"
    if call.device.type != "cuda" and call.dtype not in INTERPRETED:
        return f"Triton's interpreter cannot compute in {call.dtype}"
    return None


def inference_kernel_obstacle(call: Call, *more: Any) -> str | None:
    """Return what stands in the way of a kernel that has no gradient and that torch.compile cannot look into, or
    None."""
    if call.gradient:
        return "it has no gradient, and gradients are recorded"
    if call.compiling:
        return "torch.compile fuses this piece with its neighbours itself"
    return kernel_obstacle(call)


@dataclass(frozen=True, kw_only=True)
class KnownBad:
    """Pairs of architectures (compute capability) and versions of Triton with which the kernels must not run. Both are
    given as a first one and an end that is not included."""

    architectures: tuple[tuple[int, int], tuple[int, int]]
    versions: tuple[tuple[int, int, int], tuple[int, int, int]]
    why: str


KNOWN_BAD = (
    KnownBad(
        architectures=((0, 0), (8, 0)),
        versions=((0, 0, 0), (99, 0, 0)),
        why="the matrix units lack bfloat16 before compute capability 8.0",
    ),
    KnownBad(
        architectures=((0, 0), (99, 0)),
        versions=((0, 0, 0), (3, 6, 0)),
        why="the kernels are written for Triton 3.6 and newer",
    ),
)


def known_bad(architecture: tuple[int, int], triton: str) -> str | None:
    """Return why the kernels must not run with this architecture and version of Triton, or None if they may."""
    numbers = (*(int("".join(filter(str.isdigit, part)) or 0) for part in triton.split(".")[:3]), 0, 0)[:3]
    for bad in KNOWN_BAD:
        (first, end), (oldest, fixed) = bad.architectures, bad.versions
        if first <= architecture < end and oldest <= numbers < fixed:
            return f"sm_{architecture[0]}{architecture[1]} with Triton {triton}: {bad.why}"
    return None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def gpu_obstacle(device: torch.device) -> str | None:
    """Return why no kernel may run with this GPU and the installed Triton, or None if they may."""
    return _gpu_obstacle(device)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def shared_memory(device: torch.device) -> int:
    """Return how many KiB of shared memory a program may have on this GPU."""
    facts = torch.cuda.get_device_properties(device)
    asked_for: int = getattr(facts, "shared_memory_per_block_optin", facts.shared_memory_per_block)  # AMD has one alone
    return asked_for // 1024


@lru_cache
def _gpu_obstacle(device: torch.device) -> str | None:
    try:
        triton = version("triton")
    except PackageNotFoundError:  # Triton was installed without metadata
        triton = importlib.import_module("triton").__version__
    return known_bad(torch.cuda.get_device_capability(device), triton)
