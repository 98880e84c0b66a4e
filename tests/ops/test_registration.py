"""The op under torch's own checks and compilers: opcheck, fullgraph, dynamic shapes, a fresh process."""

import shutil
import subprocess
import sys
from unittest.mock import patch

import pytest
import torch
import torch._dynamo
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import profile
from torch.testing._internal.two_tensor import TwoTensor

import qed.ops  # noqa: F401  (registers the operators)
from qed.ops import erase_write, erase_write_step, operators
from qed.testing import Case, relative_error, run

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="inductor needs a C++ compiler"
)
BACKENDS = ["aot_eager", pytest.param("inductor", marks=needs_compiler)]


def _detached(*values: object) -> tuple[object, ...]:
    return tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in values)


@pytest.mark.parametrize("decay", ["none", "head", "channel"])
@pytest.mark.parametrize("packed", [False, True])
def test_opcheck(decay: str, packed: bool) -> None:
    case = Case(batch=1 if packed else 2, tokens=40, decay=decay, state=not packed)
    inputs = case.inputs(torch.float32)
    q, k, a, u, g, state = (None if x is None else x.requires_grad_() for x in inputs.values())
    cu_seqlens = torch.tensor([0, 3, 3, 40]) if packed else None
    arguments = (q, k, a, u, g, state, cu_seqlens, 0.5)
    torch.library.opcheck(torch.ops.qed.erase_write_chunkwise_saving_3.default, arguments)
    with torch.no_grad():
        torch.library.opcheck(torch.ops.qed.erase_write_chunkwise.default, _detached(*arguments))
    _, _, *saved = torch.ops.qed.erase_write_chunkwise_saving_3(*arguments)
    gradients = torch.randn(1 if packed else 2, 40, 2, 16), torch.randn(3 if packed else 2, 2, 16, 16)
    torch.library.opcheck(
        torch.ops.qed.erase_write_chunkwise_backward_3.default,
        (*_detached(*gradients, q, k, a, u, g, cu_seqlens, 0.5), list(_detached(*saved))),
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("impl", ["reference", "chunkwise"])
def test_compiled_equals_eager(impl: str, backend: str) -> None:
    """Forward and backward in one graph, surrounded by code the compiler may fuse."""

    def loss(q: torch.Tensor, k: torch.Tensor, a: torch.Tensor, u: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        o, state = erase_write(q.sin(), k, a, u * 2, g, impl=impl)
        return o.square().sum() + state.sum()

    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    inputs = Case(tokens=10, state=False).inputs()
    leaves = [x.requires_grad_() for x in inputs.values() if x is not None]
    expected, found = (torch.autograd.grad(f(*leaves), leaves) for f in (loss, compiled))
    for x, y in zip(found, expected, strict=True):
        assert relative_error(x, y) < 1e-13


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_dynamic_graph_serves_every_length(backend: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(erase_write, fullgraph=True, dynamic=True, backend=backend)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (5, 31, 32, 33, 70, 100):
            inputs = Case(tokens=tokens).inputs(torch.float32)
            for x, y in zip(compiled(**inputs), erase_write(**inputs), strict=True):
                assert relative_error(x, y) < 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_sequences_compile_without_a_break(backend: str) -> None:
    compiled = torch.compile(erase_write, fullgraph=True, backend=backend)
    inputs = Case(tokens=50, state=False).inputs(torch.float32)
    offsets = torch.tensor([0, 7, 7, 50])
    for x, y in zip(
        compiled(**inputs, cu_seqlens=offsets),
        erase_write(**inputs, cu_seqlens=offsets),
        strict=True,
    ):
        assert torch.equal(x, y)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("impl", ["reference", "chunkwise"])
def test_the_step_compiles(impl: str, backend: str) -> None:
    inputs = Case(tokens=1).inputs()
    state = inputs.pop("initial_state")
    token = {name: None if x is None else x[:, 0] for name, x in inputs.items()}
    compiled = torch.compile(erase_write_step, fullgraph=True, backend=backend)
    for x, y in zip(
        compiled(**token, state=state, impl=impl),
        erase_write_step(**token, state=state, impl=impl),
        strict=True,
    ):
        assert relative_error(x, y) < 1e-14


def test_compiled_code_still_checks_values_on_cpu() -> None:
    compiled = torch.compile(erase_write, fullgraph=True, backend="aot_eager")
    inputs = Case(tokens=5).inputs()
    with pytest.raises(ValueError, match="g: expected log-decays ≤ 0"):
        compiled(**(inputs | {"g": -inputs["g"]}))


FRESH = """
import torch
import torch._dynamo
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import profile
from torch.testing._internal.two_tensor import TwoTensor
from qed.ops import erase_write
torch.manual_seed(0)
x = [torch.randn(1, 40, 2, 8) / 3 for _ in range(4)] + [-torch.rand(1, 40, 2, 8)]
compiled = [t.clone().requires_grad_() for t in x]
torch.compile(erase_write, fullgraph=True, backend="aot_eager")(*compiled)[0].sum().backward()
eager = [t.clone().requires_grad_() for t in x]
erase_write(*eager)[0].sum().backward()
assert all(torch.equal(c.grad, e.grad) for c, e in zip(compiled, eager))
print("same")
"""


def test_compiling_is_fine_as_the_first_call_of_a_fresh_process() -> None:
    result = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True)
    assert result.stdout.strip() == "same", result.stderr


def test_checkpointing_recomputes_the_same_gradients() -> None:
    inputs = Case(tokens=70).inputs()
    expected = run(inputs, impl="chunkwise")
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items() if x is not None}
    o, state = torch.utils.checkpoint.checkpoint(lambda x: erase_write(**x), leaves, use_reentrant=False)
    random = torch.Generator().manual_seed(1)
    loss = sum((x * torch.randn(x.shape, dtype=x.dtype, generator=random)).sum() for x in (o, state))
    for name, d in zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True):
        assert torch.equal(d, expected[f"d{name}"])


def test_nothing_is_kept_without_gradients() -> None:
    inputs = Case().inputs()
    arguments = (*inputs.values(), None, 1.0)
    assert len(torch.ops.qed.erase_write_chunkwise(*arguments)) == 2
    inputs["q"].requires_grad_()
    with pytest.raises(RuntimeError, match="erase_write_chunkwise saves nothing for a backward"):
        torch.ops.qed.erase_write_chunkwise(*arguments)[0].sum().backward()


def test_without_a_gradient_torch_still_sees_the_operator() -> None:
    """The call goes past autograd, and not past what else watches operators: fake tensors, tracing, vmap, profilers."""
    inputs = {name: x for name, x in Case(tokens=70).inputs(torch.float32).items() if x is not None}
    names, given = list(inputs), tuple(inputs.values())

    def op(*tensors: torch.Tensor) -> torch.Tensor:
        return erase_write(**dict(zip(names, tensors, strict=True)), impl="chunkwise")[0]

    with torch.no_grad():
        o = op(*given)
        with FakeTensorMode() as mode:
            fake = op(*(mode.from_tensor(x) for x in given))
        assert isinstance(fake, FakeTensor)
        traced = make_fx(op)(*given)
        assert torch.ops.qed.erase_write_chunkwise.default in {node.target for node in traced.graph.nodes}
        batched = torch.func.vmap(op)(*(torch.stack([x, x]) for x in given))
        torch.testing.assert_close(batched, torch.stack([o, o]))
        with profile() as profiler:
            op(*given)
    assert "qed::erase_write_chunkwise" in {event.key for event in profiler.key_averages()}


def test_a_call_that_nobody_watches_gives_the_same_bits() -> None:
    """Without anybody who looks at operators none is called; what is computed is the same, gradients too."""
    inputs = {name: x.requires_grad_() for name, x in Case(tokens=70).inputs().items() if x is not None}

    def results() -> list[torch.Tensor]:
        o, state = erase_write(**inputs, impl="chunkwise")
        return [o, state, *torch.autograd.grad((o * o).sum() + (state * state).sum(), list(inputs.values()))]

    with patch.object(operators.CHUNKWISE, "saving", None), patch.object(operators.CHUNKWISE, "_backward", None):
        alone = results()
    with profile() as profiler:
        watched = results()
    seen = {event.key for event in profiler.key_averages()}
    assert {"qed::erase_write_chunkwise_saving_3", "qed::erase_write_chunkwise_backward_3"} <= seen
    assert all(torch.equal(x, y) for x, y in zip(alone, watched, strict=True))


@pytest.mark.parametrize("packed", [False, True])
def test_a_default_device_is_not_that_of_the_operator(packed: bool) -> None:
    """With a default device, or any other mode over torch's functions, a call is an operator: what it makes itself
    lies where its inputs are."""
    inputs = {name: x.requires_grad_() for name, x in Case(batch=1, tokens=70).inputs().items()}
    offsets = torch.tensor([0, 70]) if packed else None

    def gradients() -> tuple[torch.Tensor, ...]:
        o, state = erase_write(**inputs, cu_seqlens=offsets, impl="chunkwise")
        return torch.autograd.grad(o.sum() + state.sum(), list(inputs.values()))

    truth = gradients()
    with torch.device("meta"):
        found = gradients()
    assert all(torch.equal(x, y) for x, y in zip(found, truth, strict=True))


def test_a_cotangent_that_is_more_than_its_values() -> None:
    """The backward is an operator for it, though the forward had plain tensors: what it is passes to the gradients."""
    inputs = {name: x.requires_grad_() for name, x in Case(tokens=20).inputs().items()}
    leaves = list(inputs.values())
    o, _ = erase_write(**inputs, impl="chunkwise")
    do, other = torch.randn_like(o), torch.randn_like(o)
    found = torch.autograd.grad(o, leaves, TwoTensor(do, other), retain_graph=True)
    for part, cotangent in (("a", do), ("b", other)):
        truth = torch.autograd.grad(o, leaves, cotangent, retain_graph=True)
        assert all(torch.equal(getattr(x, part), y) for x, y in zip(found, truth, strict=True))
