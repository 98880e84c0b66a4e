"""Tokens through a block one by one, in few kernels, are tokens through its layers: for every rule that a row says."""

import copy
from typing import Any

import pytest
import torch

from qed import QEDConfig, QEDForCausalLM
from qed.kernels.decode import launch
from qed.kernels.launching import Prepared
from qed.layers import MixerState, QEDBlock, RMSNorm
from qed.layers.routes import BLOCK
from qed.layers.sequences import DENSE
from qed.model.causal_lm import make_block
from qed.model.decoding import Decoder
from qed.model.initialization import initialize
from qed.routes import Call
from qed.rules import RULES
from qed.testing import relative_error
from tests.marks import slow

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SAID = [name for name, row in RULES.items() if row.function is None]
ROUNDING = {torch.float32: 1e-5, torch.float16: 2**-8, torch.bfloat16: 2**-5}  # eight times what one number's is


def block(**changes: Any) -> QEDBlock:
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_heads": 2, "head_dim": 16, "intermediate_size": 40, "initializer_range": 0.5}
    config = QEDConfig.tiny(**(sizes | {"theta_init": 1.0, "num_hidden_layers": 1} | changes))
    made = make_block(config, 0)
    for module in made.modules():
        initialize(module, config)
    with torch.no_grad():
        for name, x in made.named_parameters():
            if name.endswith(("norm.weight", "bias")):
                x.add_(0.1 * torch.randn_like(x))
    return made.to(DEVICE).eval()


@torch.no_grad()
def errors(made: QEDBlock, batch: int, dtype: torch.dtype, tokens: int = 3) -> dict[str, float]:
    """Relative, after some tokens, against the layers in float64 from the same rounded weights and inputs."""
    torch.manual_seed(1)
    made = made.to(dtype)
    wide = copy.deepcopy(made).double()
    mixer = made.mixer
    xs = torch.randn(tokens, batch, 24, dtype=dtype, device=DEVICE)
    conv = torch.randn(batch, mixer.conv.weight.shape[1] - 1, mixer.conv.weight.shape[0], dtype=dtype, device=DEVICE)
    recurrent = torch.randn(batch, mixer.num_heads, mixer.head_dim, mixer.value_head_dim, device=DEVICE)
    state = MixerState(conv.double(), recurrent.double())
    given = conv.clone()
    for x in xs:
        truth, state = wide(x[:, None].double(), state, DENSE)
        found = launch.block_step(made, x.clone(), conv, recurrent)
    if dtype == torch.float32 and tokens < conv.shape[1]:
        assert torch.equal(conv[:, : conv.shape[1] - tokens], given[:, tokens:])  # the window has moved, not changed
    return {
        "x": relative_error(found, truth[:, 0]),
        "conv": relative_error(conv, state.conv) if conv.numel() else 0.0,
        "recurrent": relative_error(recurrent, state.recurrent),
    }


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("rule", ["qed", *slow(*(x for x in SAID if x != "qed"))])
def test_every_rule(rule: str, batch: int, dtype: torch.dtype) -> None:
    found = errors(block(rule=rule), batch, dtype)
    assert all(x < ROUNDING[dtype] for x in found.values()), found


@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": 12, "expand_v": 2.0},
        {"conv_size": 1},
        {"conv_size": 2, "num_heads": 3},
        {"conv_size": 6},
        {"output_gate": None},
        {"output_gate": "sigmoid", "output_gate_rank": 0},
        {"output_gate_rank": 5, "decay_rank": 3},
        {"read_scale": 0.25, "lambda_max": 0.7},
    ],
    ids=str,
)
@pytest.mark.parametrize("batch", [1, 18])  # of 16 sequences in a program
def test_every_form_of_the_layer(batch: int, changes: dict[str, Any]) -> None:
    found = errors(block(**changes), batch, torch.float32)
    assert all(x < ROUNDING[torch.float32] for x in found.values()), found


@pytest.mark.parametrize("numbers", [16, *slow(32)])
def test_matrices_wider_than_a_program_holds(numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "NUMBERS", numbers)  # the block is 24 wide, its SwiGLU 40
    assert all(x < ROUNDING[torch.float32] for x in errors(block(), 1, torch.float32).values())


def test_strength_may_be_scaled() -> None:
    made = block()
    plain, made.mixer.strength_scale = errors(made, 1, torch.float32), 0.0
    assert all(x < ROUNDING[torch.float32] for x in (plain | errors(made, 1, torch.float32)).values())


@pytest.mark.parametrize("batch", [1, 2])
def test_a_decoder_takes_it_for_all_layers(batch: int) -> None:
    torch.manual_seed(0)
    model = QEDForCausalLM(QEDConfig.tiny(initializer_range=0.2)).eval().to(DEVICE)
    ids = torch.randint(0, 256, (batch, 12), device=DEVICE)
    with torch.no_grad():
        truth = model(ids).logits
        model.set_impl("auto", block="triton")
        decoder = Decoder(model, batch)
        assert {route.name for route in decoder.routes} == {"triton"}
        decoder.start(model(ids[:, :5], use_cache=True).past_key_values)
        for t in range(5, 12):
            assert relative_error(decoder.step(ids[:, t : t + 1]), truth[:, t]) < (1e-5 if DEVICE == "cpu" else 1e-3), t


HEADS = {  # other heads [N, 64] than the configuration says
    "fewer tokens": torch.randn(200, 64),
    "more tokens": torch.randn(300, 64),
    "a transposed view": torch.randn(64, 256).t(),
}


@torch.no_grad()
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("head", HEADS)
def test_a_decoder_takes_the_head_that_is_there(head: str, batch: int) -> None:
    torch.manual_seed(0)
    model = QEDForCausalLM(QEDConfig.tiny(initializer_range=0.2, tie_word_embeddings=False)).eval().to(DEVICE)
    model.lm_head.weight = torch.nn.Parameter(HEADS[head].to(DEVICE))
    ids = torch.randint(0, 200, (batch, 6), device=DEVICE)
    truth = model(ids).logits[:, 5]
    model.set_impl("auto", block="triton")
    decoder = Decoder(model, batch)
    decoder.start(model(ids[:, :5], use_cache=True).past_key_values)
    found = decoder.step(ids[:, 5:])
    assert found.shape == truth.shape
    assert relative_error(found, truth) < (1e-5 if DEVICE == "cpu" else 1e-3)


def why_not(made: QEDBlock, batch: int) -> str | None:
    return BLOCK.routes[0].obstacle(Call(torch.device(DEVICE), torch.float32, batch=batch, named=True), made)


REPLACED: dict[str, tuple[Any, str]] = {
    "a quantised or adapted matrix": (
        lambda made: setattr(made.mixer, "o_proj", torch.nn.Identity()),
        "quantised, adapted or replaced: it is a Identity",
    ),
    "a bias": (lambda made: setattr(made.mixer, "o_proj", torch.nn.Linear(32, 24)), "has a bias"),
    "a norm": (lambda made: setattr(made, "mlp_norm", torch.nn.RMSNorm(24)), "has been replaced"),
    "a hook": (lambda made: made.mixer.conv.register_forward_hook(lambda *_: None), "has hooks"),
    "a hook of a matrix": (lambda made: made.mixer.in_proj.register_forward_hook(lambda *_: None), "has hooks"),
    "a transposed view": (
        lambda made: setattr(made.mlp.down_proj, "weight", torch.nn.Parameter(torch.randn(40, 24).t())),
        "not contiguous",
    ),
    "a forward": (lambda made: setattr(made.mlp, "forward", made.mlp.forward), "a forward of its own"),
}


@pytest.mark.parametrize("part", REPLACED)
def test_what_was_replaced_is_left_alone(part: str) -> None:
    made = block()
    assert why_not(made, launch.MOST) is None
    assert f"up to {launch.MOST} sequences" in str(why_not(made, launch.MOST + 1))
    change, reason = REPLACED[part]
    change(made)
    assert reason in str(why_not(made, 1))


@pytest.mark.parametrize(
    ("shared", "dtype", "width", "batch", "runs"),
    [
        (227, torch.float32, 256, 2, False),
        (227, torch.float32, 256, 1, True),
        (227, torch.float32, 128, 2, True),
        (227, torch.bfloat16, 256, 2, True),
        (64, torch.float32, 128, 2, False),
    ],
)
def test_a_small_shared_memory_is_an_obstacle(
    shared: int, dtype: torch.dtype, width: int, batch: int, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the kernel for several sequences would not fit, "auto" takes another route."""
    monkeypatch.setattr("qed.routes.gpu_obstacle", lambda device: None)
    monkeypatch.setattr("qed.layers.routes.shared_memory", lambda device: shared)
    made = make_block(QEDConfig.tiny(head_dim=width), 0).to(dtype)
    call = Call(torch.device("cuda"), dtype, batch=batch, state=True)
    assert BLOCK.pick("auto", call, made).name == ("triton" if runs else "compiled")


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("width", [1, 2, 8, 16, 128])
def test_no_number_of_a_state_is_in_two_warps(width: int, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that write a state over would race with themselves if two warps held the same number of it."""
    launched = []
    monkeypatch.setattr(Prepared, "__call__", lambda self, grid, *arguments: launched.append(self))
    made = block(head_dim=width)
    mixer = made.mixer
    conv = torch.zeros(batch, mixer.conv.weight.shape[1] - 1, mixer.conv.weight.shape[0], device=DEVICE)
    recurrent = torch.zeros(batch, mixer.num_heads, width, width, device=DEVICE)
    with torch.no_grad():
        launch.block_step(made, torch.zeros(batch, 24, device=DEVICE), conv, recurrent)
    carrying = [x.constants for x in launched if x.kernel.fn.__name__ in ("mixer_kernel", "step_kernel")]
    assert len(carrying) == 1
    assert all(x["num_warps"] == 1 or 32 * x["num_warps"] <= x["BK"] * x["BV"] for x in carrying)


@torch.no_grad()
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("part", ["norm", "residual", "swiglu", "heads"])
def test_a_matrix_times_a_vector(part: str, dtype: torch.dtype) -> None:
    """Norms before it, SwiGLU and a residual after it, and tiles that no side is a multiple of."""
    torch.manual_seed(0)
    batch, N, M, V = 1, 50, 72, 24

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE).to(dtype)

    x, weight, residual = drawn(batch, M), drawn(2 * N if part == "swiglu" else N, M) / 8, drawn(batch, N)
    norm = RMSNorm(M, 1e-3).to(DEVICE, dtype)
    norm.weight.add_(0.3 * drawn(M))
    given, options, wide = x, {}, x.double()
    if part in ("norm", "swiglu"):
        options = {"norm": norm, "swiglu": part == "swiglu"}
        wide = wide * (wide.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * norm.weight.double()
    elif part == "heads":
        squares = wide.view(batch, M // V, 2, V // 2).square().sum(-1)
        given = launch.Parts(x, squares.float(), V, 1e-3)
        wide = (wide.view(batch, -1, V) * (squares.sum(-1, keepdim=True) / V + 1e-3).rsqrt()).flatten(1)
    truth = wide @ weight.double().t()
    if part == "swiglu":
        truth = torch.nn.functional.silu(truth[:, :N]) * truth[:, N:]
    if part in ("residual", "heads"):
        options, truth = {"residual": residual}, truth + residual
    assert relative_error(launch.times_vector(given, weight, **options), truth) < ROUNDING[dtype]


@pytest.mark.parametrize("columns", [2, 8, 64])
def test_a_state_is_cut_anywhere(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ALONE_COLUMNS", "COLUMNS"):
        monkeypatch.setattr(launch, name, columns)
    made = block(head_dim=12, expand_v=1.5, read_scale=0.5 + columns)  # a kernel of its own for every number of columns
    launch._mixer.cache_clear()
    launch._step.cache_clear()
    for batch, dtype in ((1, torch.float32), (2, torch.float32), (2, torch.float16)):
        found = errors(copy.deepcopy(made), batch, dtype)
        assert all(x < ROUNDING[dtype] for x in found.values()), (found, batch)
    launch._mixer.cache_clear()
    launch._step.cache_clear()


@pytest.mark.parametrize("numbers", [5, 300])
def test_the_likeliest_token(numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "BLOCK", 64)
    launch._likeliest.cache_clear()
    logits = torch.randint(0, 20, (40, numbers), device=DEVICE).float()  # with many that are equal
    logits[0], logits[1, 3], logits[2, 4] = float("-inf"), float("nan"), float("inf")
    tokens = torch.zeros(40, 1, dtype=torch.long, device=DEVICE)
    launch.write_likeliest(logits, tokens)
    launch._likeliest.cache_clear()
    first = [line.index(max(x for x in line if x == x)) for line in logits.tolist()]
    first[1] = 3
    assert tokens[:, 0].tolist() == first
