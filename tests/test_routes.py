"""One test over the tables: every route of every piece computes what plain torch computes, or says why it cannot run.

Pieces × routes × every rule × training, inference, decoding, packed and padded. On a GPU where there is one; elsewhere
the kernels run in Triton's interpreter."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from qed import RULES, QEDConfig, QEDForCausalLM, explain
from qed.layers import Mixer, MixerState, QEDBlock, Sequences, set_impl
from qed.layers.obstacles import block_parts_obstacle, convolution_obstacle, plain_linear_obstacle, rule_obstacle
from qed.layers.routes import BLOCK, OPERANDS, PIECES, block_in_torch, project
from qed.layers.sequences import DENSE
from qed.model.causal_lm import make_block
from qed.model.decoding import stream
from qed.model.initialization import initialize
from qed.ops.routes import RECURRENCE
from qed.routes import TRITON_INSTALLED, Call, Piece, Route, known_bad, no_obstacle
from qed.rules import Operands, Rule
from qed.testing import relative_error
from tests.marks import slow

pytestmark = [
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),  # the first product of a backward on a GPU
]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BUDGET = 1e-4 if DEVICE.type == "cpu" else 1e-3  # float32, after a whole block, gradients included
SIZES = {"hidden_size": 24, "num_heads": 2, "head_dim": 16, "intermediate_size": 40}
FAST = ("gdn", "qed", "eda")  # rules of the quick tests: one gate for all, every column, a function of its own
MODES = ("training", "inference", "packed", "padded", "decoding")
INSIDE = [(piece, name) for piece, table in PIECES.items() if piece != "block" for name in table.names[:-1]]


def block(rule: str = "qed", **changes: Any) -> QEDBlock:
    torch.manual_seed(0)
    config = QEDConfig.tiny(**(SIZES | {"initializer_range": 0.5, "theta_init": 1.0, "rule": rule} | changes))
    made = make_block(config, 0)
    for module in made.modules():
        initialize(module, config)
    return made.to(DEVICE)


def results(made: QEDBlock, mode: str) -> list[Tensor]:
    """What a block gives in a mode: outputs, states and, in training, gradients."""
    torch.manual_seed(1)
    xs = torch.randn(1 if mode == "packed" else 2, 1 if mode == "decoding" else 7, 24, device=DEVICE)
    sequences, state = DENSE, None
    if mode == "packed":
        sequences = Sequences(cu_seqlens=torch.tensor([0, 3, 4, 7], device=DEVICE))
    if mode == "padded":
        sequences = Sequences.from_mask(torch.tensor([[0, 0, 1, 1, 1, 0, 1], [1] * 7], device=DEVICE))
    if mode == "decoding":
        mixer = made.mixer
        conv = torch.randn(2, 3, mixer.conv.weight.shape[0], device=DEVICE)
        state = MixerState(conv, torch.randn(2, mixer.num_heads, mixer.head_dim, mixer.value_head_dim, device=DEVICE))
    if mode != "training":
        with torch.no_grad():
            y, end = made(sequences.align(xs), state, sequences)
        if sequences.lengths is not None:  # what is not there has no meaning
            y = y * sequences.there(7)[..., None]
        return [y, *end]
    y, end = made(xs.requires_grad_())
    outputs = [y, *end]
    cotangents = [torch.randn(x.shape, device=DEVICE) for x in outputs]
    leaves = [xs, *made.parameters()]
    return [*outputs, *torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True, materialize_grads=True)]


def agree(found: list[Tensor], truth: list[Tensor]) -> bool:
    return all(relative_error(x, y) < BUDGET for x, y in zip(found, truth, strict=True) if y.numel() and y.any())


def results_or_obstacle(made: QEDBlock, mode: str) -> list[Tensor] | str:
    try:
        return results(made, mode)
    except RuntimeError as error:
        return str(error)


@pytest.mark.skipif(not TRITON_INSTALLED, reason="needs Triton")
@pytest.mark.parametrize("rule", [*FAST, *slow(*(x for x in RULES if x not in FAST))])
def test_every_route_is_plain_torch_or_says_why_not(rule: str) -> None:
    made, ran = block(rule), set()
    set_impl(made, "reference")
    truth = {mode: results(made, mode) for mode in MODES}
    for piece, name in INSIDE:
        set_impl(made, "reference", **{piece: name})
        for mode in MODES:
            found = results_or_obstacle(made, mode)
            if isinstance(found, str):
                assert f"impl={name!r} cannot run here: {piece}: " in found, (piece, name, mode)
            else:
                assert agree(found, truth[mode]), (piece, name, mode)
                ran.add((piece, name, mode))
    kernels_of_the_rule = {("operands", "triton", mode) for mode in ("training", "inference", "packed", "padded")}
    assert (kernels_of_the_rule <= ran) == (rule_obstacle(RULES[rule]) is None)
    assert {("recurrence", name, mode) for name in ("triton", "chunkwise") for mode in MODES} <= ran
    assert {("convolution", "triton", mode) for mode in MODES if mode != "decoding"} <= ran
    assert {("norm", "written-out", mode) for mode in MODES} | {("product", "triton", mode) for mode in MODES} <= ran
    assert {(piece, name, "inference") for piece, name in (("norm", "triton"), ("projection", "in-place"))} <= ran


@pytest.mark.skipif(not TRITON_INSTALLED, reason="needs Triton")
@pytest.mark.parametrize("rule", RULES)
def test_a_block_for_one_token(rule: str) -> None:
    made = block(rule).eval()
    set_impl(made, "reference")
    for batch in (1, 2):
        torch.manual_seed(1)
        x, conv = torch.randn(batch, 24, device=DEVICE), torch.randn(batch, 3, made.mixer.conv.weight.shape[0])
        given = (x, conv.to(DEVICE), torch.randn(batch, 2, 16, 16, device=DEVICE))
        with torch.no_grad():
            states = [y.clone() for y in given]
            truth = [block_in_torch(made, *states), *states[1:]]
            for route in BLOCK.routes[:-1]:
                call, states = (
                    Call(DEVICE, torch.float32, batch=batch, state=True, named=True),
                    [y.clone() for y in given],
                )
                why_not = route.obstacle(call, made)
                assert (why_not is None) == (
                    rule_obstacle(RULES[rule]) is None if route.name == "triton" else DEVICE.type == "cuda"
                ), why_not
                if why_not is None:
                    found = [route.run(made, *states), *states[1:]]
                    assert agree(found, truth), (route.name, batch)


@pytest.mark.skipif(not TRITON_INSTALLED, reason="needs Triton")
def test_kernels_leave_an_erase_gate_up_to_two_to_torch() -> None:
    made = block("gdn2")
    made.mixer.erase_max = 2.0
    set_impl(made, "reference")
    truth = results(made, "inference")
    set_impl(made)
    assert agree(results(made, "inference"), truth)
    set_impl(made, "reference", operands="triton")
    assert "erase gate in (0, 1), and this one is in (0, 2)" in str(results_or_obstacle(made, "inference"))
    call = Call(DEVICE, torch.float32, batch=1, state=True, named=True)
    assert "erase gate in (0, 1), and this one is in (0, 2)" in str(BLOCK.routes[0].obstacle(call, made))


def test_a_vector_is_projected_alike_compiled_and_not() -> None:
    """With a bias and a residual stream or without, also inside torch.compile."""
    torch.manual_seed(0)
    for bias in (False, True):
        linear, x, residual = torch.nn.Linear(7, 5, bias=bias).to(DEVICE), torch.randn(1, 1, 7), torch.randn(1, 1, 5)
        x, residual = x.to(DEVICE), residual.to(DEVICE)
        with torch.no_grad():
            for stream_ in (None, residual):
                truth = project(linear, x, stream_, "reference")
                vector = (("projection", "vector"),)
                compiled = torch.compile(project, fullgraph=True, backend="eager")
                for found in (project(linear, x, stream_, vector), compiled(linear, x, stream_, vector)):
                    assert relative_error(found, truth) < 1e-6


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_projection_alone_is_its_module_s(device: str, gradient: bool, batch: int) -> None:
    """Outside torch.compile: `project` does not ask the table then."""
    call = Call(torch.device(device), torch.float32, batch=batch, gradient=gradient)
    assert PIECES["projection"].pick("auto", call, torch.nn.Linear(2, 2), None).name == "reference"


# Rules that kernels do not know


@dataclasses.dataclass(frozen=True, kw_only=True)
class Doubling(Rule):
    """A rule with a column of its own: the erase vector is multiplied by it."""

    factor: float = 1.0

    def _gated(self, x: Any) -> Operands:
        operands = super()._gated(x)
        return operands._replace(a=self.factor * operands.a)


@pytest.fixture
def doubling(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(RULES, "doubling", Doubling(erase_vector="½ b⊙k", factor=0.5))
    return "doubling"


def test_a_rule_with_a_column_that_kernels_do_not_know_is_computed_right(doubling: str) -> None:
    """On this device, in every mode, by "auto": its kernels are refused and say so."""
    made = block(doubling)
    set_impl(made, "reference")
    truth = {mode: results(made, mode) for mode in MODES}
    plain = block("gdn2")
    set_impl(plain, "reference")
    assert not agree(results(plain, "inference"), truth["inference"])
    set_impl(made, "auto")
    for mode in MODES:
        assert agree(results(made, mode), truth[mode]), mode
    for piece in (OPERANDS, BLOCK):
        whole = made if piece is BLOCK else made.mixer
        call = Call(DEVICE, torch.float32, tokens=7, named=True)
        assert "the rule is a Doubling" in str(piece.routes[0].obstacle(call, whole))
    set_impl(made, "reference", operands="triton")
    with pytest.raises(RuntimeError, match="impl='triton' cannot run here: operands: the rule is a Doubling"):
        results(made, "inference")


def test_a_column_that_is_not_on_the_list_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of the table's own class, with a column that was added to it."""
    monkeypatch.setattr("qed.kernels.prologue.launch.KNOWN_COLUMNS", {"function": (None,)})
    assert "the rule's strength = True" in str(rule_obstacle(RULES["qed"]))
    assert rule_obstacle(Rule(erase_vector="b⊙k")) is None  # nothing but defaults


def test_a_model_of_such_a_rule_generates_right(doubling: str) -> None:
    torch.manual_seed(0)
    config = QEDConfig.tiny(rule="gdn2", initializer_range=0.3)
    model = QEDForCausalLM(config).eval().to(DEVICE)
    for layer in model.model.layers:
        layer.mixer.rule, layer.mixer.row = doubling, RULES[doubling]
    ids = torch.randint(3, 256, (2, 9), device=DEVICE)
    found = torch.cat([ids, *stream(model, ids, max_new_tokens=8)], 1)
    model.set_impl("reference")
    with torch.no_grad():
        assert (model(found[:, :-1]).logits[:, 8:].argmax(-1) == found[:, 9:]).float().mean() > 0.9


# impl= and explain


def test_reference_is_plain_torch_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other route runs: each would raise here."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("not plain torch")

    for piece in PIECES.values():
        broken = tuple(dataclasses.replace(route, run=refuse) for route in piece.routes[:-1])
        monkeypatch.setattr(piece, "routes", (*broken, piece.routes[-1]))
    torch.manual_seed(0)
    model = QEDForCausalLM(QEDConfig.tiny()).eval().to(DEVICE)
    model.set_impl("reference")
    ids = torch.randint(3, 256, (2, 12), device=DEVICE)
    with torch.no_grad():
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, pad_token_id=0)
    model.train()(ids, labels=ids).loss.backward()
    mixer = copy.deepcopy(model.model.layers[0].mixer)
    set_impl(mixer, "auto")
    with torch.no_grad():
        mixer(torch.randn(1, 5, model.config.hidden_size, device=DEVICE), impl="reference")


def test_names_that_are_no_route_are_refused() -> None:
    model = QEDForCausalLM(QEDConfig.tiny())
    with pytest.raises(
        ValueError, match="impl: expected one of 'auto', 'triton', 'chunkwise', 'reference', got 'fast'"
    ):
        model.set_impl("fast")
    with pytest.raises(
        ValueError, match="norm: expected one of 'auto', 'triton', 'written-out', 'reference', got 'fast'"
    ):
        model.set_impl(norm="fast")
    with pytest.raises(ValueError, match=r"expected pieces of recurrence, operands, .* got 'nrom'"):
        model.set_impl(nrom="triton")
    with pytest.raises(ValueError, match="impl: expected one of"):
        model.model.layers[0].mixer(torch.zeros(1, 2, model.config.hidden_size), impl="fast")
    assert {module.impl for module in model.modules() if hasattr(module, "impl")} == {"auto"}


def test_layers_of_one_s_own_class_are_set_too() -> None:
    class Own(Mixer):
        pass

    model = torch.nn.Sequential(Own(hidden_size=24, num_heads=2, head_dim=16, value_head_dim=16), torch.nn.Linear(2, 2))
    set_impl(model, "reference")
    assert {module.impl for module in model.modules() if hasattr(module, "impl")} == {"reference"}


def test_a_named_route_never_falls_back() -> None:
    model, ids = (
        QEDForCausalLM(QEDConfig.tiny()).double().to(DEVICE),
        torch.zeros(1, 5, dtype=torch.long, device=DEVICE),
    )
    model.set_impl("triton")
    with pytest.raises(RuntimeError, match="impl='triton' cannot run here: norm: it has no gradient"):
        model(ids)
    with torch.no_grad(), pytest.raises(RuntimeError, match="cannot run here: norm: it computes in float32"):
        model(ids)


def test_auto_falls_back_where_a_gpu_or_triton_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that kernels must not run on, every piece takes another route."""
    why = known_bad((7, 5), "3.6.0")
    assert why is not None
    monkeypatch.setattr("qed.routes.gpu_obstacle", lambda device: why)
    monkeypatch.setattr("qed.routes.TRITON_INSTALLED", True)
    call = Call(torch.device("cuda"), torch.bfloat16, batch=2, tokens=64)
    made = block()
    more = {"recurrence": (16, 16), "operands": (made.mixer,), "convolution": (4,), "block": (made,)}
    for name in ("recurrence", "operands", "convolution", "norm", "product", "block"):
        choice = PIECES[name].explain("auto", call, *more.get(name, ()))
        assert choice.route != "triton"
        assert choice.passed_over["triton"] == why


def test_a_piece_asked_for_by_name_is_not_compiled_away() -> None:
    """A block is not compiled then: inside, the route could not run."""
    made, call = block("eda"), Call(torch.device("cuda"), torch.float32, state=True)
    compiled = BLOCK.routes[1]
    assert compiled.obstacle(call, made) is None
    set_impl(made, "auto", recurrence="chunkwise")
    assert compiled.obstacle(call, made) is None
    set_impl(made, "auto", norm="triton")
    assert "routes of norm were asked for" in str(compiled.obstacle(call, made))


def test_explain_says_every_piece_of_every_mode() -> None:
    model = QEDForCausalLM(QEDConfig.tiny(num_hidden_layers=3, layer_types=["qed", "qed", "full_attention"]))
    text = str(explain(model))
    for mode in ("training", "prefill", "decoding"):
        assert mode in text
    assert "layers 0 to 1 (qed)" in text
    assert "layer 2 (Attention)" in text
    assert "not compiled: the state of a softmax layer grows" in text.partition("decoding")[2]  # so no step is captured
    if DEVICE.type == "cpu":
        assert "recurrence   chunkwise: " in text
        assert "not triton: it needs CUDA tensors, and these are on cpu" in text
    model.set_impl("reference")
    assert "not chunkwise: impl='reference' was asked for" in str(explain(model))
    with pytest.raises(TypeError, match="expected batch, tokens and options of `generate`, got impl"):
        explain(model, impl="reference")


def test_the_table_s_last_route_is_the_definition() -> None:
    with pytest.raises(AssertionError, match="the last route has to be plain torch"):
        Piece("x", Route(name="fast", run=print, obstacle=no_obstacle, what=""))
    for piece in PIECES.values():
        assert piece.routes[-1].obstacle(Call(DEVICE, torch.float64), *(None,) * 3) is None


@pytest.mark.parametrize("rule", FAST)
def test_obstacles_are_asked_inside_torch_compile(rule: str) -> None:
    """A compiled block asks on a GPU what it never comes to on a CPU, where the device is the first obstacle."""
    made = block(rule)
    mixer = made.mixer
    asked: list[tuple[Callable[[Any], str | None], Any]] = [
        (rule_obstacle, mixer.row),
        (convolution_obstacle, mixer.conv),
        (plain_linear_obstacle, mixer.o_proj),
        (block_parts_obstacle, made),
    ]

    def count(x: torch.Tensor) -> torch.Tensor:
        for i, (obstacle, part) in enumerate(asked):
            if obstacle(part) is not None:
                x = x + 10**i
        return x

    zero = torch.zeros(())
    torch.compiler.reset()
    assert torch.equal(torch.compile(count, fullgraph=True, backend="eager")(zero), count(zero))


@pytest.mark.parametrize(
    ("shared", "dtype", "V", "runs"),
    [
        (99, torch.float32, 256, False),
        (99, torch.float32, 128, True),
        (99, torch.bfloat16, 256, True),
        (163, torch.float32, 256, True),
    ],
)
def test_a_small_shared_memory_is_an_obstacle(
    shared: int, dtype: torch.dtype, V: int, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the backward's kernel would not fit, "auto" takes another form, and the name says why it cannot run."""
    monkeypatch.setattr("qed.routes.gpu_obstacle", lambda device: None)
    monkeypatch.setattr("qed.routes.TRITON_INSTALLED", True)
    monkeypatch.setattr("qed.ops.routes.shared_memory", lambda device: shared)
    call = Call(torch.device("cuda"), dtype)
    assert RECURRENCE.pick("auto", call, 64, V).name == ("triton" if runs else "chunkwise")
    if not runs:
        with pytest.raises(RuntimeError, match="takes 120 KiB of shared memory, and this GPU has 99"):
            RECURRENCE.pick("triton", call, 64, V)
