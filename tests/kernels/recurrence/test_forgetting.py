"""g = −inf forgets exactly and NaN shows, in the kernels as in the loop, in prefill as in decoding."""

from typing import Any

import pytest
import torch

from qed.ops import erase_write, erase_write_step, value_checks
from qed.testing import Case, over_budget, relative_error
from tests.marks import slow

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


def low(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    wide = ("g", "initial_state")
    return {name: x.to(torch.float32 if name in wide else dtype) for name, x in inputs.items()}


@pytest.mark.parametrize("dtype", [torch.float32, *slow(torch.float16, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("decay", ["head", "channel"])
@pytest.mark.parametrize("at", [5, *slow(64)])
def test_nothing_is_left_of_what_is_forgotten(dtype: torch.dtype, decay: str, at: int) -> None:
    """A huge state and huge writes before the step change nothing after it: not a bit."""
    inputs = low(Case(tokens=100, decay=decay, log_decay=-0.1).inputs(device=DEVICE), dtype)
    inputs["g"][:, at] = -torch.inf
    o, state = erase_write(**inputs, impl="triton")
    inputs["initial_state"] *= 1e3 if dtype == torch.float16 else 1e30  # products take float16 as it is
    inputs["u"][:, :at] *= 1e3
    o_huge, state_huge = erase_write(**inputs, impl="triton")
    assert torch.equal(o[:, at:], o_huge[:, at:])
    assert torch.equal(state, state_huge)


@pytest.mark.slow
@DTYPES
def test_some_channels_forget(dtype: torch.dtype) -> None:
    """Each channel at steps of its own, many in one chunk and some in a row: outputs and gradients are the loop's."""
    inputs = Case(tokens=150, log_decay=-0.5).inputs(device=DEVICE)
    random = torch.Generator().manual_seed(0)
    inputs["g"][torch.rand(inputs["g"].shape, generator=random).to(DEVICE) < 0.05] = -torch.inf
    inputs["g"][:, 40:43] = -torch.inf
    inputs["g"][:, 90, :, 3] = -torch.inf
    assert over_budget(inputs, impl="triton", dtype=dtype, products=dtype, scale=0.5) == {}


@DTYPES
@pytest.mark.parametrize("g", [-20.0, -90.0])
def test_strong_steps_leave_what_they_should_of_a_large_state(dtype: torch.dtype, g: float) -> None:
    """In 16 bits no factor is seen below exp(−13.75) = 1e-6, and of a state of 1e3 nothing that 16 bits could show."""
    inputs = low(Case(tokens=80, log_decay=-0.1).inputs(device=DEVICE), dtype)
    inputs["initial_state"] *= 1e3
    inputs["g"][:, 10] = g
    truth, _ = erase_write(**{name: x.double() for name, x in inputs.items()}, impl="reference")
    o, _ = erase_write(**inputs, impl="triton")
    assert relative_error(o[:, 10:], truth[:, 10:]) < (1e-5 if dtype == torch.float32 else 8e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value", [-torch.inf, torch.nan])
@pytest.mark.parametrize("log_decay", [-0.1, *slow(-5.0)])
def test_prefill_equals_decoding(dtype: torch.dtype, value: float, log_decay: float) -> None:
    inputs = low(Case(tokens=70, log_decay=log_decay).inputs(device=DEVICE), dtype)
    inputs["g"][:, 66, :, 2] = value
    with value_checks(False):
        o, state = erase_write(**inputs, impl="triton")
        at = inputs.pop("initial_state")
        outputs = []
        for t in range(70):
            token = {name: x[:, t] for name, x in inputs.items()}
            out, at = erase_write_step(**token, state=at, impl="triton")
            outputs.append(out)
    decoded = torch.stack(outputs, 1)
    if value != value:
        for x in (o, decoded):
            assert x[:, 66:].isnan().all()
            assert x[:, :64].isfinite().all()  # chunks before its own are never touched
        assert state.isnan().all()
        assert at.isnan().all()
    else:
        bar = 1e-5 if dtype == torch.float32 else 2e-2
        assert relative_error(o, decoded) < bar
        assert relative_error(state, at) < bar


@pytest.mark.parametrize("impl", ["reference", "chunkwise", "triton"])
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_nan_in_g_shows(impl: str, decay: str) -> None:
    inputs = Case(tokens=100, decay=decay).inputs(torch.float32, device=DEVICE)
    inputs["g"][:, 70, 0, 0] = torch.nan
    with value_checks(False):
        o, state = erase_write(**inputs, impl=impl)
    assert o[:, 70:, 0].isnan().all()
    assert state[:, 0].isnan().all()
    assert o[:, :64].isfinite().all()
    assert o[:, :, 1].isfinite().all()  # another head
    if impl == "reference":
        assert o[:, :70].isfinite().all()


def test_gradients_of_gradients() -> None:
    """The kernels' own gradient has none; the loop's is taken for it."""
    inputs = Case(tokens=20, key_width=8, value_width=6).inputs(torch.float32, device=DEVICE)

    def penalty(impl: str) -> torch.Tensor:
        leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        o, _ = erase_write(**leaves, impl=impl)
        first = torch.autograd.grad(o.square().sum(), list(leaves.values()), create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), leaves["k"])[0]

    assert relative_error(penalty("triton"), penalty("reference")) < 1e-4


def test_a_write_that_is_not_finite_reaches_its_own_chunk_at_most() -> None:
    inputs = Case(tokens=200).inputs(torch.float32, device=DEVICE)
    clean, _ = erase_write(**inputs, impl="triton")
    inputs["u"][0, 100, 0, 3] = torch.inf
    o, state = erase_write(**inputs, impl="triton")
    assert not o[0, 100:, 0, 3].isfinite().any()
    assert not state[0, 0, :, 3].isfinite().any()
    assert torch.equal(o[:, :64], clean[:, :64])
    o[:, 64:, 0, 3] = clean[:, 64:, 0, 3]
    assert torch.equal(o, clean)  # other columns and heads are not touched at all
