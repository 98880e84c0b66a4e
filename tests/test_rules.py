"""The table of rules against the paper: its equations by number, the reduction ladder, and bad input."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qed import RULES, qed_attention
from qed.rules import Projections, l2_normalize, orthogonal
from qed.testing import relative_error
from tests.strategies import SCALES

B, T, H, K, V = 2, 37, 3, 8, 5
NAMES = ["linear", "deltanet", "gdn", "kda", "gdn2", "qed", "qed-nogate", "qed-nogate-noproj", "qed-rand", "eda"]
IMPLS = ("reference", "chunkwise")
seeds = st.integers(0, 2**16)


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def drawn(seed: int) -> dict[str, Tensor]:
    """Every projection any rule may ask for, in float64."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=random)

    return {
        "q": unit(normal(B, T, H, K)),
        "k": unit(normal(B, T, H, K)),
        "v": normal(B, T, H, V),
        "g": -normal(B, T, H, K).abs(),
        "b": normal(B, T, H, K).sigmoid(),
        "w": normal(B, T, H, V).sigmoid(),
        "g_head": -normal(B, T, H, 1).abs(),
        "beta": normal(B, T, H, 1).sigmoid(),
        "gamma": normal(B, T, H, 1).sigmoid(),
        "strength": 0.25 * normal(H).sigmoid(),
        "fixed": unit(normal(H, K)),
        "e": unit(normal(B, T, H, K)),
        "state": normal(B, H, K, V),
    }


def projections(name: str, x: dict[str, Tensor]) -> Projections:
    """Those that the row of `name` declares."""
    rule = RULES[name]
    return Projections(
        *(x["q"], x["k"], x["v"]),
        g={"none": None, "head": x["g_head"], "channel": x["g"]}[rule.decay],
        b={"none": None, "head": x["beta"], "channel": x["b"]}[rule.erase],
        w={"none": None, "head": x["gamma"], "channel": x["w"]}[rule.write],
        strength=x["strength"] if rule.strength else None,
        direction={"none": None, "head": x["fixed"], "token": x["e"]}[rule.direction],
    )


def by_hand(transition: Callable[[int], tuple[Tensor, Tensor]], x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """S_t = M_t S_{t−1} + N_t and o_t = S_tᵀ q_t with whole matrices, straight from the paper."""
    state, outputs = x["state"], []
    for t in range(T):
        m, n = transition(t)
        state = m @ state + n
        outputs.append((x["q"][:, t, :, None] @ state).squeeze(-2))
    return torch.stack(outputs, 1), state


def outer(x: Tensor, y: Tensor) -> Tensor:
    return x.unsqueeze(-1) * y.unsqueeze(-2)


EYE = torch.eye(K, dtype=torch.float64)
Row = Callable[[dict[str, Tensor], int], tuple[Tensor, Tensor]]


def at(x: dict[str, Tensor], t: int, *names: str) -> list[Tensor]:
    return [x[name][:, t] for name in names]


def linear_attention(x: dict[str, Tensor], t: int) -> tuple[Tensor, Tensor]:
    k, v = at(x, t, "k", "v")
    return EYE.expand(B, H, K, K), outer(k, v)


def eq_1_deltanet(x: dict[str, Tensor], t: int) -> tuple[Tensor, Tensor]:
    k, v, beta = at(x, t, "k", "v", "beta")
    return EYE - beta[..., None] * outer(k, k), beta[..., None] * outer(k, v)


def eq_2_gdn(x: dict[str, Tensor], t: int) -> tuple[Tensor, Tensor]:
    k, v, beta, g = at(x, t, "k", "v", "beta", "g_head")
    return g.exp()[..., None] * (EYE - beta[..., None] * outer(k, k)), beta[..., None] * outer(k, v)


def eq_3_kda(x: dict[str, Tensor], t: int) -> tuple[Tensor, Tensor]:
    k, v, beta, g = at(x, t, "k", "v", "beta", "g")
    return (EYE - beta[..., None] * outer(k, k)) @ torch.diag_embed(g.exp()), beta[..., None] * outer(k, v)


def eq_4_with(erase: Callable[..., Tensor]) -> Row:
    """Eq. 4 with the erase vector of an arm of table 1."""

    def transition(x: dict[str, Tensor], t: int) -> tuple[Tensor, Tensor]:
        q, k, v, b, w, g = at(x, t, "q", "k", "v", "b", "w", "g")
        a = erase(q=q, k=k, b=b, r=x["fixed"], strength=x["strength"][:, None])
        return (EYE - outer(k, a)) @ torch.diag_embed(g.exp()), outer(k, w * v)

    return transition


def p_perp(k: Tensor, x: Tensor) -> Tensor:
    return ((EYE - outer(k, k)) @ x.unsqueeze(-1)).squeeze(-1)


def eda(x: dict[str, Tensor], t: int) -> tuple[Tensor, Tensor]:
    k, v, e, erase, write, g = at(x, t, "k", "v", "e", "beta", "gamma", "g")
    first = (EYE - erase[..., None] * outer(e, e)) @ torch.diag_embed(g.exp())
    return (EYE - write[..., None] * outer(k, k)) @ first, write[..., None] * outer(k, v)


PAPER: dict[str, Row] = {
    "linear": linear_attention,
    "deltanet": eq_1_deltanet,
    "gdn": eq_2_gdn,
    "kda": eq_3_kda,
    "gdn2": eq_4_with(lambda k, b, **_: b * k),
    "qed": eq_4_with(lambda q, k, b, strength, **_: b * k + strength * p_perp(k, b * q)),
    "qed-nogate": eq_4_with(lambda q, k, b, strength, **_: b * k + strength * p_perp(k, q)),
    "qed-nogate-noproj": eq_4_with(lambda q, k, b, strength, **_: b * k + strength * q),
    "qed-rand": eq_4_with(lambda k, b, r, strength, **_: b * k + strength * p_perp(k, b * r)),
    "eda": eda,
}


def test_the_table_has_the_published_names() -> None:
    assert list(RULES) == NAMES == list(PAPER)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", NAMES)
def test_eqs_1_to_6_every_rule_is_the_papers_matrix_recurrence(name: str, impl: str) -> None:
    x = drawn(1)
    expected = by_hand(lambda t: PAPER[name](x, t), x)
    found = RULES[name].attend(projections(name, x), initial_state=x["state"], impl=impl)
    for actual, truth in zip(found, expected, strict=True):
        assert relative_error(actual, truth) < 1e-13


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", NAMES)
def test_decoding_every_rule_token_by_token_equals_one_pass(name: str, impl: str) -> None:
    x = projections(name, drawn(2))
    state, outputs = drawn(2)["state"], []
    whole, end = RULES[name].attend(x, initial_state=state, impl=impl)
    for t in range(T):
        token = Projections(*(y[:, t : t + 1] if isinstance(y, Tensor) and y.dim() == 4 else y for y in x))
        o, state = RULES[name].attend_step(token, state=state, impl=impl)
        outputs.append(o)
    assert relative_error(torch.cat(outputs, 1), whole) < 1e-12
    assert relative_error(state, end) < 1e-12


@pytest.mark.parametrize("name", NAMES)
def test_packed_sequences_are_separate_for_every_rule(name: str) -> None:
    x = Projections(*(y[:1] if isinstance(y, Tensor) and y.dim() == 4 else y for y in projections(name, drawn(3))))
    o, states = RULES[name].attend(x, cu_seqlens=torch.tensor([0, 11, T]))
    for n, cut in enumerate((slice(0, 11), slice(11, T))):
        alone = Projections(*(y[:, cut] if isinstance(y, Tensor) and y.dim() == 4 else y for y in x))
        o_alone, state = RULES[name].attend(alone)
        assert relative_error(o[:, cut], o_alone) < 1e-13
        assert relative_error(states[n], state[0]) < 1e-13


# ---- the reduction ladder: QED ⊃ GDN-2 ⊃ KDA ⊃ GDN ⊃ DeltaNet ⊃ linear attention


def same(left: tuple[str, dict[str, Any]], right: tuple[str, dict[str, Any]], x: dict[str, Tensor]) -> None:
    """Two rules give the same outputs and final state, and to the projections they share the same gradients."""
    results = []
    for name, changes in (left, right):
        shared = {n: x[n].clone().requires_grad_() for n in ("q", "k", "v")}
        given = projections(name, x | shared)._replace(**changes)
        o, state = RULES[name].attend(given, initial_state=x["state"])
        results.append((o, state, *torch.autograd.grad(o.sin().sum() + state.cos().sum(), list(shared.values()))))
    for found, expected in zip(*results, strict=True):
        assert relative_error(found, expected) < 1e-12


@given(seed=seeds)
def test_qed_without_strength_is_gdn2(seed: int) -> None:
    for name in ("qed", "qed-nogate", "qed-nogate-noproj", "qed-rand"):
        same((name, {"strength": 0.0}), ("gdn2", {}), drawn(seed))


@given(seed=seeds)
def test_gdn2_with_one_scalar_gate_is_kda(seed: int) -> None:
    x = drawn(seed)
    same(("gdn2", {"b": x["beta"].expand(B, T, H, K), "w": x["beta"].expand(B, T, H, V)}), ("kda", {}), x)


@given(seed=seeds)
def test_kda_with_one_decay_per_head_is_gdn(seed: int) -> None:
    x = drawn(seed)
    same(("kda", {"g": x["g_head"].expand(B, T, H, K)}), ("gdn", {}), x)


@given(seed=seeds)
def test_gdn_without_decay_is_deltanet(seed: int) -> None:
    x = drawn(seed)
    same(("gdn", {"g": torch.zeros_like(x["g_head"])}), ("deltanet", {}), x)


@given(seed=seeds)
def test_gdn2_that_erases_nothing_and_forgets_nothing_is_linear_attention(seed: int) -> None:
    x = drawn(seed)
    nothing = {"g": torch.zeros_like(x["g"]), "b": torch.zeros_like(x["b"]), "w": torch.ones_like(x["w"])}
    same(("gdn2", nothing), ("linear", {}), x)


@given(seed=seeds)
def test_eda_with_nothing_to_erase_is_kda(seed: int) -> None:
    x = drawn(seed)
    same(("eda", {"b": torch.zeros_like(x["beta"])}), ("kda", {"b": x["gamma"]}), x)


# ---- the paper's identities, for one token and any decayed state S̄ (eq. 7)


def one_token(seed: int) -> dict[str, Tensor]:
    x = {n: y[:, 0] if y.dim() == 4 and n != "state" else y for n, y in drawn(seed).items()}
    return x | {"S_bar": x["g"].exp().unsqueeze(-1) * x["state"]}


def updated(name: str, seed: int, strength: Tensor | float | None = None) -> tuple[Tensor, Tensor]:
    """(o_t, S_t) of a rule after its first token."""
    x = drawn(seed)
    token = {n: y[:, :1] if y.dim() == 4 and n != "state" else y for n, y in x.items()}
    given = projections(name, token)
    o, state = RULES[name].attend(
        given if strength is None else given._replace(strength=strength), initial_state=x["state"]
    )
    return o[:, 0], state


def read(state: Tensor, x: Tensor) -> Tensor:
    return (x.unsqueeze(-2) @ state).squeeze(-2)


@given(seed=seeds)
def test_eq_8_gdn2_is_a_residual_step_at_the_key(seed: int) -> None:
    x = one_token(seed)
    residual = x["w"] * x["v"] - read(x["S_bar"], x["b"] * x["k"])
    assert relative_error(updated("gdn2", seed)[1], x["S_bar"] + outer(x["k"], residual)) < 1e-13


@given(seed=seeds)
def test_eq_9_probe_response(seed: int) -> None:
    x = one_token(seed)
    _, state = updated("gdn2", seed)
    probe = torch.randn(B, H, K, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    residual = x["w"] * x["v"] - read(x["S_bar"], x["b"] * x["k"])
    change = read(state, probe) - read(x["S_bar"], probe)
    assert relative_error(change, (probe * x["k"]).sum(-1, keepdim=True) * residual) < 1e-12
    hidden = orthogonal(probe, x["k"])  # a probe orthogonal to the key sees no edit at all
    assert (read(state, hidden) - read(x["S_bar"], hidden)).abs().max() < 1e-13


@given(seed=seeds)
def test_eq_10_read_decomposition(seed: int) -> None:
    x = one_token(seed)
    rho = (x["q"] * x["k"]).sum(-1, keepdim=True)
    o, _ = updated("gdn2", seed)
    editable = rho * (x["w"] * x["v"] + read(x["S_bar"], (1 - x["b"]) * x["k"]))
    assert relative_error(o, editable + read(x["S_bar"], orthogonal(x["q"], x["k"]))) < 1e-13


@given(seed=seeds)
def test_eq_11_qed_state_difference(seed: int) -> None:
    x = one_token(seed)
    d = orthogonal(x["b"] * x["q"], x["k"])
    difference = -x["strength"][:, None, None] * outer(x["k"], read(x["S_bar"], d))
    assert relative_error(updated("qed", seed)[1], updated("gdn2", seed)[1] + difference) < 1e-13


@given(seed=seeds)
def test_eq_12_qed_read_difference(seed: int) -> None:
    x = one_token(seed)
    rho, d = (x["q"] * x["k"]).sum(-1, keepdim=True), orthogonal(x["b"] * x["q"], x["k"])
    difference = -x["strength"][:, None] * rho * read(x["S_bar"], d)
    assert relative_error(updated("qed", seed)[0] - updated("gdn2", seed)[0], difference) < 1e-10


@given(seed=seeds, s=st.sampled_from(SCALES))
def test_eq_15_the_read_is_linear_in_s_for_a_fixed_incoming_state(seed: int, s: float) -> None:
    x = one_token(seed)
    rho, d = (x["q"] * x["k"]).sum(-1, keepdim=True), orthogonal(x["b"] * x["q"], x["k"])
    o_s, o_0 = (updated("qed", seed, scale * x["strength"])[0] for scale in (s, 0.0))
    assert relative_error(o_s, o_0 - s * x["strength"][:, None] * rho * read(x["S_bar"], d)) < 1e-13


@given(seed=seeds, s=st.sampled_from(SCALES))
def test_the_projected_correction_leaves_the_eigenvalue_unchanged(seed: int, s: float) -> None:
    """The nontrivial eigenvalue of I − k aᵀ is 1 − aᵀk: GDN-2's for every projected arm and every s, not without."""
    x = drawn(seed)

    def eigenvalue(name: str) -> Tensor:
        given = projections(name, x)
        if given.strength is not None:
            given = given._replace(strength=s * x["strength"])
        operands = RULES[name].operands(given)
        return 1 - (operands.a * operands.k).sum(-1)

    baseline = eigenvalue("gdn2")
    for name in ("qed", "qed-nogate", "qed-rand"):
        assert (eigenvalue(name) - baseline).abs().max() < 1e-14
    drift = s * x["strength"] * (x["q"] * x["k"]).sum(-1)
    assert (baseline - eigenvalue("qed-nogate-noproj") - drift).abs().max() < 1e-14


def test_the_eigenvalue_is_that_of_the_matrix() -> None:
    operands = RULES["qed-nogate-noproj"].operands(projections("qed-nogate-noproj", drawn(5)))
    k, a = operands.k[0, 0, 0], operands.a[0, 0, 0]
    eigenvalues = torch.linalg.eigvals(EYE - outer(k, a)).real.sort().values
    assert torch.allclose(eigenvalues, torch.tensor([*[1.0] * (K - 1), float(1 - a @ k)]).double().sort().values)


# ---- the operator in one call


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qed", {}),
        ("qed-nogate", {"gate": False}),
        ("qed-nogate-noproj", {"gate": False, "project": False}),
        ("qed-rand", {"direction": drawn(6)["fixed"]}),
    ],
)
def test_qed_attention_is_every_arm_in_one_call(name: str, options: dict[str, Any]) -> None:
    x = drawn(6)
    expected = RULES[name].attend(projections(name, x), scale=0.5, initial_state=x["state"])
    names = ("q", "k", "v", "g", "b", "w", "strength")
    found = qed_attention(*(x[n] for n in names), normalize_qk=False, scale=0.5, initial_state=x["state"], **options)
    for actual, truth in zip(found, expected, strict=True):
        assert torch.equal(actual, truth)


def test_qed_attention_normalizes_queries_and_keys() -> None:
    x = drawn(7)
    names = ("v", "g", "b", "w", "strength")
    scaled = qed_attention(300 * x["q"], 50 * x["k"], *(x[n] for n in names))
    unscaled = qed_attention(x["q"], x["k"], *(x[n] for n in names), normalize_qk=False)
    for actual, truth in zip(scaled, unscaled, strict=True):
        assert relative_error(actual, truth) < 1e-8


def test_l2_normalize_is_smooth_at_zero() -> None:
    x = torch.zeros(3, 4, requires_grad=True)
    y = l2_normalize(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert (y == 0).all()
    assert gradient.isfinite().all()


def test_a_number_and_a_tensor_of_one_number_per_head_are_the_same_strength() -> None:
    x = drawn(8)
    names = ("q", "k", "v", "g", "b", "w")
    number = qed_attention(*(x[n] for n in names), 0.2)[0]
    tensor = qed_attention(*(x[n] for n in names), torch.full((H,), 0.2, dtype=torch.float64))[0]
    assert relative_error(number, tensor) < 1e-15


def test_low_precision_projections_stay_low_precision() -> None:
    x = {name: y if name in ("g", "strength", "state") else y.bfloat16() for name, y in drawn(9).items()}
    x |= {name: x[name].float() for name in ("g", "strength", "state")}
    o, state = RULES["qed"].attend(projections("qed", x), initial_state=x["state"])
    assert (o.dtype, state.dtype) == (torch.bfloat16, torch.float32)


# ---- bad input


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gdn2", {"w": None}, r"w: expected \[2, 37, 3, 5\], got nothing"),
        ("gdn2", {"strength": 0.1}, r"strength: expected nothing \(the rule does not use it\), got \[\]"),
        ("linear", {"g": torch.zeros(B, T, H, 1)}, r"g: expected nothing \(the rule does not use it\)"),
        ("gdn", {"g": torch.zeros(B, T, H, K)}, r"g: expected \[2, 37, 3, 1\], got \[2, 37, 3, 8\]"),
        ("kda", {"g": torch.zeros(B, T, H, 1)}, r"g: expected \[2, 37, 3, 8\], got \[2, 37, 3, 1\]"),
        ("qed", {"b": torch.zeros(B, T, H, 1)}, r"b: expected \[2, 37, 3, 8\], got \[2, 37, 3, 1\]"),
        ("qed", {"strength": torch.zeros(H + 1)}, r"strength: expected \[3\] or \[\], got \[4\]"),
        ("qed-rand", {"direction": torch.zeros(K)}, r"direction: expected \[3, 8\], got \[8\]"),
        ("eda", {"direction": None}, r"direction: expected \[2, 37, 3, 8\], got nothing"),
        ("qed", {"v": torch.zeros(B, T, V)}, r"q, k, v: expected"),
    ],
)
def test_wrong_projections_are_named(name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RULES[name].attend(projections(name, drawn(0))._replace(**change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"b": torch.zeros(B, T, H, 1)}, r"b: expected \[2, 37, 3, 8\], got \[2, 37, 3, 1\]"),
        ({"w": torch.zeros(B, T, H, K)}, r"w: expected \[2, 37, 3, 5\], got \[2, 37, 3, 8\]"),
        ({"k": torch.zeros(B, T, 1, K)}, r"q, k: expected \[B, T, H, K\] both"),
        ({"direction": torch.zeros(1, K)}, r"direction: expected \[3, 8\], got \[1, 8\]"),
        ({"strength": torch.zeros(B, T, H)}, r"strength: expected \[3\] or \[\], got \[2, 37, 3\]"),
    ],
)
def test_wrong_arguments_of_qed_attention_are_named(change: dict[str, Any], message: str) -> None:
    x = drawn(0)
    given = {n: x[n] for n in ("q", "k", "v", "g", "b", "w", "strength")}
    with pytest.raises(ValueError, match=message):
        qed_attention(**(given | change))


def test_decoding_takes_one_token() -> None:
    x = drawn(0)
    with pytest.raises(ValueError, match=r"q: expected one token, \[B, 1, H, K\], got \[2, 37, 3, 8\]"):
        RULES["gdn2"].attend_step(projections("gdn2", x), state=x["state"])


@given(seed=seeds)
def test_with_one_gate_a_head_no_step_lengthens_a_vector(seed: int) -> None:
    x = drawn(seed)
    for name in ("deltanet", "gdn", "kda"):
        operands = RULES[name].operands(projections(name, x))
        steps = EYE - operands.k[..., :, None] * operands.a[..., None, :]
        assert torch.linalg.matrix_norm(steps, ord=2).max() < 1 + 1e-12


@pytest.mark.parametrize(("strength", "growth"), [(0.0, 1.2466), (0.25, 1.4413)])
def test_with_a_gate_for_each_channel_two_tokens_by_turns_let_a_state_grow(strength: float, growth: float) -> None:
    """GDN-2 and QED: `docs/design/algebra.md` has the same by hand."""
    turns = 100
    k = torch.tensor([[0.2, 0.8], [0.8, 0.2]]).double().sqrt().repeat(turns, 1)[None, :, None]
    b = torch.eye(2).double().repeat(turns, 1)[None, :, None]
    nothing, state = torch.zeros_like(k), torch.ones(1, 1, 2, 2).double()
    for _ in range(2):
        before = state
        _, state = qed_attention(b, k, nothing, nothing, b, nothing, strength=strength, initial_state=before)
    assert float(state.norm() / before.norm()) ** (1 / turns) == pytest.approx(growth, abs=1e-4)
