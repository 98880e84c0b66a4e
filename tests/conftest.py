"""Settings for every test: one thread per worker, property tests that draw the same examples each time, and, where
there is no GPU, Triton's interpreter, which runs the kernels on CPU tensors."""

import os
import signal

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported
from hypothesis import HealthCheck, settings

settings.register_profile(
    "qed", derandomize=True, deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("qed")
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # for processes that tests start
os.environ["TORCHAO_FORCE_SKIP_LOADING_SO_FILES"] = "1"  # which it says it cannot load in a build for CPUs
# A shell starts what it leaves in the background with Ctrl-C ignored, and programs that tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The longest test begins first, so that no worker is left with it at the end.
    items.sort(key=lambda item: item.name != "test_the_readmes_commands_from_a_clean_clone")
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
