"""A prompt in fixed memory, padded to one of a few lengths, is the plain forward: what a GPU captures is right."""

import copy
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from qed import RULES, QEDCache, QEDConfig, QEDForCausalLM, explain, stream
from qed.model import decoding, routes
from qed.model.decoding import LENGTHS, MOST_TOKENS, Decoder, padded_length
from qed.model.fingerprint import fingerprint

STEP, READ = Decoder.step, Decoder.read


def make(**changes: object) -> QEDForCausalLM:
    torch.manual_seed(0)
    return QEDForCausalLM(QEDConfig.tiny(**({"initializer_range": 0.2} | changes))).double().eval()


def prompt(*shape: int) -> torch.Tensor:
    return torch.randint(3, 256, shape, generator=torch.Generator().manual_seed(1))


def mask_of(*lengths: int, tokens: int, gap: bool = False) -> torch.Tensor:
    """A row for each length, its tokens at the end of the row; with a gap, one of them at its beginning."""
    mask = torch.zeros(len(lengths), tokens)
    for row, length in zip(mask, lengths, strict=True):
        row[tokens - length :] = 1
        if gap:
            row[tokens - length], row[0] = 0, 1
    return mask


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The captured routes are taken on a CPU too, where the work of a graph runs as it is; what they did is listed."""
    found: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: found.append(name) or function(*given)

    monkeypatch.setattr(routes, "_pays", lambda device: True)
    monkeypatch.setattr(Decoder, "read", noted("read", READ))
    monkeypatch.setattr(Decoder, "step", noted("step", STEP))
    return found


def same_states(found: QEDCache, truth: QEDCache) -> None:
    assert found.tokens == truth.tokens
    for i in range(len(truth)):
        for x, y in zip(found.get(i), truth.get(i), strict=True):
            torch.testing.assert_close(x, y, atol=1e-9, rtol=0)


def pair(model: QEDForCausalLM, x: torch.Tensor, mask: torch.Tensor | None, start: int) -> tuple[Any, Any]:
    """What the captured route gives for the tokens from `start` on, and what the plain forward does."""
    found = []
    for captured in (True, False):
        with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
            cache = None
            if start:
                before = None if mask is None else mask[:, :start]
                cache = model(x[:, :start], attention_mask=before, use_cache=True).past_key_values
            patch.setattr(routes, "_pays", lambda device, captured=captured: captured)
            options = {"attention_mask": mask, "past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
            found.append(model(x[:, start:], **options))
    return found[0], found[1]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("start", [0, 5])
def test_every_rule_reads_the_same(rule: str, start: int, calls: list[str]) -> None:
    """From the beginning and from a state, with padding before, between and behind the tokens of a batch."""
    model, x = make(rule=rule), prompt(3, 70)
    mask = mask_of(70, 41, 66, tokens=70)
    mask[2, 30:40] = 0
    found, truth = pair(model, x, mask, start)
    torch.testing.assert_close(found.logits, truth.logits, atol=1e-9, rtol=0)
    same_states(found.past_key_values, truth.past_key_values)
    assert calls == ["read"]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("tokens", [1, 2, 3, 63, 64, 65, 127, 128, 129, 192, 193])
def test_lengths_around_those_that_are_captured(tokens: int, batch: int, calls: list[str]) -> None:
    model, x = make(), prompt(batch, 4 + tokens)
    for start in (0, 4):
        found, truth = pair(model, x[:, : start + tokens], None, start)
        torch.testing.assert_close(found.logits, truth.logits, atol=1e-9, rtol=0)
        same_states(found.past_key_values, truth.past_key_values)
    assert calls == ["read", "step" if tokens == 1 else "read"]


def test_prompts_are_padded_by_half_or_a_chunk_at_most() -> None:
    for tokens in range(1, LENGTHS[-1] + 1):
        length = padded_length(1, tokens)
        assert length is not None
        assert tokens <= length <= max(1.5 * tokens, tokens + 64)
    assert padded_length(1, LENGTHS[-1] + 1) is None
    assert padded_length(MOST_TOKENS // 64, 64) == 64
    assert padded_length(MOST_TOKENS // 64 + 1, 64) is None


def test_repeats_are_the_same_to_the_bit(calls: list[str]) -> None:
    """Whatever was read in between, into the same memory."""
    model, x = make().float(), prompt(1, 100)
    options = {"use_cache": True, "logits_to_keep": 1}
    with torch.no_grad():
        first = model(x[:, :40], **options)
        first.past_key_values.detach()
        model(x, **options)
        again = model(x[:, :40], **options)
    assert torch.equal(first.logits, again.logits)
    for i in range(len(again.past_key_values)):
        for a, b in zip(first.past_key_values.get(i), again.past_key_values.get(i), strict=True):
            assert torch.equal(a, b)


def test_a_long_prompt_in_pieces(calls: list[str]) -> None:
    """As a serving loop reads it: two requests in turns, on one decoder, each from its own state."""
    model, x = make(), prompt(2, 150)
    with torch.no_grad():
        truth = model(x).logits[:, -1:]
        caches = [QEDCache(), QEDCache()]
        for start, end in ((0, 64), (64, 100), (100, 150)):
            for i, cache in enumerate(caches):
                options = {"past_key_values": cache, "logits_to_keep": 1}
                logits = model(x[i : i + 1, start:end], **options).logits
                if end == 150:
                    torch.testing.assert_close(logits, truth[i : i + 1], atol=1e-9, rtol=0)
    assert calls == ["read"] * 6
    assert [cache.tokens for cache in caches] == [150, 150]


def test_a_cache_keeps_its_state_when_another_prompt_is_read(calls: list[str]) -> None:
    model, x = make(), prompt(1, 30)
    with torch.no_grad():
        kept = model(x[:, :20], use_cache=True, logits_to_keep=1).past_key_values
        copied = kept.copy()
        model(prompt(1, 25) + 1, use_cache=True, logits_to_keep=1)
        truth = model(x).logits[:, 20:]
        for cache in (kept, copied):
            torch.testing.assert_close(model(x[:, 20:], past_key_values=cache).logits, truth, atol=1e-9, rtol=0)
    assert calls == ["read", "read"]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_captured_prompt_is_copied_by_python_too(copied: Callable[[QEDCache], QEDCache], calls: list[str]) -> None:
    """As transformers' own guides do it, to begin several texts with one prompt."""
    model, x = make(), prompt(1, 30)
    with torch.no_grad():
        cache = model(x[:, :20], use_cache=True, logits_to_keep=1).past_key_values
        again = copied(cache)
        assert again.decoder is None
        assert again.checked is None
        truth = model(x).logits[:, 20:]
        for each in (cache, again):
            torch.testing.assert_close(model(x[:, 20:], past_key_values=each).logits, truth, atol=1e-9, rtol=0)
            assert each.tokens == 30


def test_generate_and_stream_look_at_the_model_once_and_read_once(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x, looks = make(), prompt(2, 20), []
    mask = mask_of(20, 11, tokens=20)
    monkeypatch.setattr(decoding, "fingerprint", lambda m: looks.append(1) or fingerprint(m))
    options = {"max_new_tokens": 9, "pad_token_id": 0, "eos_token_id": None}
    found = model.generate(x, attention_mask=mask, do_sample=False, **options)
    assert (calls, len(looks)) == (["read"], 1)
    assert torch.equal(found[:, 20:], torch.cat(list(stream(model, x, max_new_tokens=9, attention_mask=mask)), 1))
    monkeypatch.setattr(routes, "_pays", lambda device: False)
    assert torch.equal(found, model.generate(x, attention_mask=mask, do_sample=False, **options))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_of_torch_may_follow_one_another(mode: Any, calls: list[str]) -> None:
    """What was made in inference mode is used outside of it, and the other way round."""
    model, x = make(), prompt(1, 10)
    found = []
    for context in (mode, torch.inference_mode, torch.no_grad):
        with context():
            cache = model(x, use_cache=True, logits_to_keep=1).past_key_values
            found.append(model(x[:, :1], past_key_values=cache).logits)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert calls == ["read", "step"] * 3


def test_autocast_gives_the_same_precision(calls: list[str]) -> None:
    model, x = make().float(), prompt(1, 20)
    with torch.autocast("cpu", torch.bfloat16):
        found, truth = pair(model, x, None, 0)
    assert found.logits.dtype == truth.logits.dtype == torch.bfloat16
    torch.testing.assert_close(found.logits, truth.logits, atol=0.1, rtol=0.1)
    assert calls == ["read"]


def test_a_model_that_is_gone_leaves_no_decoder(calls: list[str]) -> None:
    model = make()
    model.generate(prompt(1, 10), max_new_tokens=4, pad_token_id=0)
    decoder = weakref.ref(model.decoders.of(model, 1))
    model.decoders._by_batch.clear()
    assert decoder() is None  # at once, without a search for cycles: its memory is needed
    assert calls == ["read"]


def hook(model: QEDForCausalLM) -> None:
    model.model.layers[0].register_forward_hook(lambda *_: None)


OBSTACLES: dict[str, tuple[dict[str, Any], Callable[[QEDForCausalLM], object] | None]] = {
    "evaluation mode": ({}, lambda model: model.train()),
    "use_cache=False": ({"use_cache": False}, None),
    "rewind": ({"past_key_values": QEDCache(rewind=2)}, None),
    "hidden states of all layers": ({"output_hidden_states": True}, None),
    "logits of other positions than the last": ({"logits_to_keep": 0}, None),
    "a loss": ({"labels": prompt(1, 8), "logits_to_keep": 0}, None),
    "packed sequences": ({"cu_seqlens": torch.tensor([0, 3, 8])}, None),
    "hooks": ({}, hook),
    "plain torch was asked for": ({}, lambda model: model.set_impl("reference")),
    "asks for 1 of the 2 layers": ({}, lambda model: setattr(model.config, "num_hidden_layers", 1)),
    "× 4,097": ({"input_ids": torch.zeros(1, 4097, dtype=torch.long)}, None),
}


@pytest.mark.parametrize("words", OBSTACLES)
def test_what_the_captured_route_does_not_take(words: str, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain forward is taken, and the obstacle says why in words."""
    given, change = OBSTACLES[words]
    model, said = make(), []
    obstacle = routes._prompt_obstacle
    if change is not None:
        change(model)
    captured = copy.copy(routes.PROMPT.routes[0])
    object.__setattr__(captured, "obstacle", lambda *a: said.append(obstacle(*a)) or said[-1])
    monkeypatch.setattr(routes.PROMPT, "routes", (captured, routes.PROMPT.routes[1]))
    with torch.no_grad():
        model(**{"input_ids": prompt(1, 8), "use_cache": True, "logits_to_keep": 1} | given)
    assert calls == []
    assert len(said) == 1
    assert words in said[0]


def test_a_cache_of_another_batch_is_refused(calls: list[str]) -> None:
    model = make()
    with torch.no_grad():
        cache = model(prompt(2, 5), use_cache=True, logits_to_keep=1).past_key_values
        with pytest.raises(ValueError, match="past_key_values: expected 1 sequences, got 2"):
            model(prompt(1, 5), past_key_values=cache, logits_to_keep=1)
        with pytest.raises(ValueError, match=r"attention_mask: expected shape \[2, 10\], got \[2, 7\]"):
            model(prompt(2, 5), attention_mask=torch.ones(2, 7), past_key_values=cache, logits_to_keep=1)


def test_gradients_are_never_captured(calls: list[str]) -> None:
    model = make()
    assert model(prompt(1, 8), use_cache=True, logits_to_keep=1).logits.requires_grad
    assert calls == []


def test_explain_says_why() -> None:
    model = make()
    assert "prompt       reference: " in str(explain(model))
    assert "not captured: it pays on a GPU alone, and the tokens are on cpu" in str(explain(model))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routes, "_pays", lambda device: True)
        assert "prompt       captured: " in str(explain(model))
        assert "generate     captured: " in str(explain(model, do_sample=True, top_k=5, repetition_penalty=1.2))
        assert "these are 1 × 9,000" in str(explain(model, tokens=9000))
        assert "only the plain way has beam search" in str(explain(model, num_beams=3))
        assert "only the plain way has results beside" in str(explain(model, return_dict_in_generate=True))
        assert "does not know the processor TypicalLogitsWarper" in str(explain(model, do_sample=True, typical_p=0.5))
        assert model.decoders._by_batch == {}  # nothing was made
        hybrid = make(layer_types=["qed", "full_attention"])
        assert str(explain(hybrid)).count("not captured: the state of a softmax layer grows") == 2
    with pytest.raises(TypeError, match="expected batch, tokens and options of `generate`, got beams"):
        explain(model, beams=3)
