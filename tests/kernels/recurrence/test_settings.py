"""Every checked-in setting on a GPU: in a process of its own, since a bad one takes its process down, and with all
uninitialised memory poisoned, so that nothing unwritten passes."""

import subprocess
import sys

import pytest
import torch

from qed.ops import erase_write
from qed.testing import relative_error

pytestmark = pytest.mark.gpu
CHECK = """
import torch
torch.use_deterministic_algorithms(True, warn_only=True)  # fills what torch.empty returns with NaN
from qed.kernels.recurrence import memory
from qed.testing import Case, over_budget
K, V, dtype = {K}, {V}, torch.{dtype}
common = dict(heads=2, key_width=K, value_width=V)
cases = (Case(batch=2, tokens=200, **common, log_decay=-0.1),
         Case(tokens=130, **common, decay="head", log_decay=-10.0, state=False),  # chunks that are cut
         Case(batch=2, tokens=130, **common, log_decay=-10.0),  # the same, in every channel by itself
         Case(batch=2, tokens=130, **common, log_decay=-1.0, resets=5),  # chunks that forget
         Case(batch=40, tokens=70, **common, log_decay=-0.1),  # many states
         Case(batch=2, tokens=200, **common, log_decay=-0.01))  # segments, short ones on purpose
for case, memory.SHORTEST_SEGMENT in zip(cases, (8, 8, 8, 8, 8, 1)):
    over = over_budget(case.inputs(device="cuda"), impl="triton", dtype=dtype, products=dtype)
    assert over == dict(), (case, over)
print("passed")
"""
REPEATS = """
import torch
from qed.testing import Case, run
dtype = torch.{dtype}
settings = ((24, 512, -0.1, 0), (1, 4096, -0.1, 0), (24, 512, -10.0, 0), (24, 512, -1.0, 20))
for batch, tokens, log_decay, resets in settings:  # the last two: chunks that are cut, and that forget
    case = Case(batch=batch, tokens=tokens, heads=6, key_width=128, value_width=128, log_decay=log_decay, resets=resets)
    inputs = {{n: x.to(torch.float32 if n in ("g", "initial_state") else dtype)
              for n, x in case.inputs(torch.float32, device="cuda").items()}}
    first = run(inputs, impl="triton")
    for _ in range(20):
        for name, x in run(inputs, impl="triton").items():
            assert torch.equal(x, first[name]), name
print("passed")
"""


def passes(code: str) -> None:
    """Its last line says so, not its exit status: a busy machine may stop torch's autograd threads while they release
    the last gradients, which aborts a process that is done."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["passed"], done.stderr[-2000:]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("K", "V"), [(16, 16), (32, 32), (64, 64), (128, 128), (256, 256), (60, 100), (100, 200)])
def test_a_setting_in_its_own_process(K: int, V: int, dtype: str) -> None:
    passes(CHECK.format(K=K, V=V, dtype=dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_repeats_are_bit_identical(dtype: str) -> None:
    passes(REPEATS.format(dtype=dtype))


def test_more_elements_than_32_bits_count() -> None:
    """The end of a sequence of 2³¹ elements and more, against the same tokens started from the state before them."""
    tokens, tail = 2**31 // (4 * 128) + 4096, 1000
    torch.manual_seed(0)

    def draw() -> torch.Tensor:
        return torch.randn(1, tokens, 4, 128, device="cuda", dtype=torch.bfloat16).mul_(0.08)

    inputs = [draw().requires_grad_() for _ in range(4)]
    g = -torch.rand(1, tokens, 4, 1, device="cuda")
    o, _ = erase_write(*inputs, g, impl="triton")
    cotangent = torch.randn(1, tail, 4, 128, device="cuda", dtype=torch.bfloat16)
    o[:, -tail:].backward(cotangent)
    with torch.no_grad():
        before = [x[:, :-tail] for x in (*inputs, g)]
        _, state = erase_write(*before, impl="triton")
    ends = [x[:, -tail:].detach().clone().requires_grad_() for x in inputs]
    truth, _ = erase_write(*ends, g[:, -tail:], initial_state=state, impl="triton")
    truth.backward(cotangent)
    assert relative_error(o[:, -tail:], truth) < 0.01
    for x, end in zip(inputs, ends, strict=True):
        assert x.grad is not None
        assert relative_error(x.grad[:, -tail:], end.grad) < 0.02
        assert not x.grad[:, : tail * 2].isnan().any()
