"""What callers may rely on beyond the numbers themselves: autocast, higher derivatives, values that are not finite,
empty batches. Every promise is kept by every form, or refused by name."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from qed.ops import erase_write, erase_write_step, explain, value_checks
from qed.ops.affine import segment
from qed.testing import Case, relative_error, run
from tests.segments import segmented_erase_write

CASE = Case(batch=2, tokens=40, heads=2, key_width=8, value_width=6)
REFUSED = r"'chunkwise' cannot run here: recurrence: torch\.func and forward-mode differentiation can"
FORMS = pytest.mark.parametrize("impl", ["reference", "chunkwise"])


def loss(inputs: dict[str, Any], impl: str) -> Tensor:
    o, state = erase_write(**inputs, impl=impl)
    return o.square().sum() + state.square().sum()


# Autocast


@FORMS
@pytest.mark.parametrize("decay", ["none", "head", "channel"])
def test_autocast_changes_no_bit(impl: str, decay: str) -> None:
    """Not even where the backward runs inside of it."""
    inputs = Case(tokens=70, decay=decay).inputs(torch.float32)
    truth = run(inputs, impl=impl)
    with torch.autocast("cpu", torch.bfloat16):
        found = run(inputs, impl=impl)
    for name, x in found.items():
        assert x.dtype == truth[name].dtype
        assert torch.equal(x, truth[name]), name


@FORMS
@pytest.mark.parametrize("trained", [False, True])
def test_a_step_under_autocast_keeps_its_state_in_float32(impl: str, trained: bool) -> None:
    inputs = Case(batch=3, tokens=1).inputs(torch.float32)
    state = inputs.pop("initial_state").requires_grad_(trained)
    token = {name: x[:, 0] for name, x in inputs.items()}

    def results() -> list[Tensor]:
        o, new = erase_write_step(**token, state=state, impl=impl)
        gradients = torch.autograd.grad(o.sum() + new.square().sum(), state) if trained else ()
        return [o, new, *gradients]

    truth = results()
    with torch.autocast("cpu", torch.bfloat16):
        found = results()
    assert found[1].dtype == torch.float32
    assert all(torch.equal(x, y) for x, y in zip(found, truth, strict=True))


def test_affine_maps_under_autocast() -> None:
    inputs = Case(tokens=60, key_width=32, value_width=32).inputs(torch.float32)
    parts = [inputs[name] for name in ("k", "a", "u", "g")]
    whole, (o, _) = segment(*parts), segmented_erase_write(**inputs, segments=3)
    with torch.autocast("cpu", torch.bfloat16):
        first, second = (segment(*(x[:, cut] for x in parts)) for cut in (slice(0, 20), slice(20, None)))
        composed = first.then(second)
        assert torch.equal(segmented_erase_write(**inputs, segments=3)[0], o)
    assert (composed.M - whole.M).norm() < 1e-5 * whole.M.shape[-1]
    assert relative_error(composed.N, whole.N) < 1e-5


# Derivatives


@FORMS
def test_gradients_of_gradients(impl: str) -> None:
    """Right for every input, and later calls are not disturbed."""
    plain = run(CASE.inputs(), impl=impl)

    def penalties(impl: str) -> list[Tensor]:
        leaves = {name: x.requires_grad_() for name, x in CASE.inputs().items()}
        first = torch.autograd.grad(loss(leaves, impl), list(leaves.values()), create_graph=True)
        return list(torch.autograd.grad(sum(x.square().sum() for x in first), list(leaves.values())))

    for x, y in zip(penalties(impl), penalties("reference"), strict=True):
        assert relative_error(x, y) < 1e-12
    assert all(torch.equal(x, plain[name]) for name, x in run(CASE.inputs(), impl=impl).items())


def test_packed_gradients_of_gradients() -> None:
    inputs = Case(tokens=20, state=False, key_width=4, value_width=3).inputs()
    offsets = torch.tensor([0, 7, 7, 20])

    def penalty(impl: str) -> Tensor:
        q = inputs["q"].clone().requires_grad_()
        o, _ = erase_write(**(inputs | {"q": q}), cu_seqlens=offsets, impl=impl)
        (first,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
        return torch.autograd.grad(first.square().sum(), q)[0]

    assert relative_error(penalty("chunkwise"), penalty("reference")) < 1e-12


@pytest.mark.parametrize("name", ["q", "k", "a", "u", "g", "initial_state"])
def test_forward_mode_is_the_gradient_or_is_refused(name: str) -> None:
    inputs = CASE.inputs()
    tangent = torch.randn_like(inputs[name])
    leaf = inputs[name].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(inputs | {name: leaf}, "chunkwise"), leaf)
    with forward_ad.dual_level():
        dual = inputs | {name: forward_ad.make_dual(inputs[name], tangent)}
        found = forward_ad.unpack_dual(loss(dual, "auto")).tangent
        assert relative_error(found, (gradient * tangent).sum()) < 1e-12
        assert explain(**dual).route == "reference"
        with pytest.raises(RuntimeError, match=REFUSED):
            loss(dual, "chunkwise")


@pytest.mark.parametrize("impl", ["auto", "chunkwise"])
def test_a_gradient_has_the_tangent_of_its_cotangent(impl: str) -> None:
    """Forward mode over the backward alone, as where only what follows the op has a tangent."""
    inputs = {name: x.requires_grad_() for name, x in CASE.inputs().items()}
    leaves = list(inputs.values())
    outputs = erase_write(**inputs, impl=impl)
    do, tangent = torch.randn(2, *outputs[0].shape, dtype=torch.float64)
    dstate = torch.randn_like(outputs[1])
    values = torch.autograd.grad(outputs, leaves, (do, dstate), retain_graph=True)
    tangents = torch.autograd.grad(outputs, leaves, (tangent, torch.zeros_like(dstate)), retain_graph=True)
    with forward_ad.dual_level():
        found = torch.autograd.grad(outputs, leaves, (forward_ad.make_dual(do, tangent), dstate))
        for x, value, derivative in zip(map(forward_ad.unpack_dual, found), values, tangents, strict=True):
            assert not x.primal.requires_grad
            assert relative_error(x.primal, value) < 1e-12
            assert relative_error(x.tangent, derivative) < 1e-12


def test_torch_func() -> None:
    """`auto` takes the loop for it; vmap alone needs no derivative, and takes any form."""
    inputs = CASE.inputs()

    def of_q(impl: str) -> Any:
        return lambda q: loss(inputs | {"q": q}, impl)

    leaf = inputs["q"].clone().requires_grad_()
    (truth,) = torch.autograd.grad(of_q("chunkwise")(leaf), leaf)
    assert relative_error(torch.func.grad(of_q("auto"))(inputs["q"]), truth) < 1e-12
    several = torch.stack([inputs["q"], 2 * inputs["q"]])
    each = torch.func.vmap(torch.func.grad(of_q("auto")))(several)
    assert relative_error(each[0], truth) < 1e-12
    found = torch.func.vmap(of_q("chunkwise"))(several)
    assert relative_error(found[1], of_q("reference")(several[1])) < 1e-12
    for transform in (torch.func.grad, torch.func.jacrev, lambda f: torch.func.grad(lambda x: f(x) ** 2)):
        with pytest.raises(RuntimeError, match=REFUSED):
            transform(of_q("chunkwise"))(inputs["q"])
    with pytest.raises(RuntimeError, match=REFUSED):
        torch.func.grad(lambda q: torch.func.vmap(of_q("chunkwise"))(q).sum())(several)


# Values that are not finite


@FORMS
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_write_that_is_not_finite_stays_out_of_the_past(impl: str, value: float) -> None:
    case = Case(batch=2, tokens=100, heads=2, key_width=8, value_width=6)
    for dtype in (torch.float32, torch.bfloat16):
        inputs = {n: x.to(dtype if n in "qkau" else torch.float32) for n, x in case.inputs().items()}
        clean, _ = erase_write(**inputs, impl=impl)
        inputs["u"][1, 50, 0, 3] = value
        o, state = erase_write(**inputs, impl=impl)
        assert not o[1, 50:, 0, 3].isfinite().any()
        assert not state[1, 0, :, 3].isfinite().any()
        o[1, 50:, 0, 3] = clean[1, 50:, 0, 3]
        assert torch.equal(o, clean)  # every other output: earlier tokens, other columns, heads and sequences


def test_large_writes_are_not_taken_for_infinite_ones() -> None:
    inputs = Case(tokens=50, log_decay=-0.01).inputs(torch.float32)
    inputs["u"].fill_(1e36)  # their sum is beyond float32
    truth, _ = erase_write(**{name: x.double() for name, x in inputs.items()})
    assert relative_error(erase_write(**inputs, impl="chunkwise")[0], truth) < 1e-5


@FORMS
@pytest.mark.parametrize("offsets", [[0, 4, 2, 6], [1, 6], [0, 5], [0, 7], [0, -1, 6]])
def test_offsets_that_make_no_sense_are_refused_without_value_checks(impl: str, offsets: list[int]) -> None:
    """These forms read them on the host anyway."""
    inputs = Case(tokens=6, state=False).inputs(torch.float32)
    with value_checks(False), pytest.raises(ValueError, match="cu_seqlens: expected offsets that start at 0"):
        erase_write(**inputs, cu_seqlens=torch.tensor(offsets), impl=impl)


# Sizes


@pytest.mark.parametrize("impl", ["auto", "reference", "chunkwise"])
@pytest.mark.parametrize("sizes", [{"batch": 0}, {"heads": 0}, {"batch": 0, "tokens": 0}, {"tokens": 0}])
def test_nothing_gives_nothing(impl: str, sizes: dict[str, int]) -> None:
    case = Case(**({"batch": 2, "tokens": 5, "heads": 2} | sizes))
    inputs = {name: x.requires_grad_() for name, x in case.inputs(torch.float32).items()}
    o, state = erase_write(**inputs, impl=impl)
    assert o.shape == inputs["u"].shape
    assert torch.equal(state, inputs["initial_state"])
    (o.sum() + state.sum()).backward()
    assert inputs["initial_state"].grad is not None


@FORMS
@pytest.mark.parametrize("sizes", [{"batch": 0}, {"heads": 0}])
def test_a_step_of_nothing_gives_nothing(impl: str, sizes: dict[str, int]) -> None:
    inputs = Case(**({"batch": 2, "tokens": 1, "heads": 2} | sizes)).inputs(torch.float32)
    state = inputs.pop("initial_state")
    o, new = erase_write_step(**{name: x[:, 0] for name, x in inputs.items()}, state=state, impl=impl)
    assert o.shape == inputs["u"][:, 0].shape
    assert torch.equal(new, state)


@pytest.mark.parametrize("impl", ["auto", "reference", "chunkwise"])
@pytest.mark.parametrize(
    ("scale", "dtype"),
    [(1e39, torch.float32), (-1e39, torch.bfloat16), (10**400, torch.float64), (1e-50, torch.float32)],
)
def test_a_scale_that_the_precision_cannot_hold_is_refused(impl: str, scale: float, dtype: torch.dtype) -> None:
    inputs = {n: x.to(torch.float64 if dtype == torch.float64 else dtype if n in "qkau" else torch.float32)
              for n, x in CASE.inputs().items()}  # fmt: skip
    with pytest.raises(ValueError, match=r"scale: expected 0 or a size that torch\.float(32|64) can hold"):
        erase_write(**inputs, scale=scale, impl=impl)
    assert erase_write(**inputs, scale=0, impl=impl)[0].abs().max() == 0


def test_the_plain_interpreter_refuses_bfloat16() -> None:
    pytest.importorskip("triton")
    code = """
import torch
from qed.ops import erase_write
x = [torch.randn(1, 5, 1, 16).to(torch.bfloat16) for _ in range(4)]
try:
    erase_write(*x, impl="triton")
except RuntimeError as error:
    print(error)
"""
    environment = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PATH": "", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    refused = "cannot run here: recurrence: Triton's interpreter cannot compute in torch.bfloat16"
    assert refused in done.stdout, done.stderr[-2000:]
