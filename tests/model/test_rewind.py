"""A cache that goes back is the cache of the shorter text, and so assisted generation is plain generation."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from qed import RULES, QEDCache, QEDConfig, QEDForCausalLM
from qed.layers import Mixer, Sequences
from qed.model import generation
from qed.model.decoding import Decoder, continued
from qed.model.sampling import Sampling

STACKS: dict[str, dict[str, Any]] = {rule: {"rule": rule} for rule in RULES}
STACKS |= {"sliding": {"layer_types": ["qed", "sliding_attention"], "sliding_window": 4}}
STACKS |= {"full": {"layer_types": ["full_attention", "eda"]}, "no convolution": {"conv_size": 1}}
OPTIONS = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def make(seed: int = 0, **changes: Any) -> QEDForCausalLM:
    torch.manual_seed(seed)
    return QEDForCausalLM(QEDConfig.tiny(**({"initializer_range": 0.2} | changes))).double().eval()


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 256, shape, generator=torch.Generator().manual_seed(seed))


class Text:
    """A text as it is read, columns of tokens and which of them exist, beside a cache that reads it in pieces."""

    def __init__(self, model: QEDForCausalLM, rows: int, rewind: int):
        self.model, self.cache = model, QEDCache(rewind=rewind)
        self.ids, self.mask = tokens(rows, 0), torch.ones(rows, 0, dtype=torch.bool)

    def read(self, count: int, mask: torch.Tensor | None = None) -> torch.Tensor:
        new = tokens(self.ids.shape[0], count, seed=self.ids.shape[1])
        there = torch.ones(new.shape, dtype=torch.bool) if mask is None else mask
        self.ids, self.mask = torch.cat([self.ids, new], 1), torch.cat([self.mask, there], 1)
        given = None if mask is None else self.mask
        return self.model(new, attention_mask=given, past_key_values=self.cache).logits

    def crop(self, count: int) -> None:
        self.cache.crop(-count)
        end = self.ids.shape[1] - count
        self.ids, self.mask = self.ids[:, :end], self.mask[:, :end]

    def change(self, rows: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.ids, self.mask = rows(self.ids), rows(self.mask)

    def check(self) -> None:
        """The cache has the states of its text read at once, and goes on as that does."""
        assert self.cache.get_seq_length() == self.ids.shape[1]
        truth = QEDCache()
        if self.ids.shape[1]:
            self.model(self.ids, attention_mask=self.mask, past_key_values=truth)
        for layer, state in truth.states.items():
            if hasattr(state, "recurrent"):
                mine = self.cache.get(layer)
                torch.testing.assert_close(mine.recurrent, state.recurrent, atol=1e-11, rtol=1e-9)
                exists = self.mask.sum(1)[:, None] > torch.arange(state.conv.shape[1]).flip(0)
                torch.testing.assert_close(mine.conv[exists], state.conv[exists], atol=1e-11, rtol=1e-9)
        following = tokens(self.ids.shape[0], 7)
        found = self.model(following, past_key_values=self.cache.copy()).logits
        torch.testing.assert_close(found, self.model(following, past_key_values=truth).logits, atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("stack", STACKS)
@torch.no_grad()
def test_a_cropped_cache_is_that_of_the_shorter_text(stack: str) -> None:
    """After a prompt, after single tokens and pieces, and after crop upon crop."""
    text = Text(make(**STACKS[stack]), rows=2, rewind=5)
    for length, removed in ((20, 5), (3, 3), (1, 1), (1, 0), (40, 2)):
        text.read(length)
        text.crop(removed)
        text.check()
    text.crop(3)
    text.check()
    for _ in range(23):
        text.read(1)
    text.crop(4)
    text.check()


@st.composite
def histories(draw: Any) -> list[tuple[str, Any]]:
    """What happens to a cache of three rows that can go back 4 tokens: pieces with any padding, crops, other orders."""
    steps: list[tuple[str, Any]] = []
    for _ in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(["read", "read", "padded", "crop", "crop", "reorder"]))
        if kind == "reorder":
            steps.append((kind, draw(st.lists(st.integers(0, 2), min_size=3, max_size=3))))
        elif kind == "padded":
            length = draw(st.integers(1, 14))
            rows = st.lists(st.booleans(), min_size=length, max_size=length)
            steps.append((kind, draw(st.lists(rows, min_size=3, max_size=3))))
        else:
            steps.append((kind, draw(st.integers(1, 14 if kind == "read" else 4))))
    return steps


@pytest.mark.parametrize("stack", ["qed", "eda", "sliding", "full"])
@settings(max_examples=6)
@given(steps=histories())
@torch.no_grad()
def test_whatever_a_cache_went_through(stack: str, steps: list[tuple[str, Any]]) -> None:
    text = Text(make(**STACKS[stack]), rows=3, rewind=4)
    for kind, value in [("padded", [[False, True, True], [True] * 3, [True, True, False]]), *steps]:
        if kind == "read":
            text.read(value)
        elif kind == "padded":
            text.read(len(value[0]), torch.tensor(value))
        elif kind == "crop":
            text.crop(min(value, text.cache.removable))
        elif text.cache.is_initialized:
            text.cache.reorder_cache(torch.tensor(value))
            text.change(lambda x, value=value: x[value])
    text.check()
    text.crop(text.cache.removable)
    text.check()


@torch.no_grad()
def test_copies_and_repeated_rows_go_back_too() -> None:
    text = Text(make(**STACKS["sliding"]), rows=2, rewind=6)
    text.read(9, torch.arange(9) >= torch.tensor([[0], [5]]))
    copied, cache = text.cache.copy(), text.cache
    text.read(2)
    text.cache.batch_repeat_interleave(2)
    text.change(lambda x: x.repeat_interleave(2, 0))
    text.crop(5)
    text.check()
    text.cache.batch_select_indices(torch.tensor([3, 0]))
    text.change(lambda x: x[[3, 0]])
    text.check()
    assert cache.removable == 1
    copied.crop(-6)
    assert (copied.tokens, cache.tokens) == (3, 6)


@torch.no_grad()
def test_how_far_back() -> None:
    """The error names it, and the cache is as it was."""
    text = Text(make(), rows=1, rewind=3)
    text.read(2)
    for removed, length in ((3, 2), (4, 20)):
        text.read(length - text.ids.shape[1])
        with pytest.raises(ValueError, match=rf"rewind=3\), can go back {min(length, 3)} tokens now, got {removed}"):
            text.cache.crop(-removed)
        text.check()
    with pytest.raises(ValueError, match="crop: expected 0, or how many tokens to remove as a negative number, got 2"):
        text.cache.crop(2)
    text.crop(2)
    with pytest.raises(ValueError, match="can go back 1 tokens now, got 2"):
        text.cache.crop(-2)
    for rewind in (-1, 1.0, True, "3"):
        with pytest.raises(ValueError, match="rewind: expected a number of tokens, 0 or more, got"):
            QEDCache(rewind=rewind)
    with pytest.raises(ValueError, match=r"QEDCache\(rewind=0\), can go back 0 tokens now, got 1"):
        text.model(text.ids).past_key_values.crop(-1)


@torch.no_grad()
def test_back_to_nothing() -> None:
    text = Text(make(), rows=2, rewind=4)
    text.read(4)
    text.crop(4)
    assert not text.cache.is_initialized
    text.read(3, torch.tensor([[0, 1, 1], [1, 1, 1]]).bool())
    text.crop(1)
    text.check()


def test_an_empty_cache_has_no_batch_size_yet() -> None:
    assert QEDCache().batch_size == -1  # transformers' own caches say it so


@torch.no_grad()
def test_what_is_kept_does_not_grow() -> None:
    """Neither with the tokens that are decoded, nor with the prompt it was cut from."""
    model, sizes = make(), set()
    cache = QEDCache(rewind=8)
    model(tokens(1, 400), past_key_values=cache)
    kept = [x for x in tree_leaves(cache.states) if isinstance(x, torch.Tensor)]
    assert sum(x.untyped_storage().nbytes() for x in kept) <= 2 * sum(x.nbytes for x in kept)
    for i in range(60):
        model(tokens(1, 1, seed=i), past_key_values=cache)
        sizes.add(sum(x.numel() for x in tree_leaves(cache.states) if isinstance(x, torch.Tensor)))
    assert len(sizes) == 11  # between 11 and 21 tokens: the window of the convolution is three


# Assisted generation


@contextmanager
def counted(model: QEDForCausalLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, list[int]]]:
    """The lengths of what the model reads, and how many tokens its caches were cropped by."""
    found: dict[str, list[int]] = {"read": [], "cropped": []}
    crop = QEDCache.crop
    hook = model.model.register_forward_pre_hook(
        lambda _, __, options: found["read"].append(options["input_ids"].shape[1]), with_kwargs=True
    )
    monkeypatch.setattr(QEDCache, "crop", lambda self, n: found["cropped"].append(-n) or crop(self, n))
    yield found
    hook.remove()
    monkeypatch.undo()


def drafting(count: int, schedule: str = "constant", seed: int = 5, **changes: Any) -> QEDForCausalLM:
    """Returns an assistant; with seed 0 it is the model itself, otherwise very wrong."""
    model = make(seed, **changes)
    model.generation_config.num_assistant_tokens = count
    model.generation_config.num_assistant_tokens_schedule = schedule
    return model


SMALL = {"num_hidden_layers": 1, "layer_types": ["gdn"], "hidden_size": 32}
HELP: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "prompt lookup": ("qed", lambda: {"prompt_lookup_num_tokens": 6}),
    "prompt lookup in a hybrid": ("sliding", lambda: {"prompt_lookup_num_tokens": 6}),
    "a wrong assistant": ("qed", lambda: {"assistant_model": drafting(4)}),
    "a smaller one of a hybrid": ("sliding", lambda: {"assistant_model": drafting(4, **SMALL)}),
    "a hybrid": ("eda", lambda: {"assistant_model": drafting(4, **STACKS["sliding"])}),
    "the model itself": ("qed", lambda: {"assistant_model": drafting(5, seed=0)}),
    "longer and longer drafts": ("qed", lambda: {"assistant_model": drafting(2, "heuristic", seed=0)}),
    "early exit": ("qed", lambda: {"assistant_early_exit": 1}),
}


@pytest.mark.parametrize("kind", HELP)
def test_assisted_generation_is_greedy_generation(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stack, assistance = HELP[kind]
    model, x, options = make(**STACKS[stack]), tokens(1, 9).repeat(1, 3), OPTIONS | {"max_new_tokens": 20}
    model.generation_config.num_assistant_tokens = 4
    plain, help_ = model.generate(x, **options), assistance()
    assert torch.equal(model.generate(x, **options, **help_), plain)
    mask = torch.ones(1, 32)
    mask[:, :5] = 0
    padded = torch.cat([tokens(1, 5), x], 1)
    assert torch.equal(model.generate(padded, attention_mask=mask, **options, **help_)[:, 5:], plain)
    cache = QEDCache(rewind=1)
    with counted(model, monkeypatch) as found:
        drawn = model.generate(x, past_key_values=cache, **(options | help_ | {"do_sample": True, "top_k": 1}))
    assert torch.equal(drawn, plain)
    assert cache.tokens == plain.shape[1] - 1
    if kind == "the model itself":
        assert found["read"] == [27 + 5, 6, 6, 2]
        assert not any(found["cropped"])
    elif kind == "a wrong assistant":
        assert max(found["cropped"]) == 4


def test_drafts_that_grow_and_then_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The assistant's cache can go back over all of the last one, though it was made for the first."""
    monkeypatch.setattr(generation, "LOOKBEHIND", 1)
    model, x, options, calls = make(), tokens(1, 9), OPTIONS | {"max_new_tokens": 24}, []
    assistant = drafting(2, "heuristic", seed=0)
    assistant.lm_head.register_forward_hook(lambda _, __, y: calls.append(1) or (y if len(calls) <= 6 else -y))
    plain = model.generate(x, **options)
    with counted(model, monkeypatch) as found:
        assert torch.equal(model.generate(x, assistant_model=assistant, **options), plain)
    assert max(found["cropped"]) >= 6


def test_an_early_exit_leaves_layers_out() -> None:
    model, x, calls = make(), tokens(1, 9), []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda *_, layer=layer: calls.append(layer))
    model.generation_config.num_assistant_tokens = 3
    model.generate(x, assistant_early_exit=1, max_new_tokens=8, **OPTIONS)
    first, second = (sum(x is layer for x in calls) for layer in model.model.layers)
    assert first > second


def test_it_assists_other_models() -> None:
    """And may be very wrong, as this one is."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    other = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, initializer_range=0.2)).double().eval()
    x, options = tokens(1, 9), OPTIONS | {"max_new_tokens": 12}
    assert torch.equal(other.generate(x, assistant_model=drafting(3), **options), other.generate(x, **options))


def test_assisted_sampling_runs_and_beams_go_on() -> None:
    model, x = make(), tokens(1, 12)
    drawn = model.generate(x, assistant_model=drafting(3), do_sample=True, max_new_tokens=20, pad_token_id=0)
    assert 12 < drawn.shape[1] <= 32
    options = OPTIONS | {"max_new_tokens": 8, "num_beams": 3}
    assert torch.equal(model.generate(x, past_key_values=QEDCache(rewind=4), **options), model.generate(x, **options))


@torch.no_grad()
def test_a_conversation_goes_on_after_assistance() -> None:
    """With the cache that `generate` made, and returns."""
    model, x = make(), tokens(1, 9).repeat(1, 2)
    options = OPTIONS | {"max_new_tokens": 12, "return_dict_in_generate": True}
    first = model.generate(x, prompt_lookup_num_tokens=5, **options)
    longer = torch.cat([first.sequences, tokens(1, 4)], 1)
    again = model.generate(longer, past_key_values=first.past_key_values, **options)
    assert torch.equal(again.sequences, model.generate(longer, **options).sequences)


@torch.no_grad()
@pytest.mark.parametrize("read", [1, 11, 17])
@pytest.mark.parametrize("whole", [True, False])
def test_a_conversation_goes_on_with_assistance(whole: bool, read: int) -> None:
    """With a cache that has read a part of the text already, which is given with the rest or left out."""
    model, x = make(), tokens(1, 9).repeat(1, 2)
    options = OPTIONS | {"max_new_tokens": 12, "prompt_lookup_num_tokens": 5}
    cache = QEDCache(rewind=1)
    model(x[:, :read], past_key_values=cache)
    start = 0 if whole else read
    given = {"attention_mask": torch.ones(1, 18), "past_key_values": cache}
    if not whole and transformers.__version__.startswith("5.17."):  # which cuts the mask to the text that is given
        with pytest.raises(ValueError, match="attention_mask: expected shape"):
            model.generate(x[:, start:], **given, **options)
        return
    found = model.generate(x[:, start:], **given, **options)
    assert torch.equal(found[:, 18 - start :], model.generate(x, **options)[:, 18:])


# What is refused, before anything runs


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"prompt_lookup_num_tokens": 3, "past_key_values": QEDCache()},
            ValueError,
            r"past_key_values: assisted generation removes rejected tokens, .* expected QEDCache\(rewind=1\) or more",
        ),
        ({"past_key_values": DynamicCache()}, TypeError, r"expected a QEDCache \(`from qed .*got DynamicCache"),
        ({"cache_implementation": "static"}, ValueError, "a cache of its own, QEDCache; expected None, got 'static'"),
        (
            {"cache_implementation": "paged"},
            NotImplementedError,
            "continuous batching: .* use `generate` with a",
        ),
        ({"prompt_lookup_num_tokens": 3, "use_cache": False}, ValueError, "use_cache=True"),
        ({"read": 4, "use_cache": False}, ValueError, "with use_cache=False every step reads the whole"),
        ({"read": 6}, ValueError, "expected a cache that has not read the prompt's last token, .* tokens=6"),
        ({"read": 6, "prefill_chunk_size": 2}, ValueError, "has not read the prompt's last token"),
        ({"read": 9, "num_beams": 2}, ValueError, "expected a cache that has not read the prompt's last token"),
        ({"read": 6, "prompt_lookup_num_tokens": 3}, ValueError, "has not read the prompt's last token"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_refused_at_the_start(options: dict[str, Any], error: type[Exception], message: str) -> None:
    model, x, calls, options = make(), tokens(1, 6), [], dict(options)
    if "read" in options:
        options["past_key_values"] = cache = QEDCache(rewind=1)
        model(tokens(1, options.pop("read")), past_key_values=cache)
    model.model.register_forward_pre_hook(lambda *_: calls.append(1))
    with pytest.raises(error, match=message):
        model.generate(x, max_new_tokens=3, pad_token_id=0, **options)
    assert not calls


def test_transformers_caches_are_refused_by_a_call_too() -> None:
    model, x = make(), tokens(1, 6)
    for cache in (DynamicCache(), DynamicCache(config=model.config), StaticCache(model.config, max_cache_len=9)):
        with pytest.raises(TypeError, match=rf"expected a QEDCache .* got {type(cache).__name__}"):
            model(x, past_key_values=cache)
    with pytest.raises(NotImplementedError, match="continuous batching"):
        model.generate_batch([[3, 4, 5]])


def test_what_cannot_be_recorded() -> None:
    """Captured steps and packed sequences keep nothing to go back to."""
    model, x = make(), tokens(1, 6)
    cache = QEDCache(rewind=2)
    with torch.no_grad():
        logits = model(x, past_key_values=cache).logits[:, -1]
        with pytest.raises(ValueError, match=r"a captured step keeps nothing to go back to; .* got QEDCache\(rewind=2"):
            Decoder(model, 1).start(cache)
        found = torch.cat(list(continued(model, logits, cache, max_new_tokens=6, sampling=Sampling())), 1)
        cache.crop(-2)
        found = torch.cat([x, found], 1)
        rest = model(found[:, cache.tokens :], past_key_values=cache).logits.argmax(-1)
    assert torch.equal(rest[:, :-1], found[:, cache.tokens - rest.shape[1] + 1 :])
    mixer = Mixer(hidden_size=8, num_heads=1, head_dim=8, value_head_dim=8)
    with pytest.raises(ValueError, match="rewind: packed sequences have no state to go back to"):
        mixer(torch.zeros(1, 4, 8), sequences=Sequences(cu_seqlens=torch.tensor([0, 4])), rewind=1)
