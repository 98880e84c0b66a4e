"""The op: every form against the float64 loop, the laws of the recurrence, and what must be refused."""

import math
import os
import warnings
from typing import Any

import torch
from torch import Tensor

from qed.ops import erase_write, erase_write_step, explain
from qed.routes import TRITON_INSTALLED
from qed.testing import Case, over_budget, run

from . import op_laws
from .drawing import Draw, refused

LENGTHS = (1, 2, 3, 17, 31, 32, 33, 63, 64, 65, 65, 97, 127, 128, 129)
SHORT = (1, 2, 17, 63, 64, 65, 70)
# Whether kernels run on tensors of the CPU: by Triton's interpreter, which is chosen before anything is imported.
INTERPRETED = TRITON_INSTALLED and os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = (torch.float64, torch.float32, torch.float32, torch.float16, torch.bfloat16)


def drawn_case(draw: Draw, lengths: tuple[int, ...], *, narrow: bool = False) -> Case:
    return Case(
        batch=draw.randint(1, 2 if narrow else 3),
        tokens=draw.choice(lengths),
        heads=draw.randint(1, 2 if narrow else 3),
        key_width=draw.choice((1, 2, 7, 16, 17) if narrow else (1, 2, 3, 7, 16, 19, 33)),
        value_width=draw.choice((1, 3, 16) if narrow else (1, 3, 5, 16, 21)),
        keys=draw.choice(("random", "few", "identical")),
        decay=draw.choice(("none", "head", "channel", "channel")),
        log_decay=draw.choice((0.0, -1e-30, -1e-3, -1.0, -5.0, -20.0, -100.0, -1e4, -1e30)),
        constant_decay=draw.chance(0.3),
        resets=draw.choice((0, 0, 1, 3)),
        strength=draw.choice((0.0, 0.25, 1.0)) * draw.choice((-1.0, 0.5, 1.0)),
        state=draw.chance(0.6),
        seed=draw.randint(0, 2**31),
    )


def drawn_inputs(draw: Draw, case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """A case's tensors, some of their decays replaced by extreme ones, in memory laid out anyhow."""
    inputs = case.inputs(dtype)
    if inputs["g"] is not None and draw.chance(0.4):
        extreme = torch.tensor([-torch.inf, 0.0, -1e-38, -88.0, -1e4])
        where = draw.uniform(*inputs["g"].shape) < draw.choice((0.02, 0.3))
        values = extreme[draw.integers(len(extreme), *inputs["g"].shape)].to(inputs["g"].dtype)
        inputs["g"] = torch.where(where, values, inputs["g"])
    return {name: None if x is None else laid_out(draw, x) for name, x in inputs.items()}


def laid_out(draw: Draw, x: Tensor) -> Tensor:
    """Values may be repeated by expand(); apart from that only strides and offset change."""
    kind = draw.choice(("plain", "plain", "plain", "transposed", "sliced", "expanded"))
    if kind == "transposed":
        return x.transpose(1, -1).contiguous().transpose(1, -1)
    if kind == "sliced":
        wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1] + 1), float("nan"))
        wide[..., 1::2] = x
        return wide[..., 1::2]
    if kind == "expanded":
        dimension = draw.randrange(3)
        return x.narrow(dimension, 0, 1).expand_as(x)
    return x


def packed(draw: Draw, inputs: dict[str, Any]) -> tuple[dict[str, Any], Tensor]:
    """The same tokens as several sequences of one row, each with a state of its own if there was one."""
    offsets = draw.offsets(inputs["q"].shape[1])
    if inputs["initial_state"] is not None:
        shape = (len(offsets) - 1, *inputs["initial_state"].shape[1:])
        inputs["initial_state"] = draw.normal(*shape, dtype=inputs["initial_state"].dtype)
    return inputs, torch.tensor(offsets, dtype=draw.choice((torch.int32, torch.int64)))


def within_budget(draw: Draw, case: Case, impl: str, dtype: torch.dtype) -> None:
    inputs, offsets = drawn_inputs(draw, case, dtype), None
    if case.batch == 1 and draw.chance(0.5):
        inputs, offsets = packed(draw, inputs)
    scale = draw.choice((1.0, 0.5, -1.0, 0.0, 1e-4))
    over = beyond_budget(inputs, impl, dtype, scale, offsets)
    assert over == {}, f"{case}, {dtype}, scale {scale}, cu_seqlens {offsets}: {over}"


def beyond_budget(
    inputs: dict[str, Any], impl: str, dtype: torch.dtype, scale: float, offsets: Tensor | None
) -> dict[str, Any]:
    """What is over `over_budget`'s and also visible beside the largest output or gradient. Budgets are relative to the
    truth; where all but nothing is left of a state, they are far below a rounding of what was added up."""
    products = dtype if impl == "triton" else None
    over = over_budget(inputs, impl=impl, dtype=dtype, scale=scale, cu_seqlens=offsets, products=products)
    if not over:
        return {}
    exact = {name: None if x is None else x.double() for name, x in inputs.items()}
    truth = run(exact, impl="reference", scale=scale, cu_seqlens=offsets)
    found = run(inputs, impl=impl, scale=scale, cu_seqlens=offsets)
    outputs = {"o", "state"}
    roundings = 64 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    visible = max(roundings, 4 * torch.finfo(dtype).eps) if impl == "triton" else roundings
    for name in list(over):
        largest = max(float(x.norm()) for other, x in truth.items() if (other in outputs) == (name in outputs))
        if float((found[name].double() - truth[name]).norm()) <= visible * largest:
            del over[name]
    return over


def chunk_form(seed: int) -> None:
    """The chunk form, outputs and every gradient, within the loop's own error in the same precision."""
    draw = Draw("chunk_form", seed)
    within_budget(draw, drawn_case(draw, LENGTHS), "chunkwise", draw.choice(DTYPES))


def kernels(seed: int) -> None:
    """The Triton kernels in the interpreter: budgets as for the chunk form, or one of the laws."""
    draw = Draw("kernels", seed)
    dtype = draw.choice((torch.float32, torch.float16))
    if draw.chance(0.05):  # the interpreter takes bfloat16's bits for numbers
        inputs = drawn_case(draw, SHORT, narrow=True).inputs(torch.bfloat16)
        refused(lambda: erase_write(**inputs, impl="triton"), "bfloat16")
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy speaks of overflows in pairs that are masked
        if draw.chance(0.5):
            within_budget(draw, drawn_case(draw, SHORT, narrow=True), "triton", dtype)
        else:
            op_laws.one_of(draw, "triton", dtype)


def laws(seed: int) -> None:
    """Prefill = decoding, packed = separate, segments = whole, nothing remembered after −inf, and the like."""
    draw = Draw("laws", seed)
    op_laws.one_of(draw, draw.choice(("chunkwise", "chunkwise", "reference")), draw.choice(DTYPES))


def _valid(draw: Draw, step: bool) -> dict[str, Any]:
    """Arguments that are right; cu_seqlens for half of the sequences."""
    dtype = draw.choice(DTYPES)
    case = Case(
        batch=1,
        tokens=draw.randint(2, 5),
        heads=draw.randint(2, 3),
        key_width=draw.choice((3, 5)),
        value_width=draw.choice((2, 4)),
    )
    inputs = case.inputs(dtype)
    if step:
        inputs = {name: x if name == "initial_state" else x[:, 0] for name, x in inputs.items()}
        inputs["state"] = inputs.pop("initial_state")
    elif draw.chance(0.5):
        inputs, inputs["cu_seqlens"] = packed(draw, inputs)
    return inputs


def _wrong_tensor(draw: Draw, name: str, x: Tensor, others: dict[str, Any]) -> Any:
    """Anything that must not be taken for `x`."""
    kinds = ["not a tensor", "another width", "fewer dimensions", "whole numbers", "another device", "complex"]
    kinds += ["another dtype"] if name != "g" else ["a dtype g may not have", "a positive decay", "NaN"]
    kinds += ["NaN", "infinite"] if name in ("state", "initial_state") else []
    kind = draw.choice(kinds)
    if kind == "not a tensor":
        return draw.choice((3, "q", x.tolist(), object()))
    if kind == "another width":
        dimension = draw.randrange(x.dim())
        if dimension == x.dim() - 1 and name in ("u", "g"):  # V is u's own, and a decay may be as wide as one head
            dimension = 0
        return torch.cat([x, x.narrow(dimension, 0, 1)], dimension)
    if kind == "fewer dimensions":
        return x[0]
    if kind == "whole numbers":
        return x.to(draw.choice((torch.int64, torch.int32, torch.bool)))
    if kind == "another device":
        return x.to("meta")
    if kind == "complex":
        return x.to(torch.complex64)
    if kind == "another dtype":
        taken = torch.promote_types(others["q"].dtype, torch.float32) if "state" in name else others["q"].dtype
        return x.to(draw.choice([dtype for dtype in set(DTYPES) if dtype != taken]))
    if kind == "a dtype g may not have":
        other = [
            d
            for d in set(DTYPES)
            if d not in (others["q"].dtype, torch.promote_types(others["q"].dtype, torch.float32))
        ]
        return x.to(draw.choice(other))
    spoilt = x.clone()
    value = {"a positive decay": draw.choice((1e-6, 3.0, torch.inf)), "infinite": -torch.inf}.get(kind, torch.nan)
    spoilt.view(-1)[draw.randrange(spoilt.numel())] = value
    return spoilt


def _wrong_offsets(draw: Draw, tokens: int) -> Any:
    wrong = [[0, tokens + 1], [1, tokens], [0, tokens - 1], [0, tokens, 1, tokens], [-1, tokens], [tokens], []]
    wrong += [[[0, tokens]], [0, 2**31 - 1], [0, -tokens, tokens]]
    return draw.choice(
        [torch.tensor(x, dtype=torch.int64) for x in wrong]
        + [torch.tensor([0.0, float(tokens)]), torch.tensor([0, tokens]).short(), [0, tokens], "0,3"]
    )


def refusals(seed: int) -> None:
    """One wrong argument among right ones is refused, by its name; never taken, never a crash."""
    draw = Draw("refusals", seed)
    step = draw.chance(0.3)
    arguments = _valid(draw, step)
    runs_on_kernels = INTERPRETED and arguments["q"].dtype in (torch.float32, torch.float16)
    impl = draw.choice(("auto", "reference", "chunkwise", *(("triton",) if runs_on_kernels else ())))
    call = erase_write_step if step else erase_write
    what = draw.choice(("tensor", "tensor", "tensor", "offsets", "scale", "impl"))
    if what == "offsets" and step:
        what = "scale"
    if what == "tensor":
        name = draw.choice([x for x in arguments if x != "cu_seqlens"])
        arguments[name] = _wrong_tensor(draw, name, arguments[name], arguments)
        names = ("q", "k", "a", "u") if name == "q" else (name,)  # others are held against q
        names = tuple(f"{x}:" for x in names) + (("state",) if name == "q" else ())
        names += ("g:", "cu_seqlens") if name == "q" else ()
    elif what == "offsets":
        arguments["cu_seqlens"], names = _wrong_offsets(draw, arguments["q"].shape[1]), ("cu_seqlens",)
        if arguments["initial_state"] is not None:
            arguments["initial_state"] = arguments["initial_state"][:1]
            if isinstance(arguments["cu_seqlens"], Tensor) and len(arguments["cu_seqlens"]) != 2:
                arguments["initial_state"] = None
    elif what == "scale":
        scale = draw.choice(
            (math.nan, math.inf, -math.inf, "1", None, True, torch.ones(1), 10**400, -(10**400), 1j, [1.0])
        )
        arguments["scale"], names = scale, ("scale",)
    else:
        impl, names = draw.choice(("", "Triton", "loop", "cuda", None, 3, ["auto"])), ("impl",)
    refused(lambda: call(**arguments, impl=impl), *names)
    if not step and what in ("scale", "impl"):
        refused(lambda: explain(**arguments, impl=impl), *names)
