"""One layer for every rule: cut anywhere, packed and padded it gives what each sequence gives alone."""

import pytest
import torch

from qed import RULES
from qed.layers import Attention, Mixer, Sequences
from qed.model.config import QEDConfig
from qed.model.initialization import initialize

SIZES = {"hidden_size": 24, "num_heads": 2, "head_dim": 8}
LAYERS = [*RULES, "full_attention", "sliding_attention"]


def layer(name: str, **options: object) -> torch.nn.Module:
    torch.manual_seed(0)
    if name in RULES:
        made: torch.nn.Module = Mixer(**SIZES, value_head_dim=12, rule=name, **options)
    else:
        made = Attention(**SIZES, window=4 if name == "sliding_attention" else None)
    for module in made.modules():
        initialize(module, QEDConfig.tiny(theta_init=1.0, initializer_range=0.3))
    return made.double()


def tokens(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def project(mixer: Mixer, x: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
    """What comes after the recurrence: the norm with its gate, and the matrix back to the residual stream."""
    gate = mixer.in_proj(x).split(list(mixer.parts.values()), -1)[list(mixer.parts).index("output_gate")]
    heads = mixer.g_proj(gate).unflatten(-1, (mixer.num_heads, -1))
    return mixer.o_proj(mixer.o_norm(read, heads).flatten(-2))


@pytest.mark.parametrize("name", LAYERS)
def test_split_anywhere_is_whole(name: str) -> None:
    mixer, x = layer(name), tokens(2, 13)
    whole, end = mixer(x)
    state, parts = None, []
    for part in x.split([5, 1, 1, 2, 4], 1):
        y, state = mixer(part, state)
        parts.append(y)
    assert torch.allclose(torch.cat(parts, 1), whole, rtol=0, atol=1e-12)
    for found, truth in zip(state, end, strict=True):
        assert torch.allclose(found.double(), truth.double(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", [name for name, row in RULES.items() if row.erase != "none"])
def test_an_erase_gate_up_to_two_can_turn_the_state_around(name: str) -> None:
    """b is twice as large, and all else is made of it as before: with the gate wide open, what a step leaves along the
    key goes from nothing to minus all of it."""
    plain, wide, x = layer(name), layer(name, erase_max=2.0), tokens(2, 13)
    assert torch.equal(wide.projections(x).b, 2 * plain.projections(x).b)
    operands = RULES[name].operands(wide.projections(x))
    y, _ = wide(x)
    truth, _ = RULES[name].run(operands, scale=1.0, initial_state=None, cu_seqlens=None, there=None, impl="reference")
    assert torch.allclose(y, project(wide, x, truth), rtol=0, atol=1e-12)
    for mixer, least in ((plain, 0.0), (wide, -1.0)):
        with torch.no_grad():
            rows = dict(zip(mixer.parts, mixer.in_proj.weight.split(list(mixer.parts.values())), strict=True))
            rows["b"].copy_(1e3 * x[0, -1])  # the last token's gate is open as wide as it goes
        found = mixer.projections(x[:1, -1:])
        along = found.k if name != "eda" else found.direction
        left = 1 - (found.b * along.square()).sum(-1) / along.square().sum(-1)
        assert torch.allclose(left, torch.tensor(least).double(), atol=1e-9)


@pytest.mark.parametrize("name", LAYERS)
def test_packed_is_separate_gradients_included(name: str) -> None:
    mixer, lengths = layer(name), [5, 1, 9]
    x = tokens(1, 15).requires_grad_()
    y, _ = mixer(x, sequences=Sequences(cu_seqlens=torch.tensor([0, 5, 6, 15])))
    found = torch.autograd.grad(y.square().sum(), [x, *mixer.parameters()])
    alone = x.detach().clone().requires_grad_()
    truth = torch.cat([mixer(part)[0] for part in alone.split(lengths, 1)], 1)
    expected = torch.autograd.grad(truth.square().sum(), [alone, *mixer.parameters()])
    assert torch.allclose(y, truth, rtol=0, atol=1e-12)
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_padding_is_inert(name: str, warm: bool) -> None:
    """Left, right, in between, everywhere and nowhere."""
    mixer, x = layer(name), tokens(5, 7)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0, 0], [1, 0, 1, 1, 0, 0, 1], [0] * 7, [1] * 7])
    sequences = Sequences.from_mask(mask)
    state = mixer(tokens(5, 3))[1] if warm else None
    y, end = mixer(sequences.align(x), state, sequences)
    y = sequences.restore(y)
    after, _ = mixer(tokens(5, 1), end)  # the next token sees the right state
    for n in range(5):
        kept = mask[n].bool()
        before = None if state is None else type(state)(*(s[n : n + 1] for s in state))
        if kept.any():
            truth, before = mixer(x[n : n + 1, kept], before)
            assert torch.allclose(y[n, kept], truth[0], rtol=0, atol=1e-12)
        next_truth, _ = mixer(tokens(5, 1)[n : n + 1], before)
        assert torch.allclose(after[n], next_truth[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", LAYERS)
def test_the_future_never_changes_the_past(name: str) -> None:
    mixer, x = layer(name), tokens(1, 12).requires_grad_()
    y, _ = mixer(x)
    (dx,) = torch.autograd.grad(y[:, :7].square().sum(), x)
    assert torch.count_nonzero(dx[:, 7:]) == 0
    changed = torch.cat([x[:, :7], x[:, 7:] + 1], 1)
    assert torch.allclose(mixer(changed)[0][:, :7], y[:, :7], rtol=0, atol=1e-13)


def test_strength_is_what_the_equation_says_and_scales() -> None:
    mixer, x = layer("qed"), tokens(1, 6)
    assert torch.allclose(mixer.strength(), 0.25 * torch.sigmoid(mixer.theta))
    reference = layer("gdn2")
    reference.load_state_dict({k: v for k, v in mixer.state_dict().items() if k != "theta"})
    mixer.strength_scale = 0.0
    assert torch.equal(mixer(x)[0], reference(x)[0])


def test_parameters_are_those_the_rule_takes() -> None:
    def of(rule: str) -> tuple[set[str], set[str]]:
        made = layer(rule)
        own = {name.split(".")[0] for name, _ in made.named_parameters()}
        return own - {"in_proj", "conv", "g_proj", "o_norm", "o_proj"}, {name for name, n in made.parts.items() if n}

    shared = {"qkv", "output_gate"}
    assert of("linear") == (set(), shared)
    assert of("deltanet") == (set(), shared | {"b"})
    assert of("gdn") == ({"A_log", "dt_bias"}, shared | {"b", "f"})
    assert of("kda") == ({"A_log", "dt_bias", "f_proj"}, shared | {"b", "f"})
    assert of("gdn2") == ({"A_log", "dt_bias", "f_proj"}, shared | {"b", "w", "f"})
    assert of("qed") == of("qed-nogate") == of("qed-rand") == (of("gdn2")[0] | {"theta"}, of("gdn2")[1])
    assert of("eda") == (of("gdn2")[0], of("gdn2")[1] | {"e"})


def test_a_window_sees_its_tokens_alone() -> None:
    attention, x = layer("sliding_attention"), tokens(1, 12)
    changed = x.clone()
    changed[:, 3] += 1
    difference = (attention(changed)[0] - attention(x)[0]).abs().sum(-1)[0]
    assert (difference[3:7] > 1e-9).all()
    assert (difference[7:] == 0).all()


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match=r"rule: expected one of linear, .* got 'qet'"):
        Mixer(**SIZES, value_head_dim=8, rule="qet")
    with pytest.raises(ValueError, match="activation: expected one of silu, sigmoid, got 'relu'"):
        Mixer(**SIZES, value_head_dim=8, output_gate="relu")


@pytest.mark.parametrize("rule", RULES)
def test_a_new_layer_has_initial_values(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody wrote is poisoned here, and a layer by itself is still finite; the same seed goes on as if no
    layer had drawn anything but its matrices."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: empty(*size, **options).fill_(torch.nan))
    torch.manual_seed(0)
    mixer = Mixer(hidden_size=24, num_heads=2, head_dim=16, value_head_dim=16, rule=rule)
    after = torch.rand(3)
    assert all(x.isfinite().all() for x in (*mixer.parameters(), *mixer.buffers()))
    assert mixer(torch.randn(2, 5, 24))[0].isfinite().all()
    torch.manual_seed(0)
    for module in mixer.modules():
        if isinstance(module, torch.nn.Linear):
            module.reset_parameters()
    assert torch.equal(torch.rand(3), after)
