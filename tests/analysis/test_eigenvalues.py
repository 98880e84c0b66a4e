"""The study's numbers are those of the transition matrices and states they are named after."""

import pytest
import torch

from qed import RULES, QEDConfig, QEDForCausalLM
from qed.analysis.eigenvalues import quantities, study
from qed.layers import Mixer
from qed.model.initialization import initialize

SIZES = {"hidden_size": 24, "num_heads": 2, "head_dim": 8}


def layer(rule: str) -> Mixer:
    torch.manual_seed(0)
    made = Mixer(**SIZES, value_head_dim=12, rule=rule)
    made.apply(lambda module: initialize(module, QEDConfig.tiny(initializer_range=0.5)))
    return made.double()


@pytest.mark.parametrize("rule", [x for x in RULES if RULES[x].substeps == 1])
def test_eigenvalues_are_the_matrices_own(rule: str) -> None:
    mixer, x = layer(rule), torch.randn(1, 30, 24, dtype=torch.float64)
    with torch.no_grad():
        found = quantities(mixer, x)
        operands = mixer.row.operands(mixer.projections(x))
    for t in range(30):
        k, a = operands.k[0, t, 1], operands.a[0, t, 1]
        # I − k aᵀ has one eigenvalue that need not be 1, and its trace is it plus K − 1 ones.
        trace = float(torch.trace(torch.eye(8, dtype=torch.float64) - torch.outer(k, a)))
        assert float(found["eigenvalue"][0, t, 1]) == pytest.approx(trace - 7, abs=1e-6)


@pytest.mark.parametrize("rule", ["qed", "gdn2"])
def test_the_read_outside_the_key_is_the_decayed_states(rule: str) -> None:
    """Eq. 10, with the state followed token by token."""
    mixer, x = layer(rule), torch.randn(1, 20, 24, dtype=torch.float64)
    with torch.no_grad():
        found = quantities(mixer, x)["outside"]
        q, k, a, u, g = (y[0, :, 0] for y in mixer.row.operands(mixer.projections(x)))
    S = torch.zeros(8, 12, dtype=torch.float64)
    for t in range(20):
        decayed = g[t].exp()[:, None] * S
        S = decayed - torch.outer(k[t], a[t] @ decayed) + torch.outer(k[t], u[t])
        across = q[t] - k[t] * (k[t] @ q[t])
        outside, whole = across @ decayed, q[t] @ S
        share = outside.norm() / (outside.norm() + (whole - outside).norm())
        assert float(found[0, t, 0]) == pytest.approx(float(share), abs=1e-5)


def test_projection_leaves_nothing_to_change() -> None:
    x = torch.randn(1, 40, 24, dtype=torch.float64)
    with torch.no_grad():
        projected, free = (quantities(layer(rule), x)["change"] for rule in ("qed", "qed-nogate-noproj"))
        rho = quantities(layer("qed-nogate-noproj"), x)["rho"]
        strength = layer("qed-nogate-noproj").strength()
    assert float(projected.max()) < 1e-6  # k is a unit vector but for its epsilon
    assert torch.allclose(free.double(), (strength * rho).abs(), atol=1e-5)
    assert "change" not in quantities(layer("gdn2"), x)


def test_a_rule_of_two_steps_is_read_once() -> None:
    with torch.no_grad():
        found = quantities(layer("eda"), torch.randn(1, 20, 24, dtype=torch.float64))
    assert found["eigenvalue"].shape == (1, 40, 2)
    assert found["outside"].shape == found["rho"].shape == (1, 20, 2)
    assert (found["rho"] != 0).all()


def test_by_layer() -> None:
    model = QEDForCausalLM(QEDConfig.tiny(num_hidden_layers=3, layer_types=["qed", "full_attention", "gdn2"])).eval()
    found = study(model, torch.randint(256, (1, 33)))
    assert found.keys() == {0, 2}
    assert found[0]["eigenvalue"].shape == (1, 33, model.config.num_heads)
