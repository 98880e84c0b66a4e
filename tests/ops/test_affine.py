"""A segment is an affine map of the state; composing maps is running the segments one after the other."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qed.ops import erase_write
from qed.ops.affine import segment
from qed.testing import Case, relative_error
from tests.segments import segmented_erase_write
from tests.strategies import cases


@given(case=cases(lengths=(1, 33, 64)))
def test_a_segment_maps_any_state_as_the_recurrence_does(case: Case) -> None:
    inputs = case.inputs()
    state = torch.randn(case.batch, case.heads, case.key_width, case.value_width, dtype=torch.float64)
    affine = segment(inputs["k"], inputs["a"], inputs["u"], inputs["g"])
    _, expected = erase_write(**{**inputs, "initial_state": state})
    assert relative_error(affine(state), expected) < 1e-13


@given(case=cases(lengths=(65,)), data=st.data())
def test_composition_equals_the_whole_segment(case: Case, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, case.tokens))
    parts = [case.inputs()[name] for name in ("k", "a", "u", "g")]
    first, second = (
        segment(*(None if x is None else x[:, cut] for x in parts)) for cut in (slice(0, at), slice(at, None))
    )
    whole = segment(*parts)
    composed = first.then(second)
    # M starts at the identity and may shrink to nothing: its error is measured against where it started.
    assert (composed.M - whole.M).norm() < 1e-13 * case.key_width
    assert relative_error(composed.N, whole.N) < 1e-13


@pytest.mark.parametrize("impl", ["reference", "chunkwise"])
@given(case=cases(lengths=(1, 64, 97)), data=st.data())
def test_segmented_scan_equals_serial_pass(impl: str, case: Case, data: st.DataObject) -> None:
    """Outputs, final state and every gradient, at any number of segments."""
    segments = data.draw(st.integers(1, case.tokens))
    results = []
    for run in (
        lambda x: erase_write(**x, scale=0.5, impl=impl),
        lambda x: segmented_erase_write(**x, segments=segments, scale=0.5, impl=impl),
    ):
        inputs = {name: None if x is None else x.requires_grad_() for name, x in case.inputs().items()}
        o, state = run(inputs)
        leaves = [x for x in inputs.values() if x is not None]
        results.append((o, state, *torch.autograd.grad(o.sin().sum() + state.cos().sum(), leaves)))
    for serial, segmented in zip(*results, strict=True):
        assert relative_error(segmented, serial) < 1e-12


def test_float32_segments_are_composed_in_float32_and_stay_close() -> None:
    inputs = Case(tokens=512, strength=1.0, log_decay=-0.05).inputs(torch.float32)
    truth, _ = erase_write(**Case(tokens=512, strength=1.0, log_decay=-0.05).inputs(), impl="reference")
    o, state = segmented_erase_write(**inputs, segments=8)
    assert state.dtype == torch.float32
    assert relative_error(o, truth) < 1e-5
