"""What theory says of one layer, as a theorem about the transitions of the rules' own rows; how capacity is read."""

import numpy as np
import pytest
import torch

from qed.analysis.capacity import crossing
from qed.analysis.tracking import forbidden, order
from qed.data.groups import GROUPS
from qed.rules import RULES, Projections, l2_normalize

STRICT = ("linear", "deltanet", "gdn", "kda", "gdn2")


def transitions(rule: str, erase_max: float, tokens: int = 400, width: int = 6) -> np.ndarray:
    """A = (I − k aᵀ) Diag(α) of random tokens, [tokens, K, K], made by the rule's own row."""
    torch.manual_seed(0)
    row = RULES[rule]

    def draw(wanted: str, most: float = 1.0) -> torch.Tensor | None:
        sizes = {"none": None, "head": 1, "channel": width}[wanted]
        return None if sizes is None else most * torch.rand(1, tokens, 1, sizes, dtype=torch.float64)

    q, k, v = (l2_normalize(torch.randn(1, tokens, 1, width, dtype=torch.float64), 0.0) for _ in range(3))
    decay = draw(row.decay)
    x = Projections(q=q, k=k, v=v, g=None if decay is None else decay.log(), b=draw(row.erase, erase_max))
    x = x._replace(w=draw(row.write), strength=0.25 if row.strength else None)
    x = x._replace(direction=torch.randn(1, width, dtype=torch.float64) if row.direction == "head" else None)
    operands = row.operands(x)
    k, a = (t[0, :, 0].numpy() for t in (operands.k, operands.a))
    alpha = np.ones_like(k) if operands.g is None else np.broadcast_to(operands.g[0, :, 0].exp().numpy(), k.shape)
    return (np.eye(width) - k[:, :, None] * a[:, None, :]) * alpha[:, None, :]


@pytest.mark.parametrize("rule", STRICT)
def test_eigenvalues_are_real_and_negative_only_with_a_wide_gate(rule: str) -> None:
    narrow = np.linalg.eigvals(transitions(rule, 1.0))
    assert np.abs(narrow.imag).max() < 1e-6
    assert narrow.real.min() > -1e-6
    if RULES[rule].erase != "none":
        wide = np.linalg.eigvals(transitions(rule, 2.0))
        assert np.abs(wide.imag).max() < 1e-6
        assert wide.real.min() < -0.5


@pytest.mark.parametrize("rule", ["qed", "qed-nogate", "qed-rand"])
def test_a_second_direction_has_complex_eigenvalues(rule: str) -> None:
    assert np.abs(np.linalg.eigvals(transitions(rule, 2.0)).imag).max() > 0.01
    assert forbidden(rule, "z2") is None


def test_what_theory_forbids() -> None:
    assert {group: order(group) for group in GROUPS} == {
        **{"z2": 2, "z3": 3, "z5": 5, "s3": 3, "s4": 4, "a5": 5, "s5": 5},
        **{"s3_swaps": 2, "s5_swaps": 2},
    }
    for rule in STRICT:
        assert all(forbidden(rule, group) == "no eigenvalue is negative" for group in GROUPS)
    for rule in STRICT[1:]:
        free = {group for group in GROUPS if forbidden(f"{rule}+erase2", group) is None}
        assert free == {"z2", "s3_swaps", "s5_swaps"}
    assert all(forbidden(f"{rule}+erase2", "s5") is None for rule in RULES if rule not in STRICT)


@pytest.mark.parametrize(
    ("shares", "octaves", "cut"),
    [
        ([1.0, 1.0, 0.95, 0.85], 4.5, 0),
        ([1.0, 0.8, 1.0, 0.0], 2.5, 0),  # the first time counts
        ([0.5, 0.4, 0.3, 0.2], 2.0, -1),
        ([1.0, 1.0, 0.9, 0.9], 5.0, 1),
    ],
)
def test_capacity_is_where_ninety_per_cent_are_crossed(shares: list[float], octaves: float, cut: int) -> None:
    found = crossing(list(zip((2.0, 3.0, 4.0, 5.0), shares, strict=True)))
    assert found.octaves == pytest.approx(octaves)
    assert found.cut == cut
