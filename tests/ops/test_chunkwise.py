"""The chunk form equals the loop: outputs, final state and every gradient, at the loop's own accuracy."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qed.ops import erase_write, value_checks
from qed.testing import Case, over_budget, relative_error, run
from tests.strategies import cases, offsets

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@given(case=cases(), dtype=st.sampled_from(DTYPES), scale=st.sampled_from((1.0, 0.125)))
def test_chunk_equals_loop(case: Case, dtype: torch.dtype, scale: float) -> None:
    assert over_budget(case.inputs(), impl="chunkwise", dtype=dtype, scale=scale) == {}


@given(case=cases(lengths=(1, 40, 130)), data=st.data(), dtype=st.sampled_from(DTYPES[:2]))
def test_chunk_equals_loop_on_packed_sequences(case: Case, data: st.DataObject, dtype: torch.dtype) -> None:
    cu_seqlens = torch.tensor(data.draw(offsets(case.tokens)))
    inputs = Case(**{**vars(case), "batch": 1, "state": False}).inputs()
    if case.state:
        shape = (len(cu_seqlens) - 1, case.heads, case.key_width, case.value_width)
        inputs["initial_state"] = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert over_budget(inputs, impl="chunkwise", dtype=dtype, cu_seqlens=cu_seqlens) == {}


@pytest.mark.parametrize("decay", ["none", "head", "channel"])
@pytest.mark.parametrize("keys", ["few", "identical"])
def test_chunk_equals_loop_over_a_thousand_tokens(decay: str, keys: str) -> None:
    case = Case(tokens=1000, decay=decay, keys=keys, log_decay=-0.02, strength=1.0)
    assert over_budget(case.inputs(), impl="chunkwise", dtype=torch.float64) == {}


@pytest.mark.parametrize(("key_width", "value_width"), [(60, 100), (100, 60), (128, 128), (256, 128), (128, 256)])
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_chunk_equals_loop_at_any_width(key_width: int, value_width: int, decay: str) -> None:
    case = Case(tokens=70, heads=1, key_width=key_width, value_width=value_width, decay=decay)
    for dtype in (torch.float64, torch.float32):
        assert over_budget(case.inputs(), impl="chunkwise", dtype=dtype) == {}


@pytest.mark.parametrize("log_decay", [0.0, -1e-3, -5.0, -20.0, -100.0, -1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strong_decay_overflows_nowhere(log_decay: float, dtype: torch.dtype) -> None:
    """Constant decay in every step and channel, with hard resets: finite, forward and backward, for 300 tokens."""
    case = Case(tokens=300, log_decay=log_decay, constant_decay=True, resets=5)
    for name, x in run(case.inputs(dtype), impl="chunkwise").items():
        assert x.isfinite().all(), name


def test_a_reset_forgets_everything_exactly() -> None:
    inputs = Case(tokens=80, decay="channel").inputs(torch.float32)
    assert inputs["g"] is not None
    inputs["g"][:, 37] = -torch.inf
    o, state = erase_write(**inputs, impl="chunkwise")
    tail = {name: x if x is None or name == "initial_state" else x[:, 37:] for name, x in inputs.items()}
    tail["initial_state"] = None
    tail["g"] = tail["g"].clone()
    tail["g"][:, 0] = 0
    o_tail, state_tail = erase_write(**tail, impl="chunkwise")
    assert relative_error(o[:, 37:], o_tail) < 1e-6
    assert relative_error(state, state_tail) < 1e-6
    changed = {**inputs, "initial_state": 1e30 * inputs["initial_state"]}
    assert torch.equal(erase_write(**changed, impl="chunkwise")[1], state)


def test_the_decay_gradient_keeps_its_relative_accuracy_when_it_is_tiny() -> None:
    """At g = −20 everywhere the gradient of g is about 1e-9 of the others; it must not drown in their rounding."""
    case = Case(tokens=64, log_decay=-20.0, constant_decay=True)
    truth = run(case.inputs(torch.float64), impl="reference")
    found = run(case.inputs(torch.float32), impl="chunkwise")
    assert truth["dg"].norm() < 1e-7 * truth["dq"].norm()
    assert relative_error(found["dg"], truth["dg"]) < 1e-4


@given(case=cases(lengths=(1, 33, 64)))
def test_strides_do_not_matter(case: Case) -> None:
    inputs = case.inputs()
    strided = {
        name: None if x is None else torch.stack([x, x], -1).select(-1, 0).transpose(-1, -2).contiguous().mT
        for name, x in inputs.items()
    }
    for name, x in run(strided, impl="chunkwise").items():
        assert torch.equal(x, run(inputs, impl="chunkwise")[name]), name


def test_repeats_are_bit_identical() -> None:
    inputs = Case(batch=2, tokens=150).inputs(torch.float32)
    first = run(inputs, impl="chunkwise")
    for _ in range(5):
        assert all(torch.equal(x, first[name]) for name, x in run(inputs, impl="chunkwise").items())


def test_gradients_reach_only_what_asks_for_them() -> None:
    inputs = Case().inputs()
    inputs["k"].requires_grad_()
    o, _ = erase_write(**inputs, impl="chunkwise")
    o.sum().backward()
    assert [name for name, x in inputs.items() if x is not None and x.grad is not None] == ["k"]


def test_the_state_alone_can_be_differentiated() -> None:
    results = []
    for impl in ("reference", "chunkwise"):
        inputs = Case().inputs()
        u = inputs["u"].requires_grad_()
        _, state = erase_write(**inputs, impl=impl)
        results.append(torch.autograd.grad(state.square().sum(), u)[0])
    assert relative_error(results[1], results[0]) < 1e-13


def test_no_tokens_leave_the_state_as_it_was() -> None:
    inputs = Case(tokens=0).inputs()
    for impl in ("reference", "chunkwise"):
        o, state = erase_write(**inputs, impl=impl)
        assert o.shape == (1, 0, 2, 16)
        assert torch.equal(state, inputs["initial_state"])


def test_nan_in_one_sequence_stays_there() -> None:
    inputs = Case(batch=2, tokens=50).inputs(torch.float32)
    inputs["u"][0] = torch.nan
    with value_checks(False):
        found = run(inputs, impl="chunkwise")
    for name, x in found.items():
        assert x[1].isfinite().all(), name
