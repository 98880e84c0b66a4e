"""The implicit attention is the product of transitions it is defined by, and its sums are what the layers read."""

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from qed import RULES, erase_write
from qed.analysis import look
from qed.analysis.look import implicit_attention
from qed.testing import Case
from tests.strategies import cases
from tests.test_rules import drawn, projections


def written_out(q: Tensor, k: Tensor, a: Tensor, g: Tensor, scale: float) -> Tensor:
    """The definition, with whole matrices, for one head: [T, K] each → [T, T]."""
    tokens, width = q.shape
    eye = torch.eye(width, dtype=q.dtype)
    expected = torch.zeros(tokens, tokens, dtype=q.dtype)
    for s in range(tokens):
        product = eye
        for t in range(s, tokens):
            if t > s:
                product = (eye - torch.outer(k[t], a[t])) @ torch.diag(g[t].exp()) @ product
            expected[t, s] = scale * q[t] @ product @ k[s]
    return expected


def read(attention: Tensor, u: Tensor) -> Tensor:
    """Σ_s A[t, s] u_s: [B, H, T, T] and [B, T, H, V] → [B, T, H, V]."""
    return torch.einsum("bhts,bshv->bthv", attention, u)


@pytest.mark.parametrize("decay", ["none", "head", "channel"])
@pytest.mark.parametrize("columns", [1, 4, 256])
def test_it_is_the_product_of_the_transitions(decay: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "COLUMNS", columns)
    case = Case(batch=2, tokens=9, heads=2, key_width=5, decay=decay, strength=0.5)  # type: ignore[arg-type]
    q, k, a, g = (case.inputs()[name] for name in ("q", "k", "a", "g"))
    found = implicit_attention(q, k, a, g, scale=0.7)
    assert found.shape == (2, 2, 9, 9) and found.dtype == torch.float64
    full = torch.zeros_like(k) if g is None else g.expand_as(k)
    for i in range(2):
        for h in range(2):
            expected = written_out(*(x[i, :, h] for x in (q, k, a, full)), scale=0.7)
            assert torch.allclose(found[i, h], expected, rtol=0, atol=1e-12)


@settings(max_examples=30)
@given(case=cases())
def test_its_sums_are_the_outputs_of_the_op(case: Case) -> None:
    """Also with states that grow: then relative to what is summed."""
    q, k, a, u, g = (case.inputs()[name] for name in ("q", "k", "a", "u", "g"))
    attention = implicit_attention(q, k, a, g, scale=0.5)
    expected, _ = erase_write(q, k, a, u, g, scale=0.5, impl="reference")
    assert torch.equal(attention, attention.tril())  # no token reads a later one
    sizes = read(attention.abs(), u.abs()).clamp(min=1)
    assert float(((read(attention, u) - expected).abs() / sizes).max()) < 1e-10


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("seed", [0, 1])
def test_its_sums_are_the_outputs_of_every_rule(name: str, seed: int) -> None:
    """A token is read after its last sub-step; of EDA's two sub-steps the first writes nothing."""
    rule, x = RULES[name], projections(name, drawn(seed))
    q, k, a, u, g = rule.operands(x)
    attention = implicit_attention(q, k, a, g, scale=0.5)
    expected, _ = rule.attend(x, scale=0.5, impl="reference")
    n = rule.substeps
    by_substep = attention[:, :, n - 1 :: n]
    assert torch.allclose(read(by_substep, u), expected, rtol=0, atol=1e-10)
    assert torch.allclose(read(by_substep[..., n - 1 :: n], u[:, n - 1 :: n]), expected, rtol=0, atol=1e-10)


def test_what_is_not_a_sequence_is_refused() -> None:
    x = torch.randn(1, 6, 2, 4)
    with pytest.raises(ValueError, match=r"q: expected shape \[B, T, H, K\], got \[6, 2, 4\]"):
        implicit_attention(x[0], x[0], x[0])
    with pytest.raises(ValueError, match="k: expected q's shape"):
        implicit_attention(x, x[:, :5], x)
    assert implicit_attention(x[:, :0], x[:, :0], x[:, :0]).shape == (1, 2, 0, 0)
