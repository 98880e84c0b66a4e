"""Kernels are launched where their tensors are, whichever device is the current one, and a launch that is prepared runs
what Triton would have run."""

import ast
import random
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import qed.kernels
from qed.kernels.launching import FUSED, Prepared, kind_of, on_its_device
from qed.ops import erase_write
from qed.testing import Case, run

triton = pytest.importorskip("triton")
from triton import language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402


@pytest.mark.parametrize(("index", "expected"), [(0, []), (1, [1])])
def test_the_current_device_is_the_tensors(index: int, expected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    entered, current = [], [0]

    @contextmanager
    def device(wanted: SimpleNamespace):
        entered.append(wanted.index)
        current.append(wanted.index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", device)
    x = SimpleNamespace(is_cuda=True, device=SimpleNamespace(index=index))
    assert on_its_device(lambda x, y, *, z: (current[-1], y, z))(x, 5, z=7) == (index, 5, 7)
    assert entered == expected


def test_a_cpu_is_left_alone() -> None:
    assert on_its_device(lambda x: x + 1)(torch.ones(1)) == 2


def test_there_is_one_way_to_launch() -> None:
    """`kernel[grid](…)` is written in one place."""
    found = set()
    for path in Path(qed.kernels.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                found.add(path.name)
    assert found == {"launching.py"}


def plain(x, y, n, factor, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """y = factor · x + n."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + rows, tl.load(x + rows, mask=rows < WIDTH) * factor + n, mask=rows < WIDTH)


class Compiled:
    """Stands in for a compiled kernel, and keeps the values of every launch."""

    def __init__(self, key: Any, launches: list[tuple[Any, ...]]):
        self.key, self.launches, self.function, self.packed_metadata = key, launches, None, None

    def launch_metadata(self, *_: Any) -> None:
        """There is no hook to tell anything to."""

    def run(self, *given: Any) -> None:
        """Called as Triton calls a compiled kernel: three sizes of the grid, six other things, and the values."""
        x, y, z, _, _, _, _, _, _, *values = given
        as_taken = [v.data_ptr() if isinstance(v, torch.Tensor) else v for v in values]
        self.launches.append((self.key, (x, y, z), as_taken))

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *values: self.run(*grid, *[None] * 6, *values)


class Kernel(triton.JITFunction):
    """A kernel for which nothing is compiled, but everything that comes before and after."""

    def __init__(self, function: Any):
        super().__init__(function)
        self.launches: list[tuple[Any, ...]] = []
        self.compilations = 0

    def _do_compile(self, key: Any, signature: Any, device: int, *_: Any) -> Compiled:
        self.compilations += 1
        self.device_caches[device][0][key] = Compiled(key, self.launches)
        return self.device_caches[device][0][key]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """A kernel for a GPU that is not there."""
    device = {"get_current_device": lambda: 0, "get_current_stream": lambda _: 7}
    stand_in = SimpleNamespace(**device, get_current_target=lambda: GPUTarget("cuda", 90, 32))
    monkeypatch.setattr(driver, "_active", stand_in)
    return Kernel(plain)


def drawn(chance: random.Random) -> tuple[Any, ...]:
    """Arguments of every kind that Triton compiles differently for."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64)
    numbers = (0, 1, 2, 15, 16, 17, -16, -1, 2**31 - 16, 2**31 - 1, 2**31, 2**40 + 1, -(2**31), -(2**31) - 1, 2**63)
    others = (None, 0.0, 1.0, 0.5, True, False)

    def one() -> Any:
        if chance.random() < 0.5:
            return torch.empty(64, dtype=chance.choice(dtypes))[chance.choice((0, 1, 4, 8)) :]
        return chance.choice(chance.choice((numbers, others)))

    return tuple(one() for _ in range(4))


def test_a_prepared_launch_runs_what_triton_would_run(kernel: Kernel) -> None:
    """The same compiled kernel, on the same grid, with the same values, in the order of the kernel's parameters."""
    chance = random.Random(0)
    constants = {"BLOCK": 32, "WIDTH": 64, "num_warps": 2} | FUSED
    prepared = Prepared(kernel, **constants)
    kinds: dict[Any, Any] = {}
    for i in range(3000):
        arguments, grid = drawn(chance), ((3,), (3, 2), (3, 2, 5))[i % 3]
        kernel.launches.clear()
        kernel[grid](*arguments, **constants)
        prepared(grid, *arguments)
        prepared(grid, *arguments)  # this one does not ask Triton
        expected, *others = kernel.launches
        assert others == [expected] * 2, arguments
        kinds.setdefault(kind_of(arguments)[0], expected[0])
        assert kinds[kind_of(arguments)[0]] == expected[0], "one kind, and two kernels"
    assert len(kinds) > 1000
    assert kernel.compilations == len(set(kinds.values()))


def test_what_is_not_known_is_left_to_triton(kernel: Kernel) -> None:
    x, prepared = torch.ones(64), Prepared(kernel, WIDTH=64, BLOCK=32, **FUSED)
    for _ in range(2):
        prepared((1,), x, x, (1, 2), 0.5)
    assert [values[2] for _, _, values in kernel.launches] == [(1, 2)] * 2
    assert kind_of((x, (1, 2))) == (None, [])


def test_triton_is_asked_while_it_watches(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that is to be called before a launch is called, and checks that are switched on are compiled."""
    x, prepared, called = torch.ones(64), Prepared(kernel, WIDTH=64, BLOCK=32, **FUSED), []
    prepared((1,), x, x, 5, 0.5)
    kernel.add_pre_run_hook(lambda *_, **__: called.append(1))
    prepared((1,), x, x, 5, 0.5)
    assert called == [1]
    kernel.pre_run_hooks.clear()
    monkeypatch.setattr(triton.knobs.runtime, "debug", True)
    prepared((1,), x, x, 5, 0.5)
    keys = [key for key, _, _ in kernel.launches]
    assert keys[0] == keys[1] != keys[2]


def misaligned(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, contiguous, one number behind an address that is a multiple of 16."""
    memory = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    memory[1:].copy_(x.flatten())
    return memory[1:].view(x.shape)


@pytest.mark.gpu
def test_alignment_and_divisibility_may_change_between_launches() -> None:
    """On a GPU: every launch of one prepared kernel gives what an ordinary one does."""
    kernel = triton.jit(plain)
    prepared, x = Prepared(kernel, WIDTH=1000, BLOCK=256, **FUSED), torch.randn(1000, device="cuda")
    for _ in range(3):
        for n in (1, 16, 17, 1, 2**31 + 16, 2**40 + 1, -3):
            for given in (x, misaligned(x), x.bfloat16(), misaligned(x.bfloat16())):
                for out in (torch.empty_like(x), misaligned(x)):
                    expected = torch.empty_like(x)
                    kernel[(4,)](given, expected, n, 0.5, WIDTH=1000, BLOCK=256, **FUSED)
                    prepared((4,), given, out, n, 0.5)
                    assert torch.equal(out, expected), (n, given.dtype)


@pytest.mark.gpu
def test_hooks_around_a_launch_are_called() -> None:
    """As profilers need it, for launches that do not go through Triton's own."""
    x, names = torch.ones(64, device="cuda"), []
    prepared = Prepared(triton.jit(plain), WIDTH=64, BLOCK=32, **FUSED)
    prepared((2,), x, x, 0, 1.0)

    def enter(metadata: Any) -> None:
        names.append(metadata.get()["name"])

    triton.knobs.runtime.launch_enter_hook.add(enter)
    try:
        prepared((2,), x, x, 0, 1.0)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(enter)
    prepared((2,), x, x, 0, 1.0)
    assert names == ["plain"]


@pytest.mark.gpu
def test_other_streams_and_graphs() -> None:
    x, prepared = torch.ones(64, device="cuda"), Prepared(triton.jit(plain), WIDTH=64, BLOCK=32, **FUSED)
    prepared((2,), x, x, 1, 1.0)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        prepared((2,), x, x, 1, 1.0)
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    assert x.tolist() == [4.0] * 64


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [200, 4096])
def test_the_op_takes_any_address(tokens: int) -> None:
    """Forward and backward, with inputs at addresses that are no multiples of 16, between calls with those that are."""
    inputs = Case(batch=1, tokens=tokens, heads=2, key_width=64, value_width=64).inputs(torch.float32, device="cuda")
    low = {n: x.to(torch.float32 if n in ("g", "initial_state") else torch.bfloat16) for n, x in inputs.items()}
    expected = run(low, impl="triton")
    for odd in (*low, None):
        given = {n: misaligned(x) if odd in (n, None) else x for n, x in low.items()}
        for _ in range(2):
            for name, x in run(given, impl="triton").items():
                assert torch.equal(x, expected[name]), (odd, name)


def test_every_length_may_follow_every_other() -> None:
    """One token, and lengths that are multiples of 16 and are not: the kernels get these numbers."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for tokens in (1, 16, 17, 1, 64, 70):
        inputs = Case(tokens=tokens).inputs(torch.float32, device=device)
        o, state = erase_write(**inputs, impl="triton")
        truth, true_state = erase_write(**inputs, impl="chunkwise")
        torch.testing.assert_close(o, truth, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(state, true_state, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_another_device() -> None:
    from qed import QEDConfig, QEDForCausalLM

    torch.manual_seed(0)
    model = QEDForCausalLM(QEDConfig.tiny())
    ids = torch.randint(0, 256, (2, 70))
    found = []
    for device in ("cuda:0", "cuda:1"):
        on = model.to(device)
        logits = on(ids.to(device)).logits
        logits.square().mean().backward()
        with torch.no_grad():
            found.append(
                [logits.cpu(), on(ids.to(device)).logits.cpu(), on.generate(ids.to(device), max_new_tokens=4).cpu()]
            )
    assert all(torch.allclose(x, y, atol=1e-5) for x, y in zip(*found, strict=True))
