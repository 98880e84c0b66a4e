"""The model: padding is inert, packed is separate, cut anywhere is whole, generation is what recomputing gives."""

import copy
from functools import partial

import pytest
import torch

from qed import QEDCache, QEDConfig, QEDForCausalLM, stream
from qed.layers.routes import PROJECTION
from tests.marks import slow

HYBRID = {
    "num_hidden_layers": 4,
    "layer_types": ["qed", "full_attention", "sliding_attention", "eda"],
    "sliding_window": 5,
}
STACKS = {"qed": {}, "hybrid": HYBRID}


def make(stack: str = "qed", **changes: object) -> QEDForCausalLM:
    torch.manual_seed(0)
    return QEDForCausalLM(QEDConfig.tiny(**(STACKS[stack] | {"initializer_range": 0.2} | changes))).double().eval()


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(3, 256, shape, generator=torch.Generator().manual_seed(1))


def close(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.allclose(x, y, rtol=0, atol=1e-9)


def padded(parts: list[torch.Tensor], where: str) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(part.shape[0] for part in parts) + 3
    ids, mask = torch.zeros(len(parts), width, dtype=torch.long), torch.zeros(len(parts), width, dtype=torch.long)
    random = torch.Generator().manual_seed(2)
    for i, part in enumerate(parts):
        n = part.shape[0]
        places = {
            "left": torch.arange(width - n, width),
            "right": torch.arange(n),
            "between": torch.randperm(width, generator=random)[:n].sort().values,
        }[where]
        ids[i, places], mask[i, places] = part, 1
    return ids, mask


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("where", ["left", "right", "between"])
@pytest.mark.parametrize("stack", STACKS)
def test_padding_is_inert(stack: str, where: str, batch: int) -> None:
    """In prefill, and in a second piece that goes on from a warm cache."""
    model = make(stack)
    first, second = ([tokens(9)[:n] + i for i, n in enumerate(x[:batch])] for x in ((7, 2, 9), (4, 1, 6)))
    ids, mask = padded(first, where)
    found = model(ids, attention_mask=mask, use_cache=True)
    more_ids, more_mask = padded(second, where)
    both = torch.cat([mask, more_mask], 1)
    more = model(more_ids, attention_mask=both, past_key_values=found.past_key_values, use_cache=True)
    for i in range(batch):
        alone = model(torch.cat([first[i], second[i]])[None]).logits[0]
        n = first[i].shape[0]
        assert close(found.logits[i, mask[i].bool()], alone[:n])
        assert close(more.logits[i, more_mask[i].bool()], alone[n:])


@pytest.mark.parametrize("stack", STACKS)
def test_packed_is_separate_gradients_included(stack: str) -> None:
    model, x, lengths = make(stack), tokens(1, 20), [6, 1, 13]
    packed = model(x, labels=x, cu_seqlens=torch.tensor([0, 6, 7, 20]))
    found = torch.autograd.grad(packed.loss, list(model.parameters()))
    parts = [model(part, labels=part) for part in x.split(lengths, 1)]
    assert close(packed.logits, torch.cat([part.logits for part in parts], 1))
    counted = [(part.loss, n - 1) for part, n in zip(parts, lengths, strict=True) if n > 1]
    loss = sum(one * n for one, n in counted) / sum(n for _, n in counted)
    assert close(packed.loss, loss)
    for a, b in zip(found, torch.autograd.grad(loss, list(model.parameters())), strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("stack", STACKS)
def test_empty_packed_sequences_change_nothing(stack: str) -> None:
    """Neither before, between nor behind the others."""
    model, x = make(stack), tokens(1, 20)
    truth = model(x, labels=x, cu_seqlens=torch.tensor([0, 6, 20]))
    found = model(x, labels=x, cu_seqlens=torch.tensor([0, 0, 0, 6, 6, 20, 20]))
    assert close(found.logits, truth.logits)
    assert close(found.loss, truth.loss)


@pytest.mark.parametrize("sizes", [[20], [1] * 20, [3, 1, 1, 7, 8], [19, 1], [0, 9, 0, 11]])
@pytest.mark.parametrize("stack", STACKS)
def test_prefill_in_pieces_of_any_size(stack: str, sizes: list[int]) -> None:
    model, x = make(stack), tokens(2, 20)
    cache, logits = QEDCache(), []
    for part in x.split(sizes, 1):
        logits.append(model(part, past_key_values=cache, use_cache=True).logits)
    assert close(torch.cat(logits, 1), model(x).logits)
    assert cache.get_seq_length() == 20


@pytest.mark.parametrize("options", [{}, {"use_cache": False}, {"num_beams": 1, "return_dict_in_generate": True}])
@pytest.mark.parametrize("where", ["left", "right", "between"])
@pytest.mark.parametrize("stack", STACKS)
def test_greedy_generation_is_recomputing(stack: str, where: str, options: dict[str, object]) -> None:
    model, prompts = make(stack), [tokens(8)[:n] for n in (8, 3)]
    ids, mask = padded(prompts, where)
    options = {"max_new_tokens": 7, "do_sample": False, "eos_token_id": None, "pad_token_id": 0} | options
    found = model.generate(ids, attention_mask=mask, **options)
    found = found if isinstance(found, torch.Tensor) else found.sequences
    assert torch.equal(found[:, : ids.shape[1]], ids)
    for row, prompt in zip(found[:, ids.shape[1] :], prompts, strict=True):
        text = prompt
        for _ in range(7):
            text = torch.cat([text, model(text[None]).logits[0, -1].argmax()[None]])
        assert torch.equal(row, text[len(prompt) :])


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=str)
def test_padding_behind_a_prompt_is_inert_in_other_ways_to_generate(options: dict[str, int]) -> None:
    """A prompt of tokens with several beams or with drafts, and one of embeddings."""
    model, x = make(), tokens(6).repeat(2)
    ids, mask = padded([x], "right")
    options |= {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    truth = model.generate(x[None], **options)[:, 12:]
    assert torch.equal(model.generate(ids, attention_mask=mask, **options)[:, ids.shape[1] :], truth)
    if "num_beams" in options:
        inputs = model.model.embed_tokens(ids).detach()
        assert torch.equal(model.generate(inputs_embeds=inputs, attention_mask=mask, **options), truth)


@pytest.mark.parametrize("stack", STACKS)
def test_beams_follow_their_states(stack: str) -> None:
    """With a cache, whose rows are reordered, as without one."""
    model, x = make(stack), tokens(2, 5)
    options = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    mask = torch.ones_like(x)
    with_cache = model.generate(x, attention_mask=mask, **options)
    assert torch.equal(with_cache, model.generate(x, attention_mask=mask, use_cache=False, **options))


def test_sampling_is_reproducible() -> None:
    model, x = make(), tokens(1, 4)
    options = {"max_new_tokens": 8, "do_sample": True, "temperature": 0.8, "top_p": 0.9, "pad_token_id": 0}
    torch.manual_seed(5)
    first = model.generate(x, **options)
    torch.manual_seed(5)
    assert torch.equal(first, model.generate(x, **options))


@pytest.mark.slow
def test_the_cache_does_not_grow() -> None:
    model = make(num_hidden_layers=1).float()
    cache, token = QEDCache(), tokens(1, 1)
    sizes = set()
    with torch.no_grad():
        for _ in range(10_000):
            model(token, past_key_values=cache, use_cache=True)
            sizes.add(sum(x.numel() for x in cache.get(0)))
    assert len(sizes) == 1
    assert cache.get_seq_length() == 10_000


@pytest.mark.parametrize("length", [1, 2, 3, 300])
@pytest.mark.parametrize("masked", [False, True])
def test_the_cache_keeps_nothing_but_states(length: int, masked: bool) -> None:
    """No view of what a state was cut from."""
    model, x = make(), tokens(2, length)
    with torch.no_grad():
        cache = model(x, attention_mask=torch.ones_like(x) if masked else None, use_cache=True).past_key_values
    states = [x for layer in cache.states.values() for x in layer]
    assert sum(x.untyped_storage().nbytes() for x in states) <= 2 * sum(x.nbytes for x in states)


def test_a_cache_can_be_copied() -> None:
    model, x = make(), tokens(1, 6)
    cache = model(x[:, :4], use_cache=True).past_key_values
    kept = cache.copy()
    model(x[:, :2], past_key_values=cache, use_cache=True)
    assert close(model(x[:, 4:], past_key_values=kept).logits, model(x).logits[:, 4:])


def test_embeddings_in_place_of_ids() -> None:
    model, x = make(), tokens(2, 6)
    assert torch.equal(model(inputs_embeds=model.get_input_embeddings()(x)).logits, model(x).logits)
    with pytest.raises(ValueError, match="exactly one"):
        model()


def test_logits_to_keep() -> None:
    model, x = make(), tokens(2, 6)
    whole = model(x).logits
    assert close(model(x, logits_to_keep=2).logits, whole[:, -2:])
    assert close(model(x, logits_to_keep=torch.tensor([0, 3])).logits, whole[:, [0, 3]])
    with pytest.raises(ValueError, match="labels: a loss needs every position's logits"):
        model(x, labels=x, logits_to_keep=1)


def test_the_loss_is_of_the_next_token() -> None:
    model, x = make(), tokens(2, 6)
    labels = x.clone()
    labels[0, :3] = -100
    logits, targets = model(x).logits[:, :-1], labels[:, 1:]
    picked = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    truth = -(picked * (targets >= 0)).sum() / (targets >= 0).sum()
    assert close(model(x, labels=labels).loss, truth)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("stack", STACKS)
def test_gradient_checkpointing_changes_nothing(stack: str, reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where blocks write over the residual stream when no gradient is recorded, as on a GPU."""
    routes = tuple(copy.copy(route) for route in PROJECTION.routes)
    for route in routes:
        on_gpu = partial(lambda check, call, *x: check(call._replace(device=torch.device("cuda")), *x), route.obstacle)
        object.__setattr__(route, "obstacle", on_gpu)
    monkeypatch.setattr(PROJECTION, "routes", routes)
    model, x = make(stack).train(), tokens(2, 9)
    model(x, labels=x).loss.backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    model(x, labels=x).loss.backward()
    for p, truth in zip(model.parameters(), expected, strict=True):
        assert torch.allclose(p.grad, truth, rtol=0, atol=1e-12)


def test_the_strength_scale_acts_in_prefill_and_decoding() -> None:
    """At 0 QED is GDN-2; at 1 it is itself again; in between the logits differ."""
    model, x = make(theta_init=2.0), tokens(1, 9)
    plain = make(rule="gdn2")
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if "theta" not in k})
    usual = model(x).logits
    model.set_strength_scale(0.0)
    cache = QEDCache()
    pieces = [model(part, past_key_values=cache, use_cache=True).logits for part in x.split([6, 1, 1, 1], 1)]
    assert close(torch.cat(pieces, 1), plain(x).logits)
    model.set_strength_scale(2.0)
    assert not close(model(x).logits, usual)
    model.set_strength_scale(1.0)
    assert torch.equal(model(x).logits, usual)


@pytest.mark.parametrize("mode", ["train", *slow("infer", "mask", "packed", "decode")])
@pytest.mark.parametrize("stack", STACKS)
def test_compiles_whole(stack: str, mode: str) -> None:
    model, x = make(stack).float(), tokens(2, 20)
    model.train(mode == "train")
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    options: dict[str, object] = {}
    if mode == "mask":
        options["attention_mask"] = padded([tokens(17), tokens(9)], "left")[1]
    if mode == "packed":
        x, options["cu_seqlens"] = x.reshape(1, -1), torch.tensor([0, 13, 40])
    if mode == "decode":
        with torch.no_grad():
            cache = model(x, use_cache=True).past_key_values
            expected = model(x[:, :1], past_key_values=cache.copy()).logits
            assert torch.allclose(compiled(x[:, :1], past_key_values=cache).logits, expected, atol=1e-5)
        return
    found, truth = compiled(x, labels=x, **options), model(x, labels=x, **options)
    assert torch.allclose(found.logits, truth.logits, atol=1e-5)
    parameters = list(model.parameters())
    pairs = zip(torch.autograd.grad(found.loss, parameters), torch.autograd.grad(truth.loss, parameters), strict=True)
    for a, b in pairs:
        assert torch.allclose(a, b, atol=1e-5)


def test_arguments_that_do_not_go_together() -> None:
    model, x = make(), tokens(1, 6)
    offsets = torch.tensor([0, 2, 6])
    with pytest.raises(ValueError, match="cu_seqlens: packed sequences go with neither an attention_mask nor a cache"):
        model(x, cu_seqlens=offsets, attention_mask=torch.ones_like(x))
    with pytest.raises(ValueError, match="cu_seqlens: packed sequences need batch size 1, got 2"):
        model(x.expand(2, -1), cu_seqlens=offsets)
    with pytest.raises(ValueError, match=r"cu_seqlens: expected whole numbers \[N \+ 1\], .* got shape \[1, 3\]"):
        model(x, cu_seqlens=offsets[None], position_ids=torch.arange(6))
    for inputs in (x[0], x[None]):
        with pytest.raises(ValueError, match=r"input_ids: expected shape \[B, T\], got "):
            model(inputs)
        with pytest.raises(ValueError, match=r"inputs_embeds: expected shape \[B, T, hidden\], got "):
            model.model(inputs_embeds=inputs[..., 0].double())
    with pytest.raises(ValueError, match=r"input_ids: expected whole numbers of 32 or 64 bits, got torch.float32"):
        model(x.float())
    with pytest.raises(ValueError, match="input_ids, inputs_embeds: expected exactly one of them"):
        model(x, inputs_embeds=model.model.embed_tokens(x))
    with pytest.raises(ValueError, match=r"attention_mask: expected shape \[1, 6\], got \[1, 4\]"):
        model(x, attention_mask=torch.ones(1, 4))
    with pytest.raises(TypeError, match=r"past_key_values: expected a QEDCache .* got tuple"):
        model(x, past_key_values=())
    with pytest.raises(ValueError, match=r"cache_implementation: .* a cache of its own"):
        model.generate(x, max_new_tokens=2, cache_implementation="static")


@pytest.mark.parametrize("stack", STACKS)
def test_a_cache_of_another_batch_is_refused(stack: str) -> None:
    model, x = make(stack), tokens(2, 6)
    cache = model(x, use_cache=True).past_key_values
    for more in (x[:1], x[:1, :1]):
        with pytest.raises(ValueError, match="past_key_values: expected 1 sequences, got 2"):
            model(more, past_key_values=cache)


def test_nothing_to_go_on_from() -> None:
    model, x = make(), tokens(1, 0)
    embeddings = model.model.embed_tokens(x)
    with pytest.raises(ValueError, match="input_ids: expected at least one token to go on from"):
        next(stream(model, x, max_new_tokens=2))
    for given, name in (({"inputs": x}, "input_ids"), ({"inputs_embeds": embeddings}, "inputs_embeds")):
        with pytest.raises(ValueError, match=f"{name}: expected at least one token to go on from"):
            model.generate(**given, attention_mask=torch.ones(1, 0), max_new_tokens=2, pad_token_id=0)
