"""Prompts and `generate` on a GPU: captured, they give what the plain forward and transformers' own loop give."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import GenerationMixin

from qed import QEDCache, QEDConfig, QEDForCausalLM, Sampling, explain, stream
from qed.model import routes
from qed.model.replaying import Replayed
from qed.model.sampling import draw
from qed.testing import relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")]
SIZES = {"hidden_size": 128, "num_heads": 2, "head_dim": 64, "intermediate_size": 256, "num_hidden_layers": 3}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "penalty": {"do_sample": False, "repetition_penalty": 1.3},
    "drawn": {"do_sample": True, "top_k": 0},
    "all": {
        **{"do_sample": True, "temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
        "repetition_penalty": 1.2,
    },
}


def make(dtype: torch.dtype = torch.float32, **changes: object) -> QEDForCausalLM:
    torch.manual_seed(0)
    return QEDForCausalLM(QEDConfig.tiny(**(SIZES | {"initializer_range": 0.1} | changes))).to("cuda", dtype).eval()


def prompt(*shape: int) -> torch.Tensor:
    return torch.randint(3, 256, shape, generator=torch.Generator().manual_seed(1)).cuda()


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """With the plain forward of a prompt."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routes, "_pays", lambda device: False)
        yield


@contextlib.contextmanager
def in_their_loop() -> Iterator[None]:
    """With transformers' own loop, whose single steps are captured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(QEDForCausalLM, "_sample", GenerationMixin._sample)
        yield


def read(model: QEDForCausalLM, x: torch.Tensor, mask: torch.Tensor | None = None, start: int = 0) -> Any:
    """The tokens from `start` on, after those before in a plain pass."""
    with torch.no_grad():
        cache = QEDCache()
        if start:
            with plainly():
                model(x[:, :start], attention_mask=None if mask is None else mask[:, :start], past_key_values=cache)
        return model(x[:, start:], attention_mask=mask, past_key_values=cache, logits_to_keep=1)


@pytest.mark.parametrize(("rule", "dtype"), [("qed", torch.float32), ("qed", torch.bfloat16), ("eda", torch.float32)])
def test_a_captured_prompt_is_the_plain_forward(rule: str, dtype: torch.dtype) -> None:
    """Read as it is, captured and replayed, in any order of lengths; with padding, and from a state. Repeats are the
    same to the bit."""
    model, x, bar = make(dtype, rule=rule), prompt(2, 600), 1e-3 if dtype == torch.float32 else 4e-2
    mask = torch.ones_like(x)
    mask[0, :77] = 0
    found: dict[Any, list[Any]] = {}
    cases = [(tokens, masked, start) for tokens in (5, 600, 130) for masked in (False, True) for start in (0, 3)]
    for _ in range(3):
        for case in cases:
            tokens, masked, start = case
            given = (x[:, -tokens:], mask[:, -tokens:] if masked and tokens > 100 else None, start)
            found.setdefault(case, []).append(read(model, *given))
            found[case][-1].past_key_values.detach()
            with plainly():
                truth = read(model, *given)
            assert relative_error(found[case][-1].logits, truth.logits) < bar, case
            for i in range(3):
                pairs = zip(found[case][-1].past_key_values.get(i), truth.past_key_values.get(i), strict=True)
                assert all(relative_error(a, b) < bar for a, b in pairs), case
    decoder = model.decoders.of(model, 2)
    assert {64, 192, 768} <= set(decoder.captured)
    for first, *others in found.values():
        for other in others:
            assert torch.equal(first.logits, other.logits)
            for i in range(3):
                pairs = zip(first.past_key_values.get(i), other.past_key_values.get(i), strict=True)
                assert all(torch.equal(a, b) for a, b in pairs)


def test_a_prompt_of_4096_tokens_and_one_that_is_longer() -> None:
    model, x = make(torch.bfloat16), prompt(1, 4097)
    for tokens in (4096, 4096, 4096, 4097):
        with plainly():
            truth = read(model, x[:, :tokens]).logits
        assert relative_error(read(model, x[:, :tokens]).logits, truth) < 4e-2
    assert model.decoders.of(model, 1).captured == [4096]
    assert "prompt       captured" in str(explain(model))
    assert "these are 1 × 4,097" in str(explain(model, tokens=4097))


def test_no_layer_is_called_once_a_prompt_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = make(torch.bfloat16), prompt(1, 100)
    truth = [read(model, x).logits for _ in range(2)]
    monkeypatch.setattr(type(model.model), "_run", lambda *_: pytest.fail("Python ran the layers"))
    assert torch.equal(read(model, x).logits, truth[0])


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_generate_is_transformers_own(way: str, batch: int) -> None:
    """Tokens, ends, padding, and the state of the generator after it; three times, as it is captured on the way."""
    model, x = make(), prompt(batch, 20)
    mask = torch.ones_like(x)
    mask[0, :6] = 0
    options = {"attention_mask": mask, "max_new_tokens": 40, "pad_token_id": 0, **WAYS[way]}
    with in_their_loop():
        torch.manual_seed(1)
        free = model.generate(x, eos_token_id=None, **options)
    ends = [int(row[20 + 9 * (i + 1)]) for i, row in enumerate(free)]
    for ending in (None, ends):
        texts = []
        for theirs in (True, False, False, False):
            with in_their_loop() if theirs else contextlib.nullcontext():
                torch.manual_seed(1)
                text = model.generate(x, eos_token_id=ending, **options)
                texts.append((text, torch.rand(4, device="cuda")))
        for run, (text, random) in enumerate(texts[1:]):
            assert text.tolist() == texts[0][0].tolist(), (run, torch.equal(random, texts[0][1]))
            assert torch.equal(random, texts[0][1]), run
    assert model.decoders.of(model, batch).captured


def test_a_draw_is_multinomials() -> None:
    probabilities = torch.rand(64, 32000, device="cuda").softmax(-1)
    torch.manual_seed(5)
    truth = [torch.multinomial(probabilities, 1)[:, 0] for _ in range(3)]
    torch.manual_seed(5)
    assert all(torch.equal(draw(probabilities), x) for x in truth)


def test_the_callers_cache_has_read_what_the_texts_have() -> None:
    model, x = make(), prompt(2, 20)
    free = torch.cat(list(stream(model, x, max_new_tokens=30)), 1)
    options = {
        "max_new_tokens": 40,
        "pad_token_id": 0,
        "do_sample": False,
        "eos_token_id": free[[0, 1], [5, 17]].tolist(),
    }
    found = []
    for theirs in (True, False, False):
        cache = QEDCache()
        with in_their_loop() if theirs else contextlib.nullcontext():
            text = model.generate(x, past_key_values=cache, **options)
        found.append((text, cache.copy()))
    for text, cache in found[1:]:
        assert torch.equal(text, found[0][0])
        assert cache.tokens == found[0][1].tokens
        for i in range(3):
            assert all(relative_error(a, b) < 1e-3 for a, b in zip(cache.get(i), found[0][1].get(i), strict=True))


def test_stream_draws_what_generate_draws_and_yields_one_by_one() -> None:
    model, x = make(torch.bfloat16), prompt(2, 20)
    words = {"temperature": 0.7, "top_k": 30, "top_p": 0.95}
    texts = []
    for together in (16, 1, 16, 5):
        torch.manual_seed(3)
        texts.append(
            torch.cat(list(stream(model, x, max_new_tokens=33, sampling=Sampling(**words), together=together)), 1)
        )
    for _ in range(2):
        torch.manual_seed(3)
        options = {"max_new_tokens": 33, "pad_token_id": 0, "eos_token_id": None}
        texts.append(model.generate(x, do_sample=True, **options, **words)[:, 20:])
    assert all(torch.equal(text, texts[0]) for text in texts)


def test_modes_of_torch_may_follow_one_another() -> None:
    """Captured in one, replayed in another."""
    model, x, texts = make(rule="eda"), prompt(2, 20), []  # whose operands torch compiles
    for context in (torch.inference_mode, torch.no_grad, torch.inference_mode, torch.no_grad):
        with context():
            texts.append(torch.cat(list(stream(model, x, max_new_tokens=8)), 1))
    assert all(torch.equal(text, texts[0]) for text in texts)


def test_work_that_cannot_be_captured_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    count = torch.zeros((), device="cuda")
    replayed = Replayed(count.device)

    def work() -> None:
        count.add_(1)
        count.item()  # the host waits for the device, which a graph cannot

    for i in range(4):
        replayed(work)
        assert int(count) == i + 1
    assert caplog.text.count("could not be captured as a CUDA graph") == 1
    torch.rand(3, device="cuda")  # and random numbers can be drawn


def test_a_replay_draws_what_its_place_in_the_text_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a capture torch sets the numbers from which graphs draw, on the stream of the capture. Here that is late,
    as it may be on a GPU that others use too, and comes while the graph runs unless the caller's stream waits."""
    begin = torch.cuda.CUDAGraph.capture_begin

    def late(self: torch.cuda.CUDAGraph, *given: Any, **options: Any) -> None:
        torch.cuda._sleep(2 * 10**8)  # about a tenth of a second
        begin(self, *given, **options)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", late)
    drawn = torch.zeros(100, device="cuda")
    replayed = Replayed(drawn.device)

    def work() -> None:
        torch.cuda._sleep(4 * 10**8)
        drawn.copy_(torch.rand(100, device="cuda"))

    torch.manual_seed(0)
    truth = [torch.rand(100, device="cuda") for _ in range(5)]
    torch.manual_seed(0)
    for i in range(5):
        replayed(work)
        assert torch.equal(drawn, truth[i]), i
    assert replayed.graph is not None


def test_a_least_length_is_captured_for_good() -> None:
    """Its graph reads the tensor of end tokens, which transformers makes anew for every call."""
    model, x = make(), prompt(1, 20)
    free = torch.cat(list(stream(model, x, max_new_tokens=30)), 1)[0]
    options = {"do_sample": False, "max_new_tokens": 30, "pad_token_id": 0, "eos_token_id": int(free[8])}
    with in_their_loop():
        truth = model.generate(x, min_new_tokens=12, **options)
    for _ in range(4):
        assert torch.equal(model.generate(x, min_new_tokens=12, **options), truth)
        noise = [torch.randint(0, 256, (n,), device="cuda") for n in range(1, 200)]  # where memory was free
        del noise


def test_autocast_leaves_nothing_in_a_graph_that_is_gone_later() -> None:
    """A graph that was captured under autocast does not read the weights that autocast kept meanwhile."""
    model, x, found = make(), prompt(1, 50), []
    for _ in range(4):
        with torch.autocast("cuda", torch.bfloat16):
            found.append(torch.cat(list(stream(model, x, max_new_tokens=12)), 1))
        torch.empty(2**26, device="cuda").normal_()  # where memory was free
    assert all(torch.equal(text, found[0]) for text in found)
    assert len(model.decoders.of(model, 1).captured) == 0  # of the model without autocast
    with torch.autocast("cuda", torch.bfloat16), plainly():
        truth = read(model, x).logits
    with torch.autocast("cuda", torch.bfloat16):
        assert all(relative_error(read(model, x).logits, truth) < 4e-2 for _ in range(3))


def test_a_changed_model_reads_as_it_is_now() -> None:
    model, x = make(theta_init=1.0), prompt(1, 50)
    for _ in range(2):
        read(model, x)
    model.model.layers[1].mixer.lambda_max = 0.9
    model.model.norm.weight = torch.nn.Parameter(torch.rand(128).cuda())
    for _ in range(3):
        found = read(model, x).logits
        with plainly():
            assert relative_error(found, read(model, x).logits) < 1e-3
