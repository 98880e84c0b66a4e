"""The implicit attention is the product of transitions it is defined by, and its sums are what the layers read."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from qed import RULES, QEDConfig, QEDForCausalLM, erase_write
from qed.analysis import look
from qed.analysis.look import implicit_attention, look_at, look_inside
from qed.layers import Mixer
from qed.model.inspection import mixer_inputs
from qed.ops import reference
from qed.rules import Operands, Projections, eda
from qed.testing import Case
from tests.analysis.test_eigenvalues import layer
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
    assert found.shape == (2, 2, 9, 9)
    assert found.dtype == torch.float64
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
    assert look_at(layer("qed"), torch.randn(1, 0, 24, dtype=torch.float64)).attention.shape == (1, 2, 0, 0)


def outputs(mixer: Mixer, x: Tensor) -> Tensor:
    """o [B, T, H, V] as the layer itself hands it to its norm."""
    seen: list[Tensor] = []
    hook = mixer.o_norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        mixer(x)
    hook.remove()
    return seen[0]


@pytest.mark.parametrize("rule", RULES)
def test_a_look_sums_to_what_the_layer_reads(rule: str) -> None:
    mixer, x = layer(rule), torch.randn(2, 21, 24, dtype=torch.float64)
    mixer.read_scale = 0.3
    found = look_at(mixer, x)
    assert found.attention.shape == (2, 2, 21, 21)
    assert torch.allclose(read(found.attention, found.writes), outputs(mixer, x), rtol=0, atol=1e-10)


@pytest.mark.parametrize("rule", RULES)
def test_without_the_correction_it_is_gdn2_on_the_same_activations(rule: str) -> None:
    mixer, x = layer(rule), torch.randn(2, 21, 24, dtype=torch.float64)
    found = look_at(mixer, x)
    if not RULES[rule].strength:
        assert found.without_correction is None
        assert found.forgotten is None
        return
    with torch.no_grad():
        same = mixer.projections(x)._replace(strength=None, direction=None)
        q, k, a, u, g = RULES["gdn2"].operands(same)
    assert found.without_correction is not None
    assert found.forgotten is not None
    assert torch.equal(found.without_correction, implicit_attention(q, k, a, g))
    assert torch.equal(found.writes, u)
    lost = erase_write(q, k, a, u, g)[0] - outputs(mixer, x)
    assert torch.allclose(read(found.forgotten, found.writes), lost, rtol=0, atol=1e-10)
    assert float(lost.abs().max()) > 1e-3
    mixer.strength_scale = 0.0
    assert not look_at(mixer, x).forgotten.any()  # type: ignore[union-attr]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("states", [256, 5])
def test_the_norms_are_those_of_the_loops_states(rule: str, states: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After every token, or of a long text after every few and after the last; EDA's after a token's last sub-step."""
    monkeypatch.setattr(look, "STATES", states)
    mixer, x = layer(rule), torch.randn(2, 21, 24, dtype=torch.float64)
    found = look_at(mixer, x)
    with torch.no_grad():
        operands = mixer.row.operands(mixer.projections(x))
    q, k, a, u = operands[:4]
    g = torch.zeros_like(k[..., :1]) if operands.g is None else operands.g
    state, expected = torch.zeros(2, 2, 8, 12, dtype=torch.float64), []
    for t in range(q.shape[1]):
        state = reference.step(q[:, t], k[:, t], a[:, t], u[:, t], g[:, t], state, 1.0)[1]
        expected.append(state.norm(dim=-1))
    by_token = torch.stack(expected, 1)[:, mixer.row.substeps - 1 :: mixer.row.substeps]
    ends = [min(n, 21) - 1 for n in range(found.stride, 21 + found.stride, found.stride)]
    assert found.stride == (1 if states == 256 else 5)
    assert ends[-1] == 20
    assert torch.allclose(found.state, by_token[:, ends], rtol=0, atol=1e-12)


@pytest.mark.parametrize("rule", [name for name in RULES if RULES[name].strength])
def test_the_share_of_the_correction_is_its_definition(rule: str) -> None:
    mixer, x = layer(rule), torch.randn(2, 21, 24, dtype=torch.float64)
    found = look_at(mixer, x)
    row = mixer.row
    with torch.no_grad():
        p = mixer.projections(x)
        source = p.q if p.direction is None else p.direction
        d = p.b * source if row.gate else source.expand_as(p.k)
        d = d - p.k * (p.k * d).sum(-1, keepdim=True) if row.project else d
        strength = mixer.strength()[:, None]
        a = p.b * p.k + strength * d
        expected = (strength * d).norm(dim=-1) / a.norm(dim=-1)
    assert found.correction is not None
    assert torch.allclose(found.correction, expected, rtol=0, atol=1e-12)
    assert found.strength is not None
    assert torch.equal(found.strength, strength[:, 0])


@pytest.mark.parametrize("rule", RULES)
def test_gates_are_those_that_the_rule_takes(rule: str) -> None:
    mixer, x = layer(rule), torch.randn(2, 21, 24, dtype=torch.float64)
    found, row = look_at(mixer, x), RULES[rule]
    wanted = {"b": row.erase, "w": row.write, "decay": row.decay}
    assert found.gates.keys() == {name for name, width in wanted.items() if width != "none"}
    with torch.no_grad():
        p = mixer.projections(x)
    for name, gate in found.gates.items():
        expected = p.g.exp() if name == "decay" else getattr(p, name)
        assert torch.equal(gate, expected)
    assert (found.correction is None) == (found.strength is None) == (found.change is None) == (not row.strength)


def test_the_change_is_relative_to_what_would_be_read() -> None:
    found = look_at(layer("qed"), torch.randn(2, 21, 24, dtype=torch.float64))
    assert found.change is not None
    assert found.without_correction is not None
    with_, without = found.attention, found.without_correction
    for i in range(2):
        for h in range(2):
            expected = float((without[i, h] - with_[i, h]).abs().sum() / without[i, h].abs().sum())
            assert float(found.change[i, h]) == pytest.approx(expected, rel=1e-12)
            assert expected > 1e-3


def test_nothing_is_forgotten_before_there_is_a_past() -> None:
    """Token t's correction erases what was stored before it, and never what it writes itself."""
    forgotten = look_at(layer("qed"), torch.randn(1, 21, 24, dtype=torch.float64)).forgotten
    assert forgotten is not None
    assert not forgotten.triu().any()


def test_every_recurrent_layer_of_a_model() -> None:
    kinds = ["qed", "full_attention", "gdn2", "eda"]
    model = QEDForCausalLM(QEDConfig.tiny(num_hidden_layers=4, layer_types=kinds)).eval()
    ids = torch.randint(256, (1, 33))
    found, inputs = dict(look_inside(model, ids)), mixer_inputs(model, ids)
    assert found.keys() == {0, 2, 3}
    assert [i for i, x in found.items() if x.forgotten is not None] == [0]
    for i, x in found.items():
        assert torch.allclose(read(x.attention, x.writes), outputs(*inputs[i]), atol=1e-5)
    with pytest.raises(ValueError, match="model: expected one with recurrent layers, got none"):
        look_inside(QEDForCausalLM(QEDConfig.tiny(layer_types=["full_attention"] * 2)), ids)


def test_a_model_of_16_bits_is_looked_at_in_32() -> None:
    model = QEDForCausalLM(QEDConfig.tiny()).to(torch.bfloat16).eval()
    ((_, found), *_) = look_inside(model, torch.randint(256, (1, 9)))
    assert found.forgotten is not None
    assert found.attention.dtype == found.forgotten.dtype == found.writes.dtype == torch.float32


def test_a_rule_that_writes_in_an_earlier_substep_is_refused() -> None:
    """Its tokens have two write vectors each, so that no map between tokens is exact."""

    def writing_twice(x: Projections) -> Operands:
        operands = eda(x)
        return operands._replace(u=torch.ones_like(operands.u))

    mixer = layer("eda")
    mixer.row = replace(mixer.row, function=writing_twice)
    with pytest.raises(ValueError, match="expected one that writes in a token's last sub-step alone, got 'eda'"):
        look_at(mixer, torch.randn(1, 5, 24, dtype=torch.float64))
