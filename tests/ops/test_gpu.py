"""The same theorems on a CUDA device, for the forms that run there."""

import subprocess
import sys

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


@pytest.mark.parametrize("offsets", [[0, 50, 500], [0, 80, 40, 100], [0, 90], [7, 100]])
def test_offsets_that_make_no_sense_stop_the_kernels(offsets: list[int]) -> None:
    """By a device-side assertion, in a process of its own, which is lost then."""
    code = f"""
import torch
from qed.ops import erase_write
from qed.testing import Case
inputs = Case(tokens=100, state=False).inputs(torch.float32, device="cuda")
good, bad = (torch.tensor(x, device="cuda") for x in ([0, 40, 40, 100], {offsets}))
erase_write(**inputs, cu_seqlens=good, impl="triton")
torch.cuda.synchronize()
print("good", flush=True)
try:
    erase_write(**inputs, cu_seqlens=bad, impl="triton")
    torch.cuda.synchronize()
    print("not noticed", flush=True)
except RuntimeError as error:
    print("noticed" if "device-side assert" in str(error) else error, flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split("\n")[:2] == ["good", "noticed"], done.stdout + done.stderr[-2000:]
    assert "cu_seqlens: expected" in done.stderr


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_packed_sequences_wait_for_nothing() -> None:
    inputs = Case(tokens=200, state=False).inputs(torch.float32, device="cuda")
    offsets = torch.tensor([0, 70, 70, 71, 200], device="cuda")
    erase_write(**inputs, cu_seqlens=offsets, impl="triton")
    torch.cuda.set_sync_debug_mode("error")
    try:
        erase_write(**inputs, cu_seqlens=offsets, impl="triton")
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_autocast_changes_no_bit() -> None:
    inputs = Case(tokens=70, decay="head").inputs(torch.float32, device="cuda")
    for impl in ("reference", "chunkwise", "triton"):
        truth = run(inputs, impl=impl)
        with torch.autocast("cuda", torch.bfloat16):
            found = run(inputs, impl=impl)
        assert all(torch.equal(x, truth[name]) for name, x in found.items()), impl
