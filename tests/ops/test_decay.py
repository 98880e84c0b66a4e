"""The halving tree against the pair-by-pair definition it stands for."""

import pytest
import torch
from torch import Tensor

from qed.ops.decay import ChannelDecay, Decay, HeadDecay, half_sizes, lower_left
from qed.ops.scratch import Scratch
from qed.testing import relative_error


def by_pairs(x: Tensor, k: Tensor, g: Tensor) -> Tensor:
    """M_ij = Σ_c x_ic k_jc exp(g_{j+1,c} + … + g_{i,c}), i > j, one pair at a time."""
    two, b, chunk, _ = x.shape
    rows = []
    for i in range(chunk):
        row = [(x[:, :, i] * k[:, j] * g[:, j + 1 : i + 1].sum(1).exp()).sum(-1) for j in range(i)]
        rows.append(torch.stack([*row, *[x.new_zeros(two, b)] * (chunk - i)], -1))
    return torch.stack(rows, -2)


def made(kind: type[Decay], chunk: int, strong: bool) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(chunk)
    x, k = (torch.randn(*shape, 5, dtype=torch.float64, generator=random) for shape in ((2, 3, chunk), (3, chunk)))
    g = -(20 if strong else 1) * torch.rand(3, chunk, 5 if kind is ChannelDecay else 1, generator=random).double()
    if strong and chunk > 2:
        g[1, chunk // 2] = -torch.inf
        g[2, :] = -torch.inf
    return x, k, g


@pytest.mark.parametrize("strong", [False, True])
@pytest.mark.parametrize("chunk", [1, 2, 8, 32])
@pytest.mark.parametrize("kind", [ChannelDecay, HeadDecay])
def test_tree_equals_pairs(kind: type[Decay], chunk: int, strong: bool) -> None:
    x, k, g = made(kind, chunk, strong)
    decay = kind(g.clone(), x, k, Scratch(g.device, g.dtype))
    m = x.new_full((2, 3, chunk, chunk), torch.nan)
    x_tilde, k_bar, gamma = decay.pairs(m)
    assert relative_error(m, by_pairs(x, k, g)) < 1e-14
    assert relative_error(x_tilde, x * g.cumsum(1).exp()) < 1e-14
    later = torch.stack([g[:, j + 1 :].sum(1).exp() for j in range(chunk)], 1)
    assert relative_error(k_bar, k * later) < 1e-14
    assert relative_error(gamma, g.sum(1).exp().unsqueeze(-1)) < 1e-14


@pytest.mark.parametrize("chunk", [2, 8, 32])
@pytest.mark.parametrize("kind", [ChannelDecay, HeadDecay])
def test_tree_gradients_equal_autograd_through_pairs(kind: type[Decay], chunk: int) -> None:
    """All of M, x̃, k̄ and the whole chunk's decay contribute to dg."""
    x, k, g = made(kind, chunk, strong=False)
    random = torch.Generator().manual_seed(0)
    dm, dx, dk, d_gamma = (
        torch.randn(shape, dtype=torch.float64, generator=random)
        for shape in ((2, 3, chunk, chunk), x.shape, k.shape, (3, 5))
    )

    leaves = [t.clone().requires_grad_() for t in (x, k, g)]
    x_, k_, g_ = leaves
    later = torch.stack([g_[:, j + 1 :].sum(1) for j in range(chunk)], 1)
    loss = (by_pairs(x_, k_, g_) * dm).sum() + (x_ * g_.cumsum(1).exp() * dx).sum()
    loss = loss + (k_ * later.exp() * dk).sum() + (g_.sum(1) * d_gamma).sum()
    expected = torch.autograd.grad(loss, leaves)

    decay = kind(g.clone(), x, k, Scratch(g.device, g.dtype))
    decay.keep_pairs()
    dg = decay.backward(dm, dx, dk, d_gamma)
    for found, truth in zip((dx, dk, dg), expected, strict=True):
        assert relative_error(found, truth) < 1e-13


def test_levels_cover_the_strict_lower_triangle_once() -> None:
    m = torch.zeros(2, 32, 32)
    for half in half_sizes(32):
        lower_left(m, half).add_(1)
    assert torch.equal(m, torch.ones(2, 32, 32).tril(-1))
