"""What tests and benchmarks compare with.

Inputs resemble a model's, or try to break the op. Error budgets come from the error that a lower precision makes by
itself, not from taste.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .ops import erase_write
from .ops.precision import compute_dtype
from .rules import orthogonal

Keys = Literal["random", "few", "identical"]
Decay = Literal["none", "head", "channel"]
NAMES = ("q", "k", "a", "u", "g", "initial_state")
BUDGET_FACTOR = 4  # the chunk form may be this many times as wrong as the loop in the same precision …
BUDGET_FLOOR = {"chunkwise": 32, "triton": 64}  # … and no budget is below as many roundings as a chunk has tokens


@dataclass(frozen=True, kw_only=True)
class Case:
    """A reproducible problem: QED's erase vector with strength λ, unit keys and queries, gates in (0, 1)."""

    batch: int = 1
    tokens: int = 64
    heads: int = 2
    key_width: int = 16
    value_width: int = 16
    keys: Keys = "random"  # "few": keys and queries are drawn from four directions
    decay: Decay = "channel"
    log_decay: float = -1.0  # g is uniform in [log_decay, 0] …
    constant_decay: bool = False  # … or this value everywhere
    resets: int = 0  # steps at which g is −inf in every channel
    strength: float = 0.25
    state: bool = True
    seed: int = 0

    def inputs(self, dtype: torch.dtype = torch.float64, device: str = "cpu") -> dict[str, Any]:
        """Draw q, k, a, u, g and initial_state in float64 and round them once to `dtype`; they come by name."""
        random = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.float64, generator=random)

        def uniform(*shape: int) -> Tensor:
            return torch.rand(*shape, dtype=torch.float64, generator=random)

        tokens = (self.batch, self.tokens, self.heads)
        q, k = (torch.nn.functional.normalize(normal(*tokens, self.key_width), dim=-1) for _ in range(2))
        if self.keys == "few":
            directions = torch.nn.functional.normalize(normal(4, self.key_width), dim=-1)
            q, k = (directions[torch.randint(4, tokens, generator=random)] for _ in range(2))
        elif self.keys == "identical":
            k = k[:, :1].expand_as(k)
        b = uniform(*tokens, self.key_width)
        a = b * k + self.strength * orthogonal(b * q, k)
        u = uniform(*tokens, self.value_width) * normal(*tokens, self.value_width)
        g = None
        if self.decay != "none":
            shape = (*tokens, self.key_width if self.decay == "channel" else 1)
            g = self.log_decay * (torch.ones(shape, dtype=torch.float64) if self.constant_decay else uniform(*shape))
            for step in torch.randint(max(1, self.tokens), (self.resets,), generator=random).tolist():
                g[:, step] = -torch.inf
        state = normal(self.batch, self.heads, self.key_width, self.value_width) if self.state else None
        tensors = dict(zip(NAMES, (q, k, a, u, g, state), strict=True))
        return {name: None if x is None else x.to(device) for name, x in _cast(tensors, dtype).items()}


def run(
    inputs: dict[str, Any], *, impl: str, scale: float = 1.0, cu_seqlens: Tensor | None = None
) -> dict[str, Tensor]:
    """Run one form of the op forward and backward, with a fixed random cotangent.

    Args:
        inputs: The op's tensors by name, as `Case.inputs` draws them.
        impl: The form to run.
        scale: The op's factor on the output.
        cu_seqlens: Boundaries of packed sequences.

    Returns:
        The output "o", the final "state", and the gradient of every input, such as "dq".
    """
    leaves: dict[str, Any] = {name: None if x is None else x.detach().requires_grad_() for name, x in inputs.items()}
    o, state = erase_write(**leaves, scale=scale, cu_seqlens=cu_seqlens, impl=impl)
    random = torch.Generator().manual_seed(1)
    loss = torch.zeros((), dtype=torch.float64, device=o.device)
    for x in (o, state):
        cotangent = torch.randn(x.shape, dtype=torch.float64, generator=random)
        loss = loss + (x.double() * cotangent.to(x.device)).sum()
    wanted = {name: x for name, x in leaves.items() if x is not None}
    gradients = torch.autograd.grad(loss, list(wanted.values()))
    results = {"o": o.detach(), "state": state.detach()}
    return results | {f"d{name}": d for name, d in zip(wanted, gradients, strict=True)}


def relative_error(x: Tensor, truth: Tensor) -> float:
    """Return ‖x − truth‖ / ‖truth‖ in float64: the absolute error where the truth is zero, infinity for NaN."""
    x, truth = x.detach().double(), truth.detach().double()
    error = float((x - truth).norm()) / (float(truth.norm()) or 1.0)
    return error if error == error else float("inf")


def over_budget(
    inputs: dict[str, Any],
    *,
    impl: str,
    dtype: torch.dtype,
    products: torch.dtype | None = None,
    scale: float = 1.0,
    cu_seqlens: Tensor | None = None,
) -> dict[str, tuple[float, float]]:
    """Find the outputs and gradients of a form that are further from the truth than the budget allows.

    The truth is the float64 loop. The budget is BUDGET_FACTOR times the larger of two errors: that of the loop in
    `dtype` itself (for float64: of the float32 loop, carried over to float64's rounding), and what one rounding of
    the inputs does to the truth, which says how ill-conditioned the problem is: a rounding of the arithmetic or, for
    a form whose matrix products take operands of `products`, one of theirs.

    Args:
        inputs: The op's tensors by name, in float64.
        impl: The form to examine.
        dtype: The precision to run it in.
        products: The precision of the form's matrix products, where that is lower than `dtype`.
        scale: The op's factor on the output.
        cu_seqlens: Boundaries of packed sequences.

    Returns:
        (error, budget) by the name of each output or gradient that is over budget; empty if none is.
    """
    rounding, narrower = torch.finfo(dtype).eps, torch.float32 if dtype == torch.float64 else dtype
    rounded = _cast(_cast(inputs, dtype), torch.float64)
    random = torch.Generator().manual_seed(2)
    nudge = torch.finfo(products or compute_dtype(dtype)).eps
    nudged = {
        name: None
        if x is None
        else x * (1 + nudge * torch.randn(x.shape, dtype=x.dtype, generator=random).to(x.device))
        for name, x in rounded.items()
    }
    truth, loop, conditioned, actual = (
        run(x, impl=form, scale=scale, cu_seqlens=cu_seqlens)
        for x, form in (
            (rounded, "reference"),
            (_cast(inputs, narrower), "reference"),
            (nudged, "reference"),
            (_cast(inputs, dtype), impl),
        )
    )
    over = {}
    for name, x in actual.items():
        own = relative_error(loop[name], truth[name]) * (rounding / torch.finfo(narrower).eps)
        conditioning = relative_error(conditioned[name], truth[name])
        budget = max(
            BUDGET_FACTOR * max(own, conditioning), BUDGET_FLOOR.get(impl, 1) * torch.finfo(compute_dtype(dtype)).eps
        )
        error = relative_error(x, truth[name])
        if not error <= budget:
            over[name] = (error, budget)
    return over


def _cast(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Cast inputs to `dtype`, but g and the state to the precision the op computes in."""
    wide = {"g": compute_dtype(dtype), "initial_state": compute_dtype(dtype)}
    return {name: None if x is None else x.to(wide.get(name, dtype)) for name, x in inputs.items()}
