"""The same theorems on a CUDA device, for the forms that run there."""

import pytest
import torch

from qed.ops import erase_write, erase_write_step, explain, value_checks
from qed.testing import Case, over_budget, relative_error, run

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decay", ["none", "head", "channel"])
@pytest.mark.parametrize("tokens", [1, 33, 150])
def test_chunk_equals_loop(tokens: int, decay: str, dtype: torch.dtype) -> None:
    case = Case(batch=2, tokens=tokens, decay=decay, resets=1, log_decay=-5.0)
    assert over_budget(case.inputs(device="cuda"), impl="chunkwise", dtype=dtype) == {}


def test_packed_sequences() -> None:
    inputs = Case(tokens=200, state=False).inputs(device="cuda")
    offsets = torch.tensor([0, 70, 70, 71, 200], device="cuda")
    truth = run(inputs, impl="reference", cu_seqlens=offsets)
    for name, x in run(inputs, impl="chunkwise", cu_seqlens=offsets).items():
        assert relative_error(x, truth[name]) < 1e-12, name


def test_the_device_gives_what_the_cpu_gives() -> None:
    case = Case(tokens=130)
    here, there = run(case.inputs(), impl="chunkwise"), run(case.inputs(device="cuda"), impl="chunkwise")
    for name, x in here.items():
        assert relative_error(there[name].cpu(), x) < 1e-12, name


def test_compiled_equals_eager() -> None:
    inputs = Case(tokens=130).inputs(torch.float32, device="cuda")
    compiled = torch.compile(erase_write, fullgraph=True)
    for x, y in zip(compiled(**inputs), erase_write(**inputs), strict=True):
        assert relative_error(x, y) < 1e-6


def test_value_checks_are_opt_in() -> None:
    inputs = Case(tokens=5).inputs(torch.float32, device="cuda")
    inputs["g"] = -inputs["g"]
    erase_write(**inputs)
    with value_checks(True), pytest.raises(ValueError, match="g: expected log-decays ≤ 0"):
        erase_write(**inputs)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits_for_the_device() -> None:
    """Dense sequences and steps: validation and dispatch read no value back."""
    inputs = Case(tokens=64).inputs(torch.float32, device="cuda")
    token = {name: x[:, 0] for name, x in inputs.items() if x is not None and name != "initial_state"}
    torch.cuda.set_sync_debug_mode("error")
    try:
        explain(**inputs)
        erase_write_step(**token, state=inputs["initial_state"])
    finally:
        torch.cuda.set_sync_debug_mode("default")
