"""The short convolution is a causal depthwise convolution, in any layout and cut anywhere."""

import pytest
import torch

from qed.kernels.convolution.launch import SHORT_CONVOLUTION
from qed.layers import Sequences, short_convolution
from qed.testing import relative_error
from tests.marks import slow

D = 3


def inputs(*shape: int, width: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(*shape, D, dtype=torch.float64), torch.randn(D, width, dtype=torch.float64)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_is_a_causal_depthwise_convolution(tokens: int, width: int) -> None:
    x, weight = inputs(2, tokens, width=width)
    padded = torch.nn.functional.pad(x.mT, (width - 1, 0))
    truth = torch.nn.functional.silu(torch.nn.functional.conv1d(padded, weight[:, None], groups=D)).mT
    y, state = short_convolution(x, weight)
    assert torch.allclose(y, truth, rtol=0, atol=1e-14)
    assert torch.equal(state, padded.mT[:, tokens:])


@pytest.mark.parametrize("cut", [0, 1, 2, 5, 9])
def test_split_anywhere_is_whole(cut: int) -> None:
    x, weight = inputs(2, 9)
    whole, end = short_convolution(x, weight)
    first, state = short_convolution(x[:, :cut], weight)
    second, last = short_convolution(x[:, cut:], weight, state)
    assert torch.allclose(torch.cat([first, second], 1), whole, rtol=0, atol=1e-14)
    assert torch.equal(last, end)


@pytest.mark.parametrize("with_state", [False, True])
def test_packed_is_separate(with_state: bool) -> None:
    lengths = [5, 0, 1, 2, 7]
    x, weight = inputs(1, sum(lengths))
    x.requires_grad_()
    states = torch.randn(5, 3, D, dtype=torch.float64) if with_state else None
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    y, last = short_convolution(x, weight, states, Sequences(cu_seqlens=offsets))
    (dx,) = torch.autograd.grad(y.square().sum() + last.square().sum(), x)
    for n, part in enumerate(x.detach().split(lengths, 1)):
        part = part.clone().requires_grad_()
        truth, end = short_convolution(part, weight, None if states is None else states[n : n + 1])
        start = int(offsets[n])
        assert torch.allclose(y[:, start : start + lengths[n]], truth, rtol=0, atol=1e-14)
        assert torch.allclose(last[n], end[0], rtol=0, atol=1e-14)
        if lengths[n]:
            (d,) = torch.autograd.grad(truth.square().sum() + end.square().sum(), part)
            assert torch.allclose(dx[:, start : start + lengths[n]], d, rtol=0, atol=1e-13)


def test_a_state_passes_what_is_not_there() -> None:
    x, weight = inputs(3, 6)
    lengths = torch.tensor([0, 2, 6])
    states = torch.randn(3, 3, D, dtype=torch.float64)
    _, last = short_convolution(x, weight, states, Sequences(lengths=lengths))
    assert torch.equal(last[0], states[0])
    for n in (1, 2):
        _, truth = short_convolution(x[n : n + 1, : lengths[n]], weight, states[n : n + 1])
        assert torch.equal(last[n], truth[0])


KERNEL_CASES = {
    "dense": (None, None),
    "packed": (torch.tensor([0, 5, 5, 6, 70, 139]), None),
    "aligned": (None, torch.tensor([40, 66])),
}


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("width", [*slow(2, 3), 4])
@pytest.mark.parametrize("case", KERNEL_CASES)
def test_kernels_are_torch(case: str, width: int, with_state: bool) -> None:
    """Outputs, states and gradients; on a GPU where there is one, else through Triton's interpreter."""
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    offsets, lengths = (None if x is None else x.to(device) for x in KERNEL_CASES[case])
    batch, tokens, channels = (1, 139, 70) if offsets is not None else (2, 66, 70)
    torch.manual_seed(0)
    wide = torch.randn(batch, tokens, channels + 9, device=device, requires_grad=True)
    weight = torch.randn(channels, width, device=device, requires_grad=True)
    state = torch.randn(5 if offsets is not None else 2, width - 1, channels, device=device) if with_state else None
    sequences = Sequences(cu_seqlens=offsets, lengths=lengths)
    cotangent = torch.randn(batch, tokens, channels, device=device)
    results = []
    for impl in ("reference", "triton"):
        y, last = short_convolution(wide[..., :channels], weight, state, sequences, impl=impl)
        results.append([y, last, *torch.autograd.grad(y, [wide, weight], cotangent)])
    for found, truth in zip(results[1], results[0], strict=True):
        assert relative_error(found, truth) < 1e-6


def test_opcheck() -> None:
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(20, 7, device=device, requires_grad=True)
    weight = torch.randn(7, 4, device=device, requires_grad=True)
    place, owner = torch.arange(20, device=device, dtype=torch.int32), torch.zeros(20, device=device, dtype=torch.int32)
    torch.library.opcheck(SHORT_CONVOLUTION, (x, weight, None, place, owner))


@pytest.mark.parametrize("offsets", [[-5, 9], [0, 20], [3, 9], [0, 7, 4, 9], [0, 3], [9, 0]])
def test_wrong_offsets_lead_nowhere_outside(offsets: list[int]) -> None:
    """Kernels read by these numbers before the op refuses the offsets: an earlier input of the same row, or one of the
    states there are."""
    sequences, x = Sequences(cu_seqlens=torch.tensor(offsets)), torch.zeros(1, 9, 4)
    places, owners = sequences.positions(x)[0], sequences.owners(x)
    assert ((places >= 0) & (places <= torch.arange(9))).all()
    assert ((owners >= 0) & (owners < len(offsets) - 1)).all()
