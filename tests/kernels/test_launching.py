"""Kernels are launched where their tensors are, whichever device is the current one."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from qed.kernels.launching import on_its_device


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
