"""Decoding in place is recomputing; caches and decoders share memory without mixing sequences up."""

import copy
import json
import pickle
from collections.abc import Callable, Iterator
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from qed import RULES, QEDConfig, QEDForCausalLM
from qed.cli import app
from qed.model import decoding, routes
from qed.model.decoding import Decoder, stream
from qed.model.fingerprint import fingerprint
from qed.model.sampling import Sampling


def make(**changes: object) -> QEDForCausalLM:
    torch.manual_seed(0)
    return QEDForCausalLM(QEDConfig.tiny(**({"initializer_range": 0.2} | changes))).double().eval()


def prompt(*shape: int) -> torch.Tensor:
    return torch.randint(3, 256, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("rule", RULES)
def test_streamed_greedy_tokens_are_recomputed_ones(rule: str) -> None:
    model, x = make(rule=rule), prompt(2, 6)
    found = torch.cat(list(stream(model, x, max_new_tokens=20)), 1)
    assert found.shape == (2, 20)
    text = x
    for i in range(20):
        text = torch.cat([text, model(text).logits[:, -1:].argmax(-1)], 1)
        assert torch.equal(found[:, i], text[:, -1]), i


@pytest.mark.parametrize("layers", [["qed", "qed"], ["qed", "full_attention"]], ids=str)
@pytest.mark.parametrize("places", [slice(4, 10), slice(0, 6), [0, 1, 3, 6, 7, 8]], ids=["left", "right", "between"])
def test_padding_is_inert_here_too(places: Any, layers: list[str]) -> None:
    model, x = make(layer_types=layers), prompt(1, 6)
    padded, mask = torch.zeros(2, 10, dtype=torch.long), torch.zeros(2, 10)
    padded[:, places], mask[:, places] = x, 1
    with_padding = torch.cat(list(stream(model, padded, max_new_tokens=9, attention_mask=mask)), 1)
    assert torch.equal(with_padding[:1], torch.cat(list(stream(model, x, max_new_tokens=9)), 1))


def test_two_caches_on_one_decoder() -> None:
    """Each goes on from its own state, whichever ran last."""
    model, x = make(), prompt(2, 7)
    caches = [model(x[i : i + 1, :5], use_cache=True).past_key_values for i in range(2)]
    decoder = model.decoders.of(model, 1)
    assert model.decoders.of(model, 1) is decoder
    with torch.no_grad():
        for t in (5, 6):
            for i, cache in enumerate(caches):
                decoder.start(cache)
                logits = decoder.step(x[i : i + 1, t : t + 1])
                assert torch.allclose(logits, model(x[i : i + 1, : t + 1]).logits[:, -1], atol=1e-9)


@pytest.mark.parametrize("stack", [{}, {"layer_types": ["qed", "full_attention"]}], ids=["qed", "hybrid"])
def test_a_mask_counts_for_one_token_too(stack: dict[str, Any]) -> None:
    """A row whose token is not there goes on from where it was."""
    model, x = make(**stack), prompt(2, 8)
    cache = model(x[:, :5], use_cache=True).past_key_values
    mask = torch.ones(2, 6)
    mask[1, 5] = 0
    first = model(x[:, 5:6], attention_mask=mask, past_key_values=cache).logits
    rest = model(x[:, 6:], past_key_values=cache).logits
    whole, without = model(x).logits, model(torch.cat([x[1:, :5], x[1:, 6:]], 1)).logits
    assert torch.allclose(torch.cat([first[:1], rest[:1]], 1), whole[:1, 5:], atol=1e-9)
    assert torch.allclose(rest[1:], without[:, 5:], atol=1e-9)


def test_generate_goes_on_without_the_mask_it_made_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that its steps are dense ones; the first, of the prompt, has the caller's mask."""
    model, x, masks = make(), prompt(2, 5), []
    step = type(model.model).forward
    monkeypatch.setattr(
        type(model.model), "forward", lambda *a, **n: masks.append(n["attention_mask"] is None) or step(*a, **n)
    )
    mask = torch.ones_like(x)
    mask[0, :2] = 0
    model.generate(x, attention_mask=mask, max_new_tokens=4, eos_token_id=None, pad_token_id=0)
    assert masks == [False, True, True, True]


def test_a_cache_of_another_batch_is_refused() -> None:
    model, x = make(), prompt(1, 5)
    cache = model(x, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="past_key_values: expected 3 sequences, got 1"):
        Decoder(model, 3).start(cache)


def test_streams_side_by_side() -> None:
    """Of one model and one batch size, taken in turns, one given up on the way, and plain calls in between."""
    model, prompts = make(), [prompt(1, 6), prompt(1, 6) + 1, prompt(1, 4)]

    def started(n: int = 14) -> list[Iterator[torch.Tensor]]:
        return [stream(model, x, max_new_tokens=n, sampling=Sampling(), together=3) for x in prompts]

    alone = [torch.cat(list(x), 1) for x in started()]
    for turns in ([0, 1, 2] * 6, [0, 0, 1, 2, 1, 1, 0, 2, 2, 2, 1, 0, 0, 1, 2, 0]):
        running, found = started(), [[] for _ in prompts]
        for i in turns:
            found[i] += [x for x in (next(running[i], None),) if x is not None]
            model.generate(prompts[2], max_new_tokens=2, pad_token_id=0)
        for parts, truth in zip(found, alone, strict=True):
            text = torch.cat(parts, 1)
            assert torch.equal(text, truth[:, : text.shape[1]])
    given_up, other = started()[:2]
    list(chain.from_iterable(zip_longest(*(next(x) for x in (given_up, other)))))
    given_up.close()
    assert torch.equal(torch.cat([prompt(1, 0), *other], 1), alone[1][:, 1:])


def test_a_model_may_change_between_the_tokens_of_a_stream() -> None:
    model, x = make(theta_init=3.0), prompt(1, 6)
    found = []
    for i, token in enumerate(stream(model, x, max_new_tokens=6, together=1)):
        found.append(token)
        if i == 2:
            torch.nn.init.normal_(model.lm_head.weight, generator=torch.Generator().manual_seed(5))
            model.set_strength_scale(0.0)
            cache = model(x, use_cache=True).past_key_values  # what comes after goes on from the states of before
    del cache
    again = make(theta_init=3.0)
    with torch.no_grad():
        cache = again(torch.cat([x, *found[:2]], 1), use_cache=True).past_key_values
        torch.nn.init.normal_(again.lm_head.weight, generator=torch.Generator().manual_seed(5))
        again.set_strength_scale(0.0)
        for i in (2, 3, 4):
            assert torch.equal(again(found[i], past_key_values=cache).logits[:, -1].argmax(-1)[:, None], found[i + 1])


class Adapted(torch.nn.Module):
    """A matrix and a low-rank part that can be switched, as adapters are."""

    def __init__(self, base: torch.nn.Module):
        super().__init__()
        self.base, self.active, self.scaling = base, ["default"], {"default": 2.0}
        self.low = torch.nn.Parameter(torch.randn_like(base.weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base(x)
        return y + self.scaling["default"] * torch.nn.functional.linear(x, self.low) if self.active else y


def parameter(path: str) -> Callable[[QEDForCausalLM], None]:
    """Another tensor in a weight's place."""

    def change(model: QEDForCausalLM) -> None:
        owner, _, name = path.rpartition(".")
        module = model.get_submodule(owner)
        setattr(module, name, torch.nn.Parameter(getattr(module, name).detach() + 0.5))

    return change


def data(model: QEDForCausalLM) -> None:
    weight = model.model.layers[1].mlp.down_proj.weight
    weight.data = weight.data * 2


def another_module(model: QEDForCausalLM) -> None:
    mlp = model.model.layers[0].mlp
    mlp.down_proj = torch.nn.Linear(mlp.down_proj.in_features, mlp.down_proj.out_features).double()


def setting(path: str, value: object) -> Callable[[QEDForCausalLM], None]:
    owner, _, name = path.rpartition(".")
    return lambda model: setattr(model.get_submodule(owner), name, value)


MIXER = "model.layers.0.mixer."
CHANGES: dict[str, Callable[[QEDForCausalLM], None]] = {
    **{name: parameter(MIXER + name) for name in ("o_proj.weight", "conv.weight", "theta", "o_norm.weight", "A_log")},
    **{name: parameter(f"model.layers.1.{name}") for name in ("mlp.gate_up_proj.weight", "mlp_norm.weight")},
    **{name: parameter(f"model.{name}") for name in ("norm.weight", "embed_tokens.weight")},
    **{name: setting(MIXER + name, 0.1) for name in ("lambda_max", "erase_max", "read_scale", "strength_scale")},
    "eps": setting("model.layers.1.mlp_norm.eps", 0.5),
    "data": data,
    "another module": another_module,
    "an adapter": lambda model: setattr(model.model.layers[0].mlp, "down_proj", Adapted(model.lm_head)),
    "routes": lambda model: model.set_impl("auto", norm="reference"),
    "dtype": lambda model: model.float(),
    "forward": lambda model: setattr(model.model.layers[0].mlp, "forward", lambda x, residual: residual),
}


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_of_the_model_makes_another_decoder(change: str) -> None:
    model = make(theta_init=3.0)
    first, before = model.decoders.of(model, 1), fingerprint(model)
    assert fingerprint(model) == before
    assert model.decoders.of(model, 1) is first
    CHANGES[change](model)
    assert fingerprint(model) != before
    assert model.decoders.of(model, 1) is not first


def test_another_buffer_makes_another_decoder() -> None:
    model = make(rule="qed-rand")
    first = model.decoders.of(model, 1)
    mixer = model.model.layers[0].mixer
    mixer.random_direction = mixer.random_direction.clone()
    assert model.decoders.of(model, 1) is not first


def test_copies_of_a_model_have_decoders_of_their_own() -> None:
    model, x = make(), prompt(1, 5)
    first = model.decoders.of(model, 1)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert copied.decoders.of(copied, 1) is not first
        assert torch.equal(*(torch.cat(list(stream(m, x, max_new_tokens=6)), 1) for m in (copied, model)))
    assert model.decoders.of(model, 1) is first


def test_weights_that_change_in_place_need_no_other_decoder() -> None:
    """A captured step reads them where they are."""
    model, x = make(), prompt(1, 5)
    first = model.decoders.of(model, 1)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)
    assert model.decoders.of(model, 1) is first
    text = torch.cat([x, *stream(model, x, max_new_tokens=6)], 1)
    assert torch.equal(model(text[:, :-1]).logits[:, 4:].argmax(-1), text[:, 5:])


def test_an_adapter_that_is_switched() -> None:
    model, x = make(), prompt(1, 5)
    mlp = model.model.layers[0].mlp
    plain = torch.cat(list(stream(model, x, max_new_tokens=8)), 1)
    mlp.down_proj = adapter = Adapted(mlp.down_proj)
    prints = {}
    for name, active, scaling in (("on", ["default"], 2.0), ("off", [], 2.0), ("other", ["default"], 3.0)):
        adapter.active[:], adapter.scaling["default"] = active, scaling
        prints[name] = fingerprint(model)
        found = torch.cat([x, *stream(model, x, max_new_tokens=8)], 1)
        assert torch.equal(model(found[:, :-1]).logits[:, 4:].argmax(-1), found[:, 5:])
        assert torch.equal(found[:, 5:], plain) == (name == "off")
    assert len(set(map(hash, prints.values()))) == 3


def test_hooks_are_called_for_every_token() -> None:
    """So there is no captured step with one; and there is again without it."""
    model, x, calls = make(), prompt(1, 5), []
    assert model.decoders.of(model, 1) is not None
    for module in (model.model.layers[1], model.model.layers[0].mixer.o_proj):
        for register in (module.register_forward_hook, module.register_forward_pre_hook):
            handle = register(lambda *_: calls.append(1))
            assert model.decoders.of(model, 1) is None
            calls.clear()
            list(stream(model, x, max_new_tokens=7))
            assert len(calls) == 7
            handle.remove()
    assert model.decoders.of(model, 1) is not None


@pytest.mark.parametrize("beams", [1, 3])
def test_generate_looks_at_the_model_once(beams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its prompt; and the next `generate`, on the same cache too, sees what has changed since."""
    model, x, looks = make(), prompt(2, 9), []
    mask = torch.ones_like(x)
    mask[0, :4] = 0
    options = {"max_new_tokens": 6, "num_beams": beams, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    plain = model.generate(x, attention_mask=mask, **options)
    monkeypatch.setattr(routes, "_pays", lambda device: True)  # as on a GPU
    monkeypatch.setattr(decoding, "fingerprint", lambda m: looks.append(1) or fingerprint(m))
    assert torch.equal(model.generate(x, attention_mask=mask, **options), plain)
    assert len(looks) == 1
    CHANGES["o_proj.weight"](model)
    changed = model.generate(x, attention_mask=mask, **options)
    assert len(looks) == 2
    monkeypatch.undo()
    assert torch.equal(changed, model.generate(x, attention_mask=mask, **options))


def test_a_conversation_goes_on_with_a_changed_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token more in a cache that a decoder holds."""
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    found = []
    for captured in (False, True):
        model, x = make(theta_init=3.0), prompt(1, 6)
        with monkeypatch.context() as here:
            here.setattr(routes, "_pays", lambda device, captured=captured: captured)
            cache = model(x[:, :4], use_cache=True).past_key_values
            first = model.generate(x[:, :5], past_key_values=cache, **options)
            CHANGES["lambda_max"](model)
            found.append(
                model.generate(torch.cat([first, x[:, :1]], 1)[:, : cache.tokens + 1], past_key_values=cache, **options)
            )
    assert torch.equal(*found)


def test_a_cache_leaves_its_decoder_with_its_state() -> None:
    model, x = make(), prompt(1, 8)
    cache = model(x[:, :5], use_cache=True).past_key_values
    decoder = Decoder(model, 1)
    decoder.start(cache)
    decoder.step(x[:, 5:6])
    kept = cache.copy()
    assert cache.decoder is None
    decoder.start(cache)
    decoder.step(x[:, :1])  # another continuation
    with torch.no_grad():
        assert torch.allclose(model(x[:, 6:], past_key_values=kept).logits, model(x).logits[:, 6:], atol=1e-9)


def test_a_new_strength_is_a_new_decoder() -> None:
    model, x = make(theta_init=3.0), prompt(1, 6)
    first = model.decoders.of(model, 1)
    model.set_strength_scale(0.0)
    assert model.decoders.of(model, 1) is not first
    plain = make(rule="gdn2")
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if "theta" not in k})
    found, truth = (torch.cat(list(stream(m, x, max_new_tokens=12)), 1) for m in (model, plain))
    assert torch.equal(found, truth)


def test_sampling_draws_from_the_distribution() -> None:
    torch.manual_seed(0)
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    drawn = Sampling(temperature=0.5).chooser()(logits.expand(20_000, 4)).bincount(minlength=4) / 20_000
    assert torch.allclose(drawn, (logits / 0.5).softmax(0), atol=0.015)
    drawn = Sampling(temperature=1.0, top_k=2).chooser()(logits.expand(20_000, 4)).bincount(minlength=4) / 20_000
    assert torch.allclose(drawn, torch.tensor([2.0, 1.0, -torch.inf, -torch.inf]).softmax(0), atol=0.015)
    nucleus = Sampling(temperature=1.0, top_p=0.7)  # softmax: 0.64, 0.24, …: the second one crosses
    drawn = nucleus.chooser()(logits.expand(20_000, 4)).bincount(minlength=4) / 20_000
    assert torch.allclose(drawn, torch.tensor([2.0, 1.0, -torch.inf, -torch.inf]).softmax(0), atol=0.015)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature: expected 0 or more, got -1.0"),
        ({"top_k": -2}, r"top_k: expected 0 \(all\) or more, got -2"),
        ({"top_p": 0.0}, "top_p: expected more than 0 and at most 1, got 0.0"),
    ],
)
def test_sampling_that_makes_no_sense(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**options)


def test_softmax_layers_are_refused_by_name() -> None:
    model = make(layer_types=["qed", "full_attention"])
    with pytest.raises(ValueError, match="a softmax layer's state grows"):
        Decoder(model, 1)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A model of bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({x: i for i, x in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    make(eos_token_id=None).float().save_pretrained(tmp_path)
    return tmp_path


def test_on_the_command_line(checkpoint: Path) -> None:
    command = ["generate", str(checkpoint), "Die Würde", "--max-new-tokens", "40", "--temperature", "1"]
    first, second = (CliRunner().invoke(app, command) for _ in range(2))
    assert first.exit_code == 0, first.output
    assert first.stdout == second.stdout
    other = CliRunner().invoke(app, [*command, "--seed", "1"])
    assert other.stdout != first.stdout
    assert "40 tokens" in first.stderr


def test_errors_on_the_command_line(checkpoint: Path, tmp_path: Path) -> None:
    missing = CliRunner().invoke(app, ["generate", str(tmp_path / "nowhere"), "x"])
    assert missing.exit_code == 1
    assert "expected a checkpoint's folder" in " ".join(missing.stderr.split())
    (checkpoint / "tokenizer.json").unlink()
    (checkpoint / "tokenizer_config.json").unlink()
    without = CliRunner().invoke(app, ["generate", str(checkpoint), "x"])
    assert without.exit_code == 1
    assert "no tokenizer there" in " ".join(without.stderr.split())


def test_several_tokens_end_a_text_on_the_command_line(checkpoint: Path) -> None:
    ids = PreTrainedTokenizerFast.from_pretrained(checkpoint)("Die", return_tensors="pt").input_ids
    model = QEDForCausalLM.from_pretrained(checkpoint).eval()
    free = torch.cat(list(stream(model, ids, max_new_tokens=30)), 1)[0].tolist()
    end = next(x for x in free if free.index(x) > 3)
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"eos_token_id": [255, end]}))
    ended = CliRunner().invoke(app, ["generate", str(checkpoint), "Die", "--max-new-tokens", "30"])
    assert ended.exit_code == 0, ended.output
    assert ended.stderr.startswith(f"{min(free.index(x) for x in (255, end) if x in free)} tokens")


def test_code_of_a_tokenizer_is_not_run(checkpoint: Path) -> None:
    """Neither run nor asked about: the question would wait for an answer."""
    config = json.loads((checkpoint / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", None]}}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(config))
    (checkpoint / "mine.py").write_text(
        f"from pathlib import Path\nfrom transformers import PreTrainedTokenizerFast\nPath({str(checkpoint / 'ran')!r})"
        ".touch()\nclass Mine(PreTrainedTokenizerFast): pass\n"
    )
    found = CliRunner().invoke(app, ["generate", str(checkpoint), "x"], input="y\n")
    assert found.exit_code == 1
    assert "code of a folder is not run" in " ".join(found.stderr.split())
    assert not (checkpoint / "ran").exists()


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_any_gpu_is_a_gpu(device: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are loaded in bfloat16, to generate and to be evaluated."""
    from qed.cli.generate import write
    from qed.eval.options import Options
    from qed.eval.run import Evaluation

    class AskedError(Exception):
        pass

    def load(*_: object, dtype: torch.dtype, **__: object) -> None:
        raise AskedError(dtype)

    monkeypatch.setattr(QEDForCausalLM, "from_pretrained", load)
    options = {"max_new_tokens": 1, "sampling": {}, "strength": 1.0, "seed": 0, "tokenizer": checkpoint}
    with pytest.raises(AskedError, match="bfloat16"):
        write(checkpoint, "x", **options, device=device, console=Console(quiet=True))
    with pytest.raises(AskedError, match="bfloat16"):
        Evaluation(checkpoint, None, Options(), device, Console(quiet=True))
