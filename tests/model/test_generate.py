"""`generate` with captured steps gives what transformers' own loop gives: tokens, ends, padding, and what is left in
the cache and in the random generator."""

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from qed import QEDCache, QEDConfig, QEDForCausalLM, Sampling, stream
from qed.model import generating, routes
from qed.model.decoding import Decoder
from qed.model.sampling import draw


def make(**changes: object) -> QEDForCausalLM:
    torch.manual_seed(0)
    return QEDForCausalLM(QEDConfig.tiny(**({"initializer_range": 0.2} | changes))).double().eval()


def prompt(*shape: int) -> torch.Tensor:
    return torch.randint(3, 256, shape, generator=torch.Generator().manual_seed(1))


class Collected(BaseStreamer):
    """A streamer that notes what it gets."""

    def __init__(self) -> None:
        self.got: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.got.append(value.tolist())

    def end(self) -> None:
        self.got.append("end")


class AfterEven(StoppingCriteria):
    """A text ends with the third even token."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.lengths.append(input_ids.shape[1])
        return (input_ids[:, 10:] % 2 == 0).sum(1) >= 3


class Favourite(LogitsProcessor):
    """A processor of the user's own."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, torch.tensor([7]), 50.0)


def both(
    model: QEDForCausalLM, x: torch.Tensor | None, seed: int = 0, **options: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `generate` gives and leaves behind, on the captured way and on transformers' own."""
    results = []
    for captured in (True, False):
        follows: list[int] = []
        made = {name: value() if isinstance(value, type) else value for name, value in options.items()}
        cache = made.get("past_key_values")
        if cache is not None:
            made["past_key_values"] = cache = cache.copy()
        criterion = AfterEven()
        if made.pop("even", False):
            made["stopping_criteria"] = [criterion]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(routes, "_pays", lambda device, captured=captured: captured)
            follow = Decoder.follow
            patch.setattr(Decoder, "follow", lambda *given, f=follow, n=follows: n.append(given[-1]) or f(*given))
            torch.manual_seed(seed)
            text = model.generate(x, **({"pad_token_id": 0} | made))
        found = {"text": text, "random": torch.rand(3), "follows": follows, "criterion": criterion.lengths}
        found["streamed"] = made["streamer"].got if "streamer" in made else None
        results.append(found | {"cache": cache})
    return results[0], results[1]


def check(found: dict[str, Any], truth: dict[str, Any], *, captured: bool = True) -> None:
    assert bool(found["follows"]) == captured
    assert truth["follows"] == []
    assert torch.equal(found["text"], truth["text"])
    for name in ("streamed", "criterion"):
        assert found[name] == truth[name]
    assert torch.equal(found["random"], truth["random"])
    if found["cache"] is not None:
        assert found["cache"].tokens == truth["cache"].tokens
        states = (tree_leaves(x["cache"].states) for x in (found, truth))
        for a, b in zip(*states, strict=True):
            if isinstance(a, torch.Tensor):
                torch.testing.assert_close(a, b, atol=1e-9, rtol=0)


def ends_of(model: QEDForCausalLM, x: torch.Tensor, *places: int) -> list[int]:
    """Tokens that end the rows of a batch early, each at another place."""
    free = torch.cat(list(stream(model, x, max_new_tokens=max(places) + 1)), 1)
    return [int(row[place]) for row, place in zip(free, places, strict=False)]


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "drawn": {"do_sample": True, "top_k": 0},
    "temperature": {"do_sample": True, "temperature": 0.6, "top_k": 0},
    "top-k": {"do_sample": True, "top_k": 5},
    "top-p": {"do_sample": True, "top_p": 0.8, "top_k": 0},
    "min-p": {"do_sample": True, "min_p": 0.1, "top_k": 0},
    "penalty": {"do_sample": False, "repetition_penalty": 1.7},
    "all": {
        **{"do_sample": True, "temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
        "repetition_penalty": 1.2,
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_transformers_own(way: str) -> None:
    """With and without end tokens. For the same seed drawn ones too; what is left of the generator is the same."""
    model, x = make(), prompt(3, 10)
    free, truth = both(model, x, **WAYS[way], max_new_tokens=22, eos_token_id=None)
    check(free, truth)
    ends = [int(free["text"][row, 10 + place]) for row, place in enumerate((3, 8, 12))]
    found, truth = both(model, x, **WAYS[way], max_new_tokens=22, eos_token_id=ends)
    check(found, truth)
    assert found["text"].shape[1] < free["text"].shape[1]  # and so at least one token was made too many


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 1},
        {"max_new_tokens": 2},
        {"max_length": 14},
        {"max_new_tokens": 20, "min_new_tokens": 10},
        {"max_new_tokens": 20, "min_length": 13},
        {"max_new_tokens": 20, "min_new_tokens": 6, "min_length": 20},
        {"max_new_tokens": 20, "pad_token_id": 9},
        {"max_new_tokens": 20, "streamer": Collected},
        {"max_new_tokens": 20, "even": True},
        {"max_new_tokens": 20, "even": True, "eos_token_id": None},
        {"max_new_tokens": 20, "max_time": 1e6},
        {"max_new_tokens": 12, "num_return_sequences": 2, "do_sample": True},
        {"max_new_tokens": 12, "prefill_chunk_size": 4},
        {"max_new_tokens": 12, "attention_mask": torch.ones(2, 10).index_fill(1, torch.arange(3), 0)},
        {"max_new_tokens": 12, "attention_mask": torch.ones(2, 10).index_fill(1, torch.arange(7, 10), 0)},
    ],
    ids=str,
)
def test_ends_and_lengths(options: dict[str, Any]) -> None:
    """Two rows that end at different places, or at none; whoever looks at tokens sees them in the same order."""
    model, x = make(), prompt(2, 10)
    ends = ends_of(model, x, 5, 12)
    found, truth = both(model, x, **({"do_sample": False, "eos_token_id": ends} | options))
    check(found, truth, captured=options.get("max_new_tokens") != 1)


def test_a_streamer_gets_one_sequence_in_time() -> None:
    """Before more tokens are made, and no token after the end."""
    model, x, order = make(), prompt(1, 10), []
    (end,) = ends_of(model, x, 12)

    class Noted(Collected):
        def put(self, value: torch.Tensor) -> None:
            order.append("put")
            super().put(value)

    with pytest.MonkeyPatch.context() as patch:
        follow = Decoder.follow
        patch.setattr(routes, "_pays", lambda device: True)
        patch.setattr(Decoder, "follow", lambda *given: order.append(given[-1]) or follow(*given))
        streamer = Noted()
        text = model.generate(
            x, max_new_tokens=40, eos_token_id=end, pad_token_id=0, do_sample=False, streamer=streamer
        )
    assert streamer.got == [x.tolist(), *([token] for token in text[0, 10:].tolist()), "end"]
    made, seen = 1, 0
    for what in order[1:]:  # after the prompt itself
        if what == "put":
            seen += 1
        else:
            assert seen == made
            made += what


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("places", [(7,), (3, 11)])
def test_the_callers_cache_has_read_what_the_texts_have(places: tuple[int, ...], do_sample: bool) -> None:
    """Nothing of what came after an end, and padding after the end of a row."""
    model, x = make(), prompt(len(places), 10)
    ends = ends_of(model, x, *places)
    with torch.no_grad():
        cache = model(x[:, :6], use_cache=True).past_key_values
    for given in (QEDCache(), cache):
        options = {"past_key_values": given, "max_new_tokens": 20, "eos_token_id": ends, "do_sample": do_sample}
        found, truth = both(model, x, **options)
        check(found, truth)


def test_a_prompt_of_embeddings() -> None:
    """Which has no tokens: only those that are generated are returned, and counted."""
    model, x = make(), prompt(2, 10)
    inputs = {"inputs_embeds": model.model.embed_tokens(x).detach(), "attention_mask": torch.ones(2, 10)}
    options = {"max_new_tokens": 9, "do_sample": False, "repetition_penalty": 1.4, "eos_token_id": None}
    with pytest.warns(UserWarning, match="only to newly generated tokens"):
        found, truth = both(model, None, **inputs, **options)
    check(found, truth)
    assert found["text"].shape == (2, 9)


def test_a_conversation_goes_on() -> None:
    model, x = make(), prompt(1, 10)
    with pytest.MonkeyPatch.context() as patch:
        texts = []
        for captured in (True, False):
            patch.setattr(routes, "_pays", lambda device, captured=captured: captured)
            cache, text = QEDCache(), x
            for end in (5, 9, 200):
                options = {"past_key_values": cache, "max_new_tokens": 20, "pad_token_id": 0, "eos_token_id": end}
                text = model.generate(torch.cat([text, x[:, :3]], 1), do_sample=False, **options)
            texts.append(text)
    assert torch.equal(*texts)


@pytest.mark.parametrize(
    "options",
    [
        {"logits_processor": [Favourite()]},
        {"typical_p": 0.7, "do_sample": True},
        {"no_repeat_ngram_size": 2},
        {"use_cache": False},
        {"past_key_values": QEDCache(rewind=3)},
    ],
    ids=lambda x: next(iter(x)),
)
def test_what_only_transformers_loop_has(options: dict[str, Any]) -> None:
    found, truth = both(make(), prompt(2, 10), **({"max_new_tokens": 8, "do_sample": False} | options))
    check(found, truth, captured=False)


def test_results_beside_the_tokens_are_transformers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = make(), prompt(1, 10)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    plain = model.generate(x, **options)
    monkeypatch.setattr(routes, "_pays", lambda device: True)
    found = model.generate(x, **options, return_dict_in_generate=True, output_scores=True)
    assert torch.equal(found.sequences, plain)
    assert len(found.scores) == 8
    assert torch.equal(model.generate(x, **options, num_beams=1), plain)


def test_a_streamer_may_generate_with_the_same_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another text on the same decoder, between two tokens, with the caller's cache and an end in the middle."""
    model, x = make(), prompt(1, 10)
    (end,) = ends_of(model, x, 12)
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "eos_token_id": end}
    plain, truth = QEDCache(), QEDCache()
    text = model.generate(x, past_key_values=truth, **options)
    monkeypatch.setattr(routes, "_pays", lambda device: True)

    class Nested(Collected):
        def put(self, value: torch.Tensor) -> None:
            if len(self.got) % 3 == 1:
                model.generate(x + 1, max_new_tokens=3, pad_token_id=0, eos_token_id=None)
            super().put(value)

    assert torch.equal(model.generate(x, past_key_values=plain, streamer=Nested(), **options), text)
    assert plain.tokens == truth.tokens
    for a, b in zip(plain.get(0), truth.get(0), strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=0)


@pytest.mark.parametrize("way", ["generate", "beams", "stream"])
def test_threads_may_generate_with_one_model(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the same time, each its own text, as the threads of a server do."""
    model, prompts = make(), [prompt(1, 10 + i) + i for i in range(3)]
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    options |= {"num_beams": 2} if way == "beams" else {}

    def text(x: torch.Tensor) -> torch.Tensor:
        if way == "stream":
            return torch.cat([x, *stream(model, x, max_new_tokens=20)], 1)
        return model.generate(x, past_key_values=QEDCache(), **options)

    truth = [text(x) for x in prompts]
    monkeypatch.setattr(routes, "_pays", lambda device: True)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # so that threads take turns within a step
    try:
        with ThreadPoolExecutor(3) as threads:
            found = list(threads.map(text, 2 * prompts))
    finally:
        sys.setswitchinterval(before)
    assert all(torch.equal(x, y) for x, y in zip(found, 2 * truth, strict=True))


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_streamer_may_stop_a_text_by_an_error(do_sample: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's cache has then read what it has in transformers' loop, and the generator has drawn as much."""

    class EnoughError(Exception):
        pass

    class Stops(Collected):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.got) == 12:
                raise EnoughError

    model, x, left = make(), prompt(1, 10), []
    for captured in (True, False):
        monkeypatch.setattr(routes, "_pays", lambda device, captured=captured: captured)
        cache, streamer = QEDCache(), Stops()
        options = {"max_new_tokens": 30, "do_sample": do_sample, "pad_token_id": 0, "eos_token_id": None}
        torch.manual_seed(0)
        with pytest.raises(EnoughError):
            model.generate(x, past_key_values=cache, streamer=streamer, **options)
        left.append((cache, streamer.got, torch.rand(2)))
    (found, got, random), (truth, expected, drawn) = left
    assert got == expected
    assert torch.equal(random, drawn)
    assert found.tokens == truth.tokens
    for a, b in zip(found.get(1), truth.get(1), strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=0)


def test_stream_draws_what_generate_draws() -> None:
    """One place says how tokens are chosen: the same words and the same seed give the same tokens."""
    model, x = make(), prompt(2, 10)
    words = {"temperature": 0.7, "top_k": 30, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.3}
    torch.manual_seed(3)
    generated = model.generate(x, do_sample=True, max_new_tokens=20, pad_token_id=0, eos_token_id=None, **words)
    for together in (1, 5, 16):
        torch.manual_seed(3)
        parts = list(stream(model, x, max_new_tokens=20, sampling=Sampling(**words), together=together))
        assert torch.equal(torch.cat(parts, 1), generated[:, 10:])
        assert max(part.shape[1] for part in parts) == together
    with pytest.raises(ValueError, match="together: expected a number of tokens, 1 or more, got 0"):
        next(stream(model, x, max_new_tokens=3, together=0))
    with pytest.raises(ValueError, match="max_new_tokens: expected a number of tokens, 1 or more, got 0"):
        next(stream(model, x, max_new_tokens=0))


def test_a_penalty_counts_in_a_stack_that_is_not_captured_too() -> None:
    model, x = make(layer_types=["qed", "full_attention"]), prompt(2, 10)
    options = {"do_sample": False, "max_new_tokens": 15, "pad_token_id": 0, "eos_token_id": None}
    generated = model.generate(x, repetition_penalty=1.5, **options)
    streamed = torch.cat(list(stream(model, x, max_new_tokens=15, sampling=Sampling(repetition_penalty=1.5))), 1)
    assert torch.equal(streamed, generated[:, 10:])


def test_a_draw_is_multinomials() -> None:
    probabilities = torch.rand(64, 300, generator=torch.Generator().manual_seed(0)).softmax(-1)
    torch.manual_seed(5)
    truth = [torch.multinomial(probabilities, 1)[:, 0] for _ in range(3)]
    torch.manual_seed(5)
    assert all(torch.equal(draw(probabilities), x) for x in truth)


def test_few_steps_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way to choose has a step of its own; lengths before which a text must not end do not make another."""
    monkeypatch.setattr(routes, "_pays", lambda device: True)
    model = make()
    for tokens in (10, 11, 12):
        options = {"max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": 5, "do_sample": False}
        model.generate(prompt(1, tokens), min_new_tokens=tokens - 7, **options)
    decoder = model.decoders.of(model, 1)
    assert len(decoder.steps) == 2
    kept, _ = next(iter(decoder.steps.values()))
    assert kept.until == (10 + 3,)  # of the first call: a graph reads its tensors, which have to stay
    for temperature in range(1, 10):
        options = {"max_new_tokens": 3, "pad_token_id": 0, "do_sample": True, "temperature": temperature / 10}
        model.generate(prompt(1, 10), **options)
    assert len(decoder.steps) <= 8


def test_tokens_are_looked_at_every_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few at first, then as many as `stream` yields together; and never more than are wanted."""
    monkeypatch.setattr(generating, "STRIDE", 8)
    found, _ = both(make(), prompt(1, 10), max_new_tokens=30, eos_token_id=None, do_sample=False)
    assert found["follows"] == [2, 4, 8, 8, 7]
