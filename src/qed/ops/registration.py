"""How a function becomes a torch operator of this package, with its fake and its gradient.

Being an operator, a function is opaque to torch.compile: there is no graph break and no unrolled loop, and its value
checks run inside. Operators are made with `Library`, because `custom_op` takes twice as much time before a kernel
starts.

torch.compile caches graphs on disk under the names of operators. When what an operator saves changes, its name must
change too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("qed", "FRAGMENT")


def register(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    differentiate: Callable[..., Any] | None = None,
    keep: Callable[..., None] | None = None,
) -> Callable[..., Any]:
    """Register an operator of the namespace "qed" and return it.

    Args:
        schema: its name, arguments and results in torch's notation, such as "double(Tensor x) -> Tensor".
        run: what it computes, on any device.
        fake: what it returns, as uninitialised tensors made from shapes alone.
        differentiate: the gradients of its inputs, from the context and those of its outputs; None if it has none.
        keep: a function of `ctx`, `inputs` and `output`, as torch names them, that keeps in the context what
            `differentiate` needs; None to keep all inputs, if they are tensors.
    """
    name = schema.split("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"qed::{name}", fake, lib=_LIBRARY)
    if differentiate is not None:
        keep = keep or _keep_inputs
        torch.library.register_autograd(f"qed::{name}", differentiate, setup_context=keep, lib=_LIBRARY)
    operator: Callable[..., Any] = getattr(torch.ops.qed, name).default
    return operator


def register_gradient(
    schema: str, run: Callable[..., Any], fake: Callable[..., Any], instead: str = "impl='reference'"
) -> Callable[..., Any]:
    """Register and return an operator that computes gradients, and refuse gradients of these: torch would warn and take
    what it does not know for zero.

    Args:
        schema, run, fake: as in `register`; the name says "_backward" after that of the operator it belongs to.
        instead: what can be differentiated more often.
    """
    why = f"{schema.split('_backward')[0]} is differentiated once by this operator; {instead} does it more often"
    return register(schema, run, fake, differentiate=refusal(why), keep=keep_nothing)


def refusal(why: str) -> Callable[..., None]:
    """Return what to give `register` as the gradient of an operator that must not be differentiated: it raises
    RuntimeError and says why."""

    def refuse(*_: Any) -> None:
        raise RuntimeError(f"qed: {why}")

    return refuse


def keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep nothing for a gradient that is refused.

    Args:
        ctx, inputs, output: what torch gives every such function.
    """


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def tensors(count: int) -> str:
    """Return how torch's notation writes the results of an operator that returns `count` tensors."""
    return f"({', '.join(['Tensor'] * count)})"


def leaves_of(inputs: Iterable[Tensor | None]) -> list[Any]:
    """Return the tensors to differentiate with respect to. Where gradients of gradients are wanted, tensors that
    require one stay connected to the graph through a view of themselves; the others are detached."""

    def leaf(x: Tensor) -> Tensor:
        return x.view_as(x) if torch.is_grad_enabled() and x.requires_grad else x.detach().requires_grad_()

    return [None if x is None else leaf(x) for x in inputs]
