"""What fuzzers share: random draws that a seed decides, and how a refusal or an equality is checked."""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qed.testing import relative_error

REFUSALS = (ValueError, TypeError, RuntimeError)


class Draw(random.Random):
    """Everything a case draws comes from here, so that fuzzer and seed name the case. Python numbers are drawn by
    `random.Random`'s methods, tensors by these."""

    def __init__(self, fuzzer: str, seed: int):
        super().__init__(f"{fuzzer} {seed}")
        self.tensors = torch.Generator().manual_seed(self.getrandbits(62))

    def chance(self, probability: float) -> bool:
        return self.random() < probability

    def uniform_seconds(self, most: float) -> float:
        return self.random() * most

    def normal(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(shape, generator=self.tensors, dtype=torch.float64).to(dtype)

    def uniform(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.rand(shape, generator=self.tensors, dtype=torch.float64).to(dtype)

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.tensors)

    def offsets(self, tokens: int) -> list[int]:
        """Of sequences packed along `tokens`, some of them empty."""
        inner = [self.randint(0, tokens) for _ in range(self.randint(0, 4))]
        if inner and self.chance(0.5):
            inner.append(inner[0])
        return [0, *sorted(inner), tokens]

    def pieces(self, tokens: int) -> list[slice]:
        """`tokens` cut into non-empty pieces, often of one token."""
        cuts, start = [], 0
        while start < tokens:
            end = min(tokens, start + (1 if self.chance(0.3) else self.randint(1, max(1, tokens))))
            cuts.append(slice(start, end))
            start = end
        return cuts


def refused(call: Callable[[], Any], *names: str, kinds: tuple[type[Exception], ...] = REFUSALS) -> None:
    """The call raises an error of these kinds whose message has one of `names`. It must not return, and an error of
    another kind is a failure of its own."""
    try:
        found = call()
    except kinds as error:
        if names and not any(name in str(error) for name in names):
            raise AssertionError(f"the refusal names none of {names}: {error!r}") from error
        return
    raise AssertionError(f"expected a refusal that names {' or '.join(names)}; the call returned {type(found)}")


def same(found: Tensor, truth: Tensor, tolerance: float, what: str) -> None:
    """Equal shapes, and ‖found − truth‖ within `tolerance` · ‖truth‖."""
    assert found.shape == truth.shape, f"{what}: shape {list(found.shape)}, expected {list(truth.shape)}"
    if truth.numel():
        error = relative_error(found, truth)
        assert error <= tolerance, f"{what}: relative error {error:.3g}, allowed {tolerance:.3g}"


def identical(found: Tensor, truth: Tensor, what: str) -> None:
    assert found.dtype == truth.dtype, f"{what}: {found.dtype}, expected {truth.dtype}"
    assert torch.equal(found, truth), f"{what}: not the same bits"
