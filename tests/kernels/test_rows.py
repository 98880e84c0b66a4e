"""Norms and products of rows are torch's, at any width and shape."""

import pytest
import torch

from qed.kernels.rows import launch
from qed.kernels.rows.launch import SILU_PRODUCT
from qed.layers import norm
from qed.testing import relative_error

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUNDING = {torch.float32: 1e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("activation", [None, "silu", "sigmoid"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5, 100), (2, 7, 4, 16), (5, 1030), (0, 8)])
def test_norm(shape: tuple[int, ...], activation: str | None, dtype: torch.dtype) -> None:
    x, gate = numbers(*shape, dtype=dtype), None if activation is None else 3 * numbers(*shape, dtype=dtype)
    layer = norm.RMSNorm(shape[-1]) if activation is None else norm.GatedRMSNorm(shape[-1], activation)
    torch.nn.init.normal_(layer.weight)
    layer.to(DEVICE, dtype)
    found = launch.rms_norm(x, layer.weight, layer.eps, gate, activation)
    truth = layer.double()(x.double(), *(() if gate is None else (gate.double(),)))
    assert found.dtype == dtype
    assert found.shape == x.shape
    assert not x.numel() or relative_error(found, truth) < ROUNDING[dtype]


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("shape", [(1, 2), (3, 5, 200), (2, 1248), (0, 8)])
def test_product(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    both = 3 * numbers(*shape, dtype=dtype)
    gate, up = both.double().chunk(2, -1)
    found, truth = launch.silu_product(both), torch.nn.functional.silu(gate) * up
    assert found.shape == truth.shape
    assert not both.numel() or relative_error(found, truth) < ROUNDING[dtype]


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("shape", [(1, 2), (3, 5, 200), (2, 1248), (0, 8)])
def test_product_gradient(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    both = (3 * numbers(*shape, dtype=dtype)).requires_grad_()
    dy = numbers(*shape[:-1], shape[-1] // 2, dtype=dtype)
    (found,) = torch.autograd.grad(SILU_PRODUCT(both), both, dy)
    wide = both.detach().double().requires_grad_()
    gate, up = wide.chunk(2, -1)
    (truth,) = torch.autograd.grad(torch.nn.functional.silu(gate) * up, wide, dy.double())
    assert found.shape == truth.shape
    assert not both.numel() or relative_error(found, truth) < ROUNDING[dtype]


def test_product_opcheck() -> None:
    torch.library.opcheck(SILU_PRODUCT, (numbers(2, 3, 20).requires_grad_(),))


def test_rows_anywhere_in_memory() -> None:
    whole = numbers(3, 6, 40)
    weight = numbers(20)[::2]
    for x in (whole[:, 1::2, 5:15], whole[..., ::4], whole[:, :, 30:].transpose(0, 1)):
        truth = torch.nn.functional.rms_norm(x, (10,), weight, 1e-5)
        assert relative_error(launch.rms_norm(x, weight, 1e-5), truth) < 1e-6
        assert torch.equal(launch.silu_product(x), launch.silu_product(x.contiguous()))
        dy = numbers(5, *x.shape[:-1]).movedim(0, -1)
        dense = launch.silu_product_gradient(dy.contiguous(), x.contiguous())
        assert torch.equal(launch.silu_product_gradient(dy, x), dense)
