"""Equalities of the recurrence that hold for every form, each of small random problems."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from qed.ops import erase_write, erase_write_step, value_checks
from qed.testing import Case, run
from tests.segments import segmented_erase_write

from .drawing import Draw, same

# Of two ways through the same numbers, in the precision of the outputs.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
Inputs = dict[str, Any]
ORDER = ("q", "k", "a", "u", "g")


def _inputs(draw: Draw, impl: str, dtype: torch.dtype, **changes: Any) -> Inputs:
    lengths = (2, 5, 63, 64, 65, 70) if impl != "triton" else (2, 5, 65)
    sizes = {
        "batch": draw.randint(1, 2),
        "tokens": draw.choice(lengths),
        "heads": draw.randint(1, 2),
        "key_width": draw.choice((1, 3, 8, 16)),
        "value_width": draw.choice((1, 5, 16)),
        "decay": draw.choice(("none", "head", "channel")),
        "log_decay": draw.choice((-1e-3, -1.0, -20.0)),
        "state": draw.chance(0.7),
        "seed": draw.randint(0, 2**31),
    }
    return Case(**(sizes | changes)).inputs(dtype)


def _cut(inputs: Inputs, where: slice, state: Tensor | None) -> Inputs:
    tokens = {name: None if inputs[name] is None else inputs[name][:, where] for name in ORDER}
    return tokens | {"initial_state": state}


def _tokens(inputs: Inputs) -> int:
    return inputs["q"].shape[1]


def prefill_is_decoding(draw: Draw, impl: str, dtype: torch.dtype) -> None:
    inputs = _inputs(draw, impl, dtype, tokens=draw.choice((2, 5, 9)), state=True, resets=draw.choice((0, 1)))
    o, final = erase_write(**inputs, impl=impl)
    state = inputs["initial_state"].clone()
    for t in range(_tokens(inputs)):
        one = {name: None if inputs[name] is None else inputs[name][:, t] for name in ORDER}
        with torch.no_grad():
            out, state = erase_write_step(**one, state=state, inplace=draw.chance(0.5), impl=impl)
        same(out, o[:, t], TOLERANCES[dtype], f"output of token {t}")
    same(state, final, TOLERANCES[dtype], "state")


def pieces_are_the_whole(draw: Draw, impl: str, dtype: torch.dtype) -> None:
    inputs = _inputs(draw, impl, dtype)
    o, final = erase_write(**inputs, impl=impl)
    state, outputs = inputs["initial_state"], []
    for where in draw.pieces(_tokens(inputs))[:6]:
        out, state = erase_write(**_cut(inputs, where, state), impl=impl)
        outputs.append(out)
    read = torch.cat(outputs, 1)
    same(read, o[:, : read.shape[1]], TOLERANCES[dtype], "outputs")
    if read.shape[1] == _tokens(inputs):
        same(state, final, TOLERANCES[dtype], "state")


def packed_is_separate(draw: Draw, impl: str, dtype: torch.dtype) -> None:
    inputs = _inputs(draw, impl, dtype, batch=1)
    offsets = draw.offsets(_tokens(inputs))
    wide = torch.promote_types(dtype, torch.float32)
    states = None
    if inputs["initial_state"] is not None:
        states = draw.normal(len(offsets) - 1, *inputs["initial_state"].shape[1:], dtype=wide)
    o, final = erase_write(**(inputs | {"initial_state": states}), cu_seqlens=torch.tensor(offsets), impl=impl)
    for n, (start, end) in enumerate(pairwise(offsets)):
        first = None if states is None else states[n : n + 1]
        alone, state = erase_write(**_cut(inputs, slice(start, end), first), impl=impl)
        same(o[:, start:end], alone, TOLERANCES[dtype], f"outputs of sequence {n}")
        same(final[n : n + 1], state, TOLERANCES[dtype], f"state of sequence {n}")


def segments_are_the_whole(draw: Draw, impl: str, dtype: torch.dtype) -> None:
    inputs = _inputs(draw, impl, dtype)
    segments = draw.randint(1, min(7, _tokens(inputs)))
    o, final = erase_write(**inputs, impl=impl)
    found, state = segmented_erase_write(**inputs, segments=segments, impl=impl)
    same(found, o, TOLERANCES[dtype], "outputs")
    same(state, final, TOLERANCES[dtype], "state")


def rows_are_alone(draw: Draw, impl: str, dtype: torch.dtype) -> None:
    inputs = _inputs(draw, impl, dtype, batch=2)
    both = run(inputs, impl=impl)
    o, final = erase_write(**{name: None if x is None else x[1:] for name, x in inputs.items()}, impl=impl)
    same(o, both["o"][1:], TOLERANCES[dtype], "outputs")
    same(final, both["state"][1:], TOLERANCES[dtype], "state")


def minus_infinity_forgets(draw: Draw, impl: str, dtype: torch.dtype) -> None:
    """What was written before g = −inf in every channel is gone, however large it was."""
    inputs = _inputs(draw, impl, dtype, decay=draw.choice(("head", "channel")), state=True)
    inputs["initial_state"] = inputs["initial_state"] * 1e3
    at = draw.randrange(_tokens(inputs))
    inputs["g"] = inputs["g"].clone()
    inputs["g"][:, at] = -torch.inf
    o, final = erase_write(**inputs, impl=impl)
    fresh, state = erase_write(**_cut(inputs, slice(at, None), None), impl=impl)
    same(o[:, at:], fresh, TOLERANCES[dtype], "outputs")
    same(final, state, TOLERANCES[dtype], "state")


def nan_in_the_decay_shows(draw: Draw, impl: str, dtype: torch.dtype) -> None:
    inputs = _inputs(draw, impl, dtype, decay=draw.choice(("head", "channel")), state=True)
    at = draw.randrange(_tokens(inputs))
    inputs["g"] = inputs["g"].clone()
    inputs["g"][0, at, 0, draw.randrange(inputs["g"].shape[-1])] = torch.nan
    with value_checks(False):
        _, final = erase_write(**inputs, impl=impl)
        one = {name: inputs[name][:, at] for name in ORDER}
        _, state = erase_write_step(**one, state=inputs["initial_state"], impl=impl)
    assert final[0, 0].isnan().any(), f"NaN in g at token {at} is not in the final state"
    assert state[0, 0].isnan().any(), "NaN in g is not in the state of a decoding step"


def the_future_leaves_the_past(draw: Draw, impl: str, dtype: torch.dtype) -> None:
    """Another token later, or one that is not finite, changes nothing before it. Of values that are not finite the
    kernels promise less: they change nothing before their chunk."""
    inputs = _inputs(draw, impl, dtype)
    before, _ = erase_write(**inputs, impl=impl)
    at = draw.randrange(_tokens(inputs))
    name = draw.choice(("q", "k", "a", "u"))
    value = draw.choice((torch.inf, -torch.inf, torch.nan)) if name == "u" else draw.choice((0.0, 5.0))
    inputs[name] = inputs[name].clone()
    inputs[name][:, at] = value
    after, _ = erase_write(**inputs, impl=impl)
    if impl == "triton" and name == "u":
        at -= at % 64
    same(after[:, :at], before[:, :at], TOLERANCES[dtype], f"outputs before token {at}, whose {name} became {value}")


def autocast_changes_nothing(draw: Draw, impl: str, dtype: torch.dtype) -> None:
    """Inputs of float32 are computed in float32 under autocast too."""
    inputs = _inputs(draw, impl, torch.float32, state=True)
    segments = draw.randint(1, min(4, _tokens(inputs)))
    one = {name: None if inputs[name] is None else inputs[name][:, 0] for name in ORDER}

    def everything() -> dict[str, Tensor]:
        found = run(inputs, impl=impl)
        found["step"], found["step's state"] = erase_write_step(**one, state=inputs["initial_state"], impl=impl)
        found["segmented"], found["segmented state"] = segmented_erase_write(**inputs, segments=segments, impl=impl)
        return found

    plain = everything()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = everything()
    for name, x in plain.items():
        same(cast[name], x, 2e-5, name)


def derivatives_are_right_or_refused(draw: Draw, impl: str, dtype: torch.dtype) -> None:
    """Forward mode, torch.func.grad and double backward: the loop's, or an error; and the next call is untouched."""
    inputs = _inputs(draw, impl, torch.float64 if impl != "triton" else torch.float32, tokens=draw.choice((2, 5)))
    given = {name: x for name, x in inputs.items() if x is not None}
    tangents = {name: draw.normal(*x.shape, dtype=x.dtype) for name, x in given.items()}
    names = list(given)
    untouched = run(inputs, impl=impl)

    def loss(form: str) -> Callable[..., Tensor]:
        def of(*values: Tensor) -> Tensor:
            o, state = erase_write(**(inputs | dict(zip(names, values, strict=True))), impl=form)
            return o.double().square().sum() + state.double().sin().sum()

        return of

    def forward_mode(form: str) -> Tensor:
        values = tuple(given.values())
        return torch.func.jvp(loss(form), values, tuple(tangents.values()))[1]

    def functional(form: str) -> Tensor:
        found = torch.func.grad(loss(form), argnums=tuple(range(len(names))))(*given.values())
        return torch.cat([x.flatten() for x in found])

    def twice(form: str) -> Tensor:
        leaves = [x.clone().requires_grad_() for x in given.values()]
        first = torch.autograd.grad(loss(form)(*leaves), leaves, create_graph=True)
        second = torch.autograd.grad(sum(x.sin().sum() for x in first), leaves)
        return torch.cat([x.flatten() for x in second])

    kind = draw.choice((forward_mode, functional, twice))
    truth = kind("reference")
    try:
        found = kind(impl)
    except (RuntimeError, NotImplementedError):
        pass
    else:
        same(found, truth, 1e-3 if impl == "triton" else 1e-9, kind.__name__)
    for name, x in run(inputs, impl=impl).items():
        assert torch.equal(x, untouched[name]), f"{name} of a later call changed after {kind.__name__}"


def nothing_is_defined(draw: Draw, impl: str, dtype: torch.dtype) -> None:
    """No tokens, no rows or no heads: outputs of that shape and the state as it was, or a refusal that says so."""
    shape = [draw.randint(1, 2), draw.randint(1, 3), draw.randint(1, 2)]
    shape[draw.randrange(3)] = 0
    keys, values = draw.randint(1, 3), draw.randint(1, 3)
    wide = torch.promote_types(dtype, torch.float32)
    q, k, a = (draw.normal(*shape, keys, dtype=dtype) for _ in range(3))
    u = draw.normal(*shape, values, dtype=dtype).requires_grad_(draw.chance(0.5))
    g = None if draw.chance(0.5) else -draw.uniform(*shape, draw.choice((1, keys)), dtype=wide)
    state = None if draw.chance(0.3) else draw.normal(shape[0], shape[2], keys, values, dtype=wide)
    try:
        o, final = erase_write(q, k, a, u, g, initial_state=state, impl=impl)
    except ValueError as error:
        if "expected" not in str(error):
            raise AssertionError(f"an unclear refusal: {error}") from error
        return
    assert list(o.shape) == [*shape, values]
    assert o.dtype == dtype
    expected = torch.zeros(shape[0], shape[2], keys, values, dtype=wide) if state is None else state
    same(final, expected, 0.0, "state")


LAWS = (
    prefill_is_decoding,
    pieces_are_the_whole,
    packed_is_separate,
    segments_are_the_whole,
    rows_are_alone,
    minus_infinity_forgets,
    nan_in_the_decay_shows,
    the_future_leaves_the_past,
    autocast_changes_nothing,
    derivatives_are_right_or_refused,
    nothing_is_defined,
)


def one_of(draw: Draw, impl: str, dtype: torch.dtype) -> None:
    law = draw.choice(LAWS)
    try:
        law(draw, impl, dtype)
    except AssertionError as error:
        raise AssertionError(f"{law.__name__}, {impl}, {dtype}: {error}") from error
