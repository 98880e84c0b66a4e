"""The kernels against the float64 loop: on the GPU where there is one, else through Triton's interpreter."""

import pytest
import torch

from qed.bench.ops import ERROR_BARS, STRONG, gate
from qed.ops import erase_write, erase_write_step
from qed.ops.operators import TRITON
from qed.testing import Case, over_budget, relative_error, run
from tests.marks import slow

pytest.importorskip("triton")
# Pairs that are masked may overflow (`tiles.py`), which the interpreter's numpy speaks of.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = {
    "one token": Case(tokens=1),
    "one chunk less one": Case(tokens=63, batch=2),
    "one chunk": Case(tokens=64, heads=3),
    "one chunk and one": Case(tokens=65, batch=2),
    "no state": Case(tokens=130, state=False),
    "no decay": Case(tokens=100, decay="none"),
    "a decay per head": Case(tokens=100, decay="head", log_decay=-5.0),
    "odd widths": Case(tokens=70, key_width=60, value_width=20),
    "several tiles": Case(tokens=70, heads=1, key_width=100, value_width=100),
    "width one": Case(tokens=40, key_width=1, value_width=1, decay="head"),
    "identical keys": Case(tokens=100, keys="identical", log_decay=-1e-3, strength=1.0),
    "few keys": Case(tokens=100, keys="few", log_decay=-1e-3, strength=1.0),
    "resets": Case(tokens=150, resets=4),
    "chunks that decay far": Case(tokens=150, log_decay=-3.0),
    "chunks that are barely cut": Case(tokens=150, log_decay=-4.0),
    "chunks that are cut": Case(tokens=150, log_decay=-10.0),
    "chunks that are cut, a decay per head": Case(
        tokens=130, key_width=60, value_width=100, decay="head", log_decay=-10.0, state=False
    ),
    "wide chunks that are cut": Case(tokens=70, heads=1, key_width=100, value_width=100, log_decay=-4.0),
}


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, *slow(torch.float16, torch.bfloat16)],
    ids=str,
)
@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_the_loop(name: str, dtype: torch.dtype) -> None:
    assert over_budget(CASES[name].inputs(device=DEVICE), impl="triton", dtype=dtype, products=dtype, scale=0.5) == {}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_whole_chunks_beside_cut_ones(dtype: torch.dtype) -> None:
    """One block and several, by far and by little."""
    inputs = Case(tokens=512).inputs(device=DEVICE)
    reach = 80 if dtype == torch.float32 else 110
    half = reach / 2
    chunks = [(5, 5), (250, 250), (half - 0.25, half - 0.25), (250, 250)]
    chunks += [(half + 0.25, half + 0.25), (reach - 0.5, reach - 0.5), (reach + 0.5, 1), (1, reach + 20)]
    halves = [-x for chunk in chunks for x in chunk]
    sums = torch.tensor(halves, dtype=torch.float64, device=DEVICE)
    inputs["g"] = (sums / 32).repeat_interleave(32)[None, :, None, None].expand_as(inputs["g"]).clone()
    assert over_budget(inputs, impl="triton", dtype=dtype, products=dtype) == {}


@pytest.mark.parametrize(
    ("batch", "widths", "expected"),
    [
        (2, (128, 128), [(4, 0, 128)]),  # programs, the first lane and the columns of every launch
        (3, (128, 128), [(4, 0, 128), (4, 4, 64)]),
        (3, (128, 256), [(12, 0, 128)]),
        (3, (64, 128), [(6, 0, 128)]),
    ],
    ids=str,
)
def test_the_last_states_are_launched_by_themselves(
    batch: int, widths: tuple[int, int], expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With four multiprocessors, the last two of six states get programs with fewer columns, where a program would
    have a whole state of 128 channels."""
    from qed.bench.tune_process import recorded
    from qed.kernels.recurrence import launch, memory

    for module in (launch, memory):
        monkeypatch.setattr(module, "multiprocessors", lambda _: 4)
    inputs = Case(tokens=70, batch=batch, key_width=widths[0], value_width=widths[1]).inputs(device=DEVICE)
    with recorded(run=True) as launches:
        over = over_budget(inputs, impl="triton", dtype=torch.bfloat16, products=torch.bfloat16)
    for kernel in ("chunk_states", "state_gradients"):
        own = [x for x in launches if x.name == kernel]
        names = own[0].prepared.kernel.fn.__name__, own[0].prepared.kernel.arg_names.index("first_lane")
        assert names[0] == kernel
        assert [(x.grid[0], x.arguments[names[1]], x.prepared.constants["BV"]) for x in own] == expected
    assert over == {}


def test_states_that_are_left_over_are_never_wider() -> None:
    """Settings of one's own for a width count only where there are programs enough for the GPU."""
    from qed.kernels.recurrence import launch, settings

    shapes = launch.Shapes(torch.bfloat16, 90, 132, 1, 128, 128, 128, False)
    assert shapes.rounds("chunk_states", 142) == [(0, 132), (132, 10)]
    try:
        settings.use_settings({"chunk_states @ 128x128": {"BV": 32, "num_warps": 4}})
        assert shapes.rounds("chunk_states", 142) == [(0, 142)]
    finally:
        settings.use_settings(None)


@pytest.mark.parametrize("log_decay", [-5.0, -20.0, -100.0])
def test_strong_decay(log_decay: float) -> None:
    """However strong the decay, nothing overflows; what is all but forgotten may differ by less than a rounding."""
    case = Case(tokens=100, log_decay=log_decay, constant_decay=True)
    truth = run(case.inputs(device=DEVICE), impl="reference")
    found = run(case.inputs(torch.float32, device=DEVICE), impl="triton")
    for name, x in found.items():
        scale = max(float(truth[name].norm()), float(truth["dq"].norm()))
        assert float((x - truth[name]).norm()) < 1e-5 * scale, name


def test_packed_equals_separate() -> None:
    inputs = Case(tokens=200, state=False).inputs(torch.float32, device=DEVICE)
    offsets = torch.tensor([0, 70, 70, 71, 200], device=DEVICE)
    inputs["initial_state"] = torch.randn(4, 2, 16, 16, device=DEVICE)
    packed = run(inputs, impl="triton", cu_seqlens=offsets)
    truth = run({n: x.double() for n, x in inputs.items()}, impl="reference", cu_seqlens=offsets)
    for name, x in packed.items():
        assert relative_error(x, truth[name]) < 1e-5, name


@pytest.mark.parametrize("lengths", [[], [0, 0], [70, 0, 1, 129, 64, 65, 200], [n * 37 % 150 for n in range(140)]])
def test_the_table_of_packed_sequences(lengths: list[int]) -> None:
    """Every chunk's place, with nothing behind the last one, and the sequences by their number of chunks."""
    from qed.kernels.recurrence.launch import ChunkTable

    offsets = torch.tensor([0, *lengths], device=DEVICE).cumsum(0)
    table = ChunkTable.of(torch.empty(1, sum(lengths), 1, 16, device=DEVICE), offsets)
    assert table.starts is not None
    assert table.lengths is not None
    assert table.first is not None
    assert table.order is not None
    places, first = [], []
    for n, length in enumerate(lengths):
        first.append(len(places))
        places += [(int(offsets[n]) + at, min(64, length - at)) for at in range(0, length, 64)]
    found = list(zip(table.starts.tolist(), table.lengths.tolist(), strict=True))[: table.chunks]
    assert found[: len(places)] == places
    assert all(length == 0 for _, length in found[len(places) :])
    assert table.first.tolist()[: len(lengths)] == first
    by_chunks = sorted(range(len(lengths)), key=lambda n: -((lengths[n] + 63) // 64))
    assert table.order.tolist()[: len(lengths)] == by_chunks


def test_the_batch_changes_nothing() -> None:
    """A sequence's result is the same bits alone, in a batch and packed."""
    inputs = Case(batch=3, tokens=70).inputs(torch.float32, device=DEVICE)
    o, state = erase_write(**inputs, impl="triton")
    alone = {name: x[1:2] for name, x in inputs.items()}
    for x, y in zip(erase_write(**alone, impl="triton"), (o[1:2], state[1:2]), strict=True):
        assert torch.equal(x, y)
    flat = {name: x if name == "initial_state" else x.flatten(0, 1)[None] for name, x in inputs.items()}
    offsets = torch.arange(4, device=DEVICE) * 70
    packed, states = erase_write(**flat, cu_seqlens=offsets, impl="triton")
    assert torch.equal(packed.view_as(o), o)
    assert torch.equal(states, state)


@pytest.mark.parametrize("state", [False, True])
def test_segments_equal_the_serial_pass(state: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few long sequences are cut into segments; here short ones, on purpose."""
    from qed.kernels.recurrence import memory

    inputs = Case(batch=2, tokens=300, heads=1, state=state).inputs(torch.float32, device=DEVICE)
    serial = run(inputs, impl="triton")
    monkeypatch.setattr(memory, "SHORTEST_SEGMENT", 1)
    for name, x in run(inputs, impl="triton").items():
        assert relative_error(x, serial[name]) < 1e-5, name


def test_strides_do_not_matter() -> None:
    inputs = Case(tokens=70).inputs(torch.float32, device=DEVICE)
    strided = {name: x.mT.contiguous().mT for name, x in inputs.items()}
    for name, x in run(strided, impl="triton").items():
        assert torch.equal(x, run(inputs, impl="triton")[name]), name


def test_no_tokens() -> None:
    inputs = Case(tokens=0).inputs(torch.float32, device=DEVICE)
    found = run(inputs, impl="triton")
    assert found["o"].shape == (1, 0, 2, 16)
    assert torch.equal(found["state"], inputs["initial_state"])


@pytest.mark.parametrize("decay", ["none", "head", "channel"])
@pytest.mark.parametrize("widths", [(16, 16), (60, 100)])
def test_step_equals_one_token(widths: tuple[int, int], decay: str) -> None:
    case = Case(batch=3, tokens=1, key_width=widths[0], value_width=widths[1], decay=decay)
    inputs = case.inputs(torch.float32, device=DEVICE)
    truth = erase_write(**{n: None if x is None else x.double() for n, x in inputs.items()}, scale=0.5)
    state = inputs.pop("initial_state")
    token = {name: None if x is None else x[:, 0] for name, x in inputs.items()}
    kept = state.clone()
    o, new = erase_write_step(**token, state=state, scale=0.5, impl="triton")
    assert relative_error(o, truth[0][:, 0]) < 1e-6
    assert relative_error(new, truth[1]) < 1e-6
    assert torch.equal(state, kept)
    o_in_place, same = erase_write_step(**token, state=state, scale=0.5, inplace=True, impl="triton")
    assert same is state
    assert torch.equal(state, new)
    assert torch.equal(o_in_place, o)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_in_place_refuses_what_it_cannot_do(impl: str) -> None:
    inputs = Case(batch=2, tokens=1).inputs(torch.float32, device=DEVICE)
    state = inputs.pop("initial_state")
    token = {name: x[:, 0] for name, x in inputs.items()}
    kept = state.clone()
    with pytest.raises(RuntimeError, match="inplace=True cannot be differentiated"):
        erase_write_step(**(token | {"q": token["q"].clone().requires_grad_()}), state=state, inplace=True, impl=impl)
    if impl == "triton":
        with pytest.raises(ValueError, match="state: inplace=True expects contiguous memory"):
            erase_write_step(**token, state=state.mT, inplace=True, impl=impl)
    assert torch.equal(state, kept)


def test_step_gradients() -> None:
    inputs = Case(batch=2, tokens=1).inputs(torch.float32, device=DEVICE)
    state = inputs.pop("initial_state")

    def gradients(impl: str) -> list[torch.Tensor]:
        leaves = [x[:, 0].clone().requires_grad_() for x in inputs.values()] + [state.clone().requires_grad_()]
        o, new = erase_write_step(*leaves[:-1], state=leaves[-1], impl=impl)
        return list(torch.autograd.grad((o.sum() + (new * new).sum()), leaves))

    for x, y in zip(gradients("triton"), gradients("reference"), strict=True):
        assert relative_error(x, y) < 1e-5


def test_opcheck() -> None:
    inputs = Case(tokens=70).inputs(torch.float32, device=DEVICE)
    q, k, a, u, g, state = (x.requires_grad_() for x in inputs.values())
    torch.library.opcheck(TRITON.saving, (q, k, a, u, g, state, None, 0.5))
    token = tuple(x[:, 0].detach().requires_grad_() for x in (q, k, a, u, g))
    torch.library.opcheck(torch.ops.qed.erase_write_step_triton, (*token, state, 0.5))


@pytest.mark.slow
@pytest.mark.parametrize("decay", [1.0, STRONG])
def test_errors_in_bfloat16(decay: float) -> None:
    """What is promised of 512 tokens: 6e-3, and 1e-2 for dg."""
    torch.manual_seed(0)
    errors = gate(DEVICE, "triton", heads=1, width=128, decay=decay)
    assert {name: x for name, x in errors.items() if not x <= ERROR_BARS[name]} == {}
