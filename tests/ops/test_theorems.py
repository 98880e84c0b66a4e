"""Equalities that hold for every form: state passing, packing, padding, causality, decoding."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qed.ops import erase_write, erase_write_step
from qed.testing import Case, relative_error, run
from tests.segments import Packing
from tests.strategies import cases, offsets

IMPLS = ("reference", "chunkwise")
TOLERANCE = 1e-12  # float64: thousands of roundings, far below any wrong term

Inputs = dict[str, Any]


def call(inputs: Inputs, impl: str, **options: Tensor | float | None) -> tuple[Tensor, Tensor]:
    return erase_write(**inputs, impl=impl, **options)


def tokens(inputs: Inputs, start: int, end: int | None, state: Tensor | None) -> Inputs:
    cut = {name: None if x is None else x[:, start:end] for name, x in inputs.items() if name != "initial_state"}
    return cut | {"initial_state": state}


@pytest.mark.parametrize("impl", IMPLS)
@given(case=cases(lengths=(2, 33, 65)), data=st.data())
def test_split_anywhere_equals_whole(impl: str, case: Case, data: st.DataObject) -> None:
    """Outputs, final state and the gradients that flow back through the passed state."""
    at = data.draw(st.integers(0, case.tokens))
    inputs = case.inputs()
    whole = {name: None if x is None else x.clone().requires_grad_() for name, x in inputs.items()}
    parts = {name: None if x is None else x.clone().requires_grad_() for name, x in inputs.items()}
    o, state = call(whole, impl)
    o1, middle = call(tokens(parts, 0, at, parts["initial_state"]), impl)
    o2, end = call(tokens(parts, at, None, middle), impl)
    assert relative_error(torch.cat([o1, o2], 1), o) < TOLERANCE
    assert relative_error(end, state) < TOLERANCE
    leaves = [name for name, x in inputs.items() if x is not None]
    d_whole = torch.autograd.grad(o.sin().sum() + state.sum(), [whole[n] for n in leaves])
    loss = o1.sin().sum() + o2.sin().sum() + end.sum()
    d_parts = torch.autograd.grad(loss, [parts[n] for n in leaves])
    for name, x, y in zip(leaves, d_parts, d_whole, strict=True):
        assert relative_error(x, y) < TOLERANCE, name


@pytest.mark.parametrize("impl", IMPLS)
@given(case=cases(lengths=(40, 100)), data=st.data())
def test_packed_equals_separate(impl: str, case: Case, data: st.DataObject) -> None:
    cuts = data.draw(offsets(case.tokens))
    inputs = Case(**{**vars(case), "batch": 1, "state": False}).inputs()
    packed = run(inputs, impl=impl, cu_seqlens=torch.tensor(cuts))
    random = torch.Generator().manual_seed(1)
    cotangent = torch.randn(packed["o"].shape, dtype=torch.float64, generator=random)
    d_state = torch.randn(packed["state"].shape, dtype=torch.float64, generator=random)
    for n, (start, end) in enumerate(pairwise(cuts)):
        alone = {name: None if x is None else x.detach() for name, x in tokens(inputs, start, end, None).items()}
        leaves = {name: x.requires_grad_() for name, x in alone.items() if x is not None}
        o, state = call(alone, impl)
        assert relative_error(packed["o"][:, start:end], o) < TOLERANCE
        assert relative_error(packed["state"][n], state[0]) < TOLERANCE
        if start == end:
            continue
        loss = (o * cotangent[:, start:end]).sum() + (state * d_state[n]).sum()
        for name, d in zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True):
            assert relative_error(packed[f"d{name}"][:, start:end], d) < TOLERANCE, name


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("where", ["left", "right", "interior"])
def test_padded_equals_unpadded(impl: str, where: str) -> None:
    """Padding is removed before the recurrence, so not even NaN in it is seen; batch 1 is no exception."""
    lengths = (37, 64, 1)
    for row, length in enumerate(lengths):
        mask = torch.zeros(3, 70, dtype=torch.bool)
        for i, n in enumerate(lengths):
            places = {
                "left": torch.arange(70 - n, 70),
                "right": torch.arange(n),
                "interior": torch.randperm(70, generator=torch.Generator().manual_seed(i))[:n].sort().values,
            }[where]
            mask[i, places] = True
        padded = Case(batch=3, tokens=70, state=False).inputs()
        for x in padded.values():
            if x is not None:
                x[~mask] = torch.nan
        for rows in (slice(0, 3), slice(row, row + 1)):  # inside a batch, and alone
            packing = Packing.from_mask(mask[rows])
            packed = {name: None if x is None else packing.pack(x[rows]) for name, x in padded.items()}
            o, state = call(packed, impl, cu_seqlens=packing.cu_seqlens)
            o, i = packing.unpack(o), row - rows.start
            alone = {n: None if x is None else x[row][mask[row]].unsqueeze(0) for n, x in padded.items()}
            o_alone, state_alone = call(alone, impl)
            assert relative_error(o[i][mask[row]], o_alone[0]) < TOLERANCE
            assert relative_error(state[i], state_alone[0]) < TOLERANCE
            assert (o[i][~mask[row]] == 0).all()
            assert o_alone.shape[1] == length


@pytest.mark.parametrize("impl", IMPLS)
@given(case=cases(lengths=(33, 65)), data=st.data())
def test_the_future_never_changes_the_past(impl: str, case: Case, data: st.DataObject) -> None:
    """Bit for bit in the outputs; and a loss on the past has no gradient in the future, exactly."""
    at = data.draw(st.integers(1, case.tokens - 1))
    inputs, other = case.inputs(), Case(**{**vars(case), "seed": case.seed + 1}).inputs()
    changed: Inputs = {}
    for name, x in inputs.items():
        later = other[name]
        same = x is None or later is None or name == "initial_state"
        changed[name] = x if same else torch.cat([x[:, :at], later[:, at:]], 1)
    assert torch.equal(call(inputs, impl)[0][:, :at], call(changed, impl)[0][:, :at])
    leaves = {name: x.requires_grad_() for name, x in inputs.items() if x is not None}
    d = torch.autograd.grad(call(inputs, impl)[0][:, :at].sin().sum(), list(leaves.values()))
    for name, gradient in zip(leaves, d, strict=True):
        assert name == "initial_state" or (gradient[:, at:] == 0).all(), name


@pytest.mark.parametrize("impl", IMPLS)
@given(case=cases(lengths=(1, 2, 33, 64)), data=st.data())
def test_prefill_and_decode_equal_one_pass(impl: str, case: Case, data: st.DataObject) -> None:
    at = data.draw(st.integers(max(0, case.tokens - 20), case.tokens))
    inputs = case.inputs()
    o, state = call(inputs, impl, scale=0.5)
    outputs, current = call(tokens(inputs, 0, at, inputs["initial_state"]), impl, scale=0.5)
    steps = [outputs]
    for t in range(at, case.tokens):
        token = {name: None if x is None else x[:, t] for name, x in inputs.items() if name != "initial_state"}
        out, current = erase_write_step(**token, state=current, scale=0.5, impl=impl)
        steps.append(out.unsqueeze(1))
    assert relative_error(torch.cat(steps, 1), o) < TOLERANCE
    assert relative_error(current, state) < TOLERANCE


@pytest.mark.parametrize("impl", IMPLS)
def test_decoding_for_four_thousand_steps_stays_with_the_chunk_form(impl: str) -> None:
    inputs = Case(tokens=4096, heads=1, key_width=8, value_width=8, log_decay=-0.01).inputs(torch.float32)
    o, state = call(inputs, "chunkwise")
    current, outputs = inputs["initial_state"], []
    for t in range(4096):
        token = {name: None if x is None else x[:, t] for name, x in inputs.items() if name != "initial_state"}
        out, current = erase_write_step(**token, state=current, impl=impl)
        outputs.append(out)
    assert relative_error(torch.stack(outputs, 1), o) < 1e-5
    assert relative_error(current, state) < 1e-5


@pytest.mark.parametrize("impl", IMPLS)
@given(case=cases(lengths=(1,)))
def test_a_step_has_the_gradients_of_a_sequence_of_one(impl: str, case: Case) -> None:
    inputs = case.inputs()
    if inputs["initial_state"] is None:
        inputs["initial_state"] = torch.zeros(case.batch, case.heads, case.key_width, case.value_width).double()
    leaves = {name: x.requires_grad_() for name, x in inputs.items() if x is not None}
    o, state = call(inputs, "reference", scale=0.5)
    expected = torch.autograd.grad(o.sin().sum() + state.cos().sum(), list(leaves.values()))
    token = {name: None if x is None else x[:, 0] for name, x in inputs.items() if name != "initial_state"}
    o, state = erase_write_step(**token, state=inputs["initial_state"], scale=0.5, impl=impl)
    found = torch.autograd.grad(o.sin().sum() + state.cos().sum(), list(leaves.values()))
    for name, x, y in zip(leaves, found, expected, strict=True):
        assert relative_error(x, y) < TOLERANCE, name


def test_a_step_leaves_the_callers_state_alone() -> None:
    inputs = Case(tokens=1).inputs()
    state = inputs.pop("initial_state")
    assert state is not None
    before = state.clone()
    token = {name: None if x is None else x[:, 0] for name, x in inputs.items()}
    _, after = erase_write_step(**token, state=state)
    assert torch.equal(state, before)
    assert not torch.equal(after, before)
