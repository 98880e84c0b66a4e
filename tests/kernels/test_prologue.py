"""The kernel gives what the layer's torch functions give, for every rule that a row says."""

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch

from qed import QEDConfig, QEDForCausalLM
from qed.kernels.prologue import launch as prologue
from qed.kernels.prologue import operator, projected
from qed.layers import Mixer, Sequences
from qed.layers.routes import OPERANDS, set_impl
from qed.layers.sequences import DENSE
from qed.model.causal_lm import compile_blocks, recompute_cheap
from qed.model.initialization import initialize
from qed.routes import Call
from qed.rules import RULES
from qed.testing import relative_error
from tests.marks import slow

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SAID = [name for name, row in RULES.items() if row.function is None]
ROUNDING = {torch.float32: 2e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}


def layer(rule: str, head_dim: int = 16, value_head_dim: int = 16, conv_size: int = 4) -> Mixer:
    torch.manual_seed(0)
    sizes = {"num_heads": 2, "head_dim": head_dim, "value_head_dim": value_head_dim, "conv_size": conv_size}
    made = Mixer(hidden_size=24, rule=rule, **sizes)
    for module in made.modules():
        initialize(module, QEDConfig.tiny(theta_init=1.0, initializer_range=0.5))
    return made.to(DEVICE)


def errors(mixer: Mixer, tokens: tuple[int, int], dtype: torch.dtype, with_state: bool) -> dict[str, float]:
    """Relative, of every operand, against the layer's functions in float64 of the same rounded inputs."""
    torch.manual_seed(1)
    mixer = mixer.to(dtype)
    with torch.no_grad():
        inputs = mixer._inputs(2 * torch.randn(*tokens, 24, dtype=dtype, device=DEVICE), "reference")
        qkv, gates = inputs["qkv"], mixer._gates(inputs, "reference")
        state = torch.randn_like(qkv[:, :1].expand(-1, mixer.conv.weight.shape[1] - 1, -1)) if with_state else None
        found = prologue.operands(qkv, mixer, state, DENSE, gates)

        def wide(x: Any) -> Any:
            return None if x is None else x.double()

        mixer = mixer.double()
        convolved = mixer.conv(qkv.double(), wide(state))
        truth = mixer.operands_of_convolved(convolved, type(gates)(*map(wide, gates)))
    for x, y in zip(found, truth, strict=True):
        assert (x is None) == (y is None)
        assert x is None or (x.shape == y.shape and x.dtype == (torch.float32 if x is found.g else dtype))
    return {name: relative_error(x, y) for name, x, y in zip(found._fields, found, truth, strict=True) if x is not None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *slow(torch.float16)], ids=str)
@pytest.mark.parametrize("rule", ["qed", *slow(*(x for x in SAID if x != "qed"))])
def test_every_rule(rule: str, dtype: torch.dtype) -> None:
    found = errors(layer(rule), (2, 37), dtype, with_state=False)
    assert found.pop("g", 0.0) < ROUNDING[torch.float32]
    assert all(x < ROUNDING[dtype] for x in found.values()), found


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("tokens", [(1, 1), (2, 2), (3, 16), (1, 33)])
@pytest.mark.parametrize("rule", [*slow("gdn"), "qed"])
def test_any_length_from_any_state(rule: str, tokens: tuple[int, int], with_state: bool) -> None:
    found = errors(layer(rule), tokens, torch.float32, with_state)
    assert all(x < ROUNDING[torch.float32] for x in found.values()), found


@pytest.mark.parametrize("sizes", [(1, 3, 4), (20, 12, 2), (130, 40, 3), (8, 136, 1)])
@pytest.mark.parametrize("rule", ["kda", "qed"])
def test_any_width(rule: str, sizes: tuple[int, int, int]) -> None:
    found = errors(layer(rule, *sizes), (2, 9), torch.float32, with_state=True)
    assert all(x < ROUNDING[torch.float32] for x in found.values()), found


@pytest.mark.parametrize("rule", ["gdn", "qed-rand"])
def test_parameters_anywhere_in_memory(rule: str) -> None:
    mixer = layer(rule)
    for name in ("A_log", "dt_bias", "random_direction"):
        if getattr(mixer, name, None) is not None:
            x = getattr(mixer, name).detach()
            x = torch.randn(*x.shape, 2, device=DEVICE)[..., 0]
            setattr(mixer, name, x if name == "random_direction" else torch.nn.Parameter(x))
            assert x.numel() == 1 or not getattr(mixer, name).is_contiguous()
    with torch.no_grad():
        inputs = mixer._inputs(torch.randn(2, 9, 24, device=DEVICE), "reference")
        qkv, gates = inputs["qkv"], mixer._gates(inputs, "reference")
        found = prologue.operands(qkv, mixer, None, DENSE, gates)
        truth = mixer.operands_of_convolved(mixer.conv(qkv), gates)
    for x, y in zip(found, truth, strict=True):
        assert x is None or relative_error(x, y) < 8 * ROUNDING[torch.float32]


@pytest.mark.parametrize("with_state", [False, True])
def test_packed_is_separate(with_state: bool) -> None:
    mixer, ends = layer("qed"), [0, 5, 6, 6, 30]
    with torch.no_grad():
        inputs = mixer._inputs(torch.randn(1, 30, 24, device=DEVICE), "reference")
        qkv, gates = inputs["qkv"], mixer._gates(inputs, "reference")
        state = torch.randn(4, 3, qkv.shape[-1], device=DEVICE) if with_state else None
        packed = Sequences(cu_seqlens=torch.tensor(ends, device=DEVICE))
        found = prologue.operands(qkv, mixer, state, packed, gates)
        for n, (start, end) in enumerate(pairwise(ends)):
            part = type(gates)(*(x if x is None or x.dim() == 1 else x[:, start:end] for x in gates))
            own = None if state is None else state[n : n + 1]
            alone = prologue.operands(qkv[:, start:end], mixer, own, DENSE, part)
            assert all(torch.equal(x[:, start:end], y) for x, y in zip(found, alone, strict=True))


def test_decays_of_any_size() -> None:
    """Where the step is tiny, and where it is huge."""
    mixer = layer("kda")
    with torch.no_grad():
        mixer.dt_bias.copy_(torch.linspace(-60, 60, mixer.dt_bias.numel()))
        inputs = mixer._inputs(torch.randn(1, 5, 24, device=DEVICE), "reference")
        gates = mixer._gates(inputs, "reference")
        g = prologue.operands(inputs["qkv"], mixer, None, DENSE, gates).g
        x = mixer._heads((gates.f + mixer.dt_bias).double())
        truth = -mixer.A_log.double().exp()[:, None] * torch.nn.functional.softplus(x, threshold=1000)
    assert ((g - truth) / truth).abs().max() < 1e-5


def test_rules_with_a_function_of_their_own_are_left_to_it() -> None:
    call = Call(torch.device(DEVICE), torch.float32, tokens=9, named=True)
    triton = OPERANDS.routes[0]
    assert {name for name in RULES if triton.obstacle(call, layer(name)) is None} == set(SAID)
    assert "the rule's direction = 'token'" in triton.obstacle(call, layer("eda"))
    assert "heads up to 256 wide, and these are 257" in triton.obstacle(call, layer("qed", head_dim=257))


def gradients(mixer: Mixer, xs: torch.Tensor, dtype: torch.dtype, kernels: bool) -> dict[str, torch.Tensor]:
    """Of every parameter and of x, for the same random cotangents."""
    mixer = copy.deepcopy(mixer).to(dtype)
    x = xs.to(dtype).requires_grad_()
    inputs = mixer._inputs(x, "reference")
    gates = mixer._gates(inputs, "reference")
    if kernels:
        found = operator.differentiable_operands(inputs["qkv"], mixer, gates)
    else:
        found = mixer.operands_of_convolved(mixer.conv(inputs["qkv"], impl="reference"), gates)
    torch.manual_seed(2)
    outputs = [y for y in found if y is not None]
    cotangents = [torch.randn(y.shape, device=DEVICE).to(torch.bfloat16).to(y.dtype) for y in outputs]
    torch.autograd.backward(outputs, cotangents)
    parameters = {name: p.grad for name, p in mixer.named_parameters() if p.grad is not None}
    assert x.grad is not None
    return parameters | {"x": x.grad}


@pytest.mark.slow
@pytest.mark.parametrize("rule", SAID)
@pytest.mark.parametrize(
    ("sizes", "tokens"), [({}, (2, 70)), ({"head_dim": 12, "value_head_dim": 20, "conv_size": 2}, (1, 5))], ids=str
)
def test_gradients(rule: str, sizes: dict[str, int], tokens: tuple[int, int]) -> None:
    mixer = layer(rule, **sizes)
    xs = torch.randn(*tokens, 24, device=DEVICE)
    truth = gradients(mixer, xs, torch.float64, kernels=False)
    found = gradients(mixer, xs, torch.float32, kernels=True)
    assert found.keys() == truth.keys()
    off = {name: relative_error(found[name], truth[name]) for name in truth}
    assert all(error < (1e-5 if DEVICE == "cpu" else 1e-4) for error in off.values()), off


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_model_s_gradients_compiled_and_eager() -> None:
    torch.manual_seed(0)
    model = QEDForCausalLM(QEDConfig.tiny(initializer_range=0.2)).to(DEVICE).train()
    ids = torch.randint(0, 256, (2, 40), device=DEVICE)

    def found(model: QEDForCausalLM) -> list[torch.Tensor]:
        return list(torch.autograd.grad(model(ids, labels=ids).loss, list(model.parameters())))

    model.set_impl("reference", recurrence="auto")
    truth = found(model)
    model.set_impl("auto", operands="triton", product="triton", norm="written-out")
    recomputing, compiled = copy.deepcopy(model), copy.deepcopy(model)
    for way in (recomputing, compiled):
        recompute_cheap(way)
    compile_blocks(compiled)
    for way in (model, recomputing, compiled):
        off = [relative_error(x, y) for x, y in zip(found(way), truth, strict=True)]
        assert max(off) < (1e-4 if DEVICE == "cpu" else 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["qed", "gdn"])
def test_gradients_in_16_bits_are_as_good_as_torch_s(rule: str) -> None:
    mixer = layer(rule).to(torch.bfloat16)
    xs = torch.randn(2, 70, 24, device=DEVICE).to(torch.bfloat16)
    truth = gradients(mixer, xs, torch.float64, kernels=False)
    plain = gradients(mixer, xs, torch.bfloat16, kernels=False)
    found = gradients(mixer, xs, torch.bfloat16, kernels=True)
    for name in truth:
        assert relative_error(found[name], truth[name]) < 1.2 * relative_error(plain[name], truth[name]) + 2**-9, name


@pytest.mark.parametrize("rule", ["qed", "deltanet"])
def test_opcheck(rule: str) -> None:
    mixer = layer(rule)
    inputs = mixer._inputs(torch.randn(2, 5, 24, device=DEVICE), "reference")
    given = prologue.arguments(inputs["qkv"], mixer, mixer._gates(inputs, "reference"))
    leaves = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in given]
    torch.library.opcheck(operator.OPERANDS, tuple(leaves))


@pytest.mark.parametrize("rule", ["qed", *slow(*(x for x in SAID if x != "qed"))])
@pytest.mark.parametrize("gate", ["silu", None])
def test_one_gradient_of_all_that_in_proj_gives(rule: str, gate: str | None) -> None:
    """It is what laying the gradients of the parts side by side gives, and f's matrix gets its own."""
    torch.manual_seed(0)
    made = Mixer(hidden_size=24, num_heads=2, head_dim=16, value_head_dim=12, rule=rule, output_gate=gate).to(DEVICE)
    for module in made.modules():
        initialize(module, QEDConfig.tiny(theta_init=1.0, initializer_range=0.5))
    x, found = torch.randn(2, 21, 24, device=DEVICE), []
    for together in (False, True):
        mixer = copy.deepcopy(made)
        inputs = mixer._inputs(x, "reference")
        gates, part = mixer._gates(inputs, "reference"), inputs["output_gate"] if gate else None
        if together:
            operands, part = projected.operands_of_projected(inputs["all"], mixer, gates)
        else:
            operands = operator.differentiable_operands(inputs["qkv"], mixer, gates)
        torch.manual_seed(2)
        outputs = [y for y in (*operands, part) if y is not None]
        torch.autograd.backward(outputs, [torch.randn_like(y) for y in outputs])
        found.append({name: p.grad for name, p in mixer.named_parameters() if p.grad is not None})
    parts, whole = found
    assert parts.keys() == whole.keys()
    assert all(relative_error(whole[name], parts[name]) < 1e-6 for name in parts)


# What makes f's matrix more than a matrix, given the module and a list for what is seen of gradients.
FOUND_IN_F: dict[str, Any] = {
    "a bias": lambda f, seen: f.register_parameter("bias", torch.nn.Parameter(torch.linspace(-1, 1, f.out_features))),
    "a hook of its gradient": lambda f, seen: f.register_full_backward_hook(lambda _, __, d: seen.append(d[0])),
    "a hook before its gradient": lambda f, seen: f.register_full_backward_pre_hook(lambda _, d: seen.append(d[0])),
}


@pytest.mark.parametrize("what", FOUND_IN_F)
def test_the_gradient_goes_through_f_s_module(what: str) -> None:
    """Where the product is more than its matrix, or somebody looks at its gradient."""
    found = []
    for route in ("reference", "triton"):
        mixer: Mixer = layer("qed")
        seen: list[torch.Tensor] = []
        FOUND_IN_F[what](mixer.f_proj, seen)
        mixer.to(DEVICE)
        set_impl(mixer, "reference", recurrence="auto", operands=route)
        torch.manual_seed(1)
        mixer(torch.randn(2, 9, 24, device=DEVICE))[0].square().sum().backward()
        found.append([*(x.grad for x in mixer.parameters()), *seen])
    truth, kernels = found
    assert len(truth) == len(kernels)
    assert all(relative_error(x, y) < (1e-5 if DEVICE == "cpu" else 1e-3) for x, y in zip(kernels, truth, strict=True))


def test_gradients_of_gradients_are_refused() -> None:
    """The first ones are right when others are asked for, and the others are an error, not a wrong number."""
    found = []
    for route in ("reference", "triton"):
        mixer = layer("qed")
        set_impl(mixer, "reference", recurrence="auto", operands=route)
        torch.manual_seed(1)
        x = torch.randn(2, 9, 24, device=DEVICE, requires_grad=True)
        found.append(torch.autograd.grad(mixer(x)[0].square().sum(), x, create_graph=True)[0])
    truth, kernels = found
    assert relative_error(kernels, truth) < (1e-5 if DEVICE == "cpu" else 1e-3)
    with pytest.raises(RuntimeError, match="differentiated once by this operator"):
        kernels.square().sum().backward()
