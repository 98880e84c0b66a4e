"""Decoding in place is recomputing; caches and decoders share memory without mixing sequences up."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from qed import RULES, QEDConfig, QEDForCausalLM
from qed.cli import app
from qed.model.generation import Decoder, Sampling, decoder_of, stream


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


def test_padding_is_inert_here_too() -> None:
    model, x = make(), prompt(1, 6)
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), x], 1)
    mask = torch.tensor([[0] * 4 + [1] * 6])
    with_padding = torch.cat(list(stream(model, padded, max_new_tokens=9, attention_mask=mask)), 1)
    assert torch.equal(with_padding, torch.cat(list(stream(model, x, max_new_tokens=9)), 1))


def test_two_caches_on_one_decoder() -> None:
    """Each goes on from its own state, whichever ran last."""
    model, x = make(), prompt(2, 7)
    caches = [model(x[i : i + 1, :5], use_cache=True).past_key_values for i in range(2)]
    decoder = decoder_of(model, 1)
    assert decoder_of(model, 1) is decoder
    with torch.no_grad():
        for t in (5, 6):
            for i, cache in enumerate(caches):
                decoder.start(cache)
                logits = decoder.step(x[i : i + 1, t : t + 1])
                assert torch.allclose(logits, model(x[i : i + 1, : t + 1]).logits[:, -1], atol=1e-9)


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
    first = decoder_of(model, 1)
    model.set_strength_scale(0.0)
    assert decoder_of(model, 1) is not first
    plain = make(rule="gdn2")
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if "theta" not in k})
    found, truth = (torch.cat(list(stream(m, x, max_new_tokens=12)), 1) for m in (model, plain))
    assert torch.equal(found, truth)


def test_sampling_draws_from_the_distribution() -> None:
    torch.manual_seed(0)
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    drawn = Sampling(temperature=0.5).choose(logits.expand(20_000, 4)).bincount(minlength=4) / 20_000
    assert torch.allclose(drawn, (logits / 0.5).softmax(0), atol=0.015)
    drawn = Sampling(temperature=1.0, top_k=2).choose(logits.expand(20_000, 4)).bincount(minlength=4) / 20_000
    assert torch.allclose(drawn, torch.tensor([2.0, 1.0, -torch.inf, -torch.inf]).softmax(0), atol=0.015)
    nucleus = Sampling(temperature=1.0, top_p=0.7)  # softmax: 0.64, 0.24, …: the second one crosses
    drawn = nucleus.choose(logits.expand(20_000, 4)).bincount(minlength=4) / 20_000
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
    assert "expected a checkpoint's folder" in missing.stderr.replace("\n", "")
    (checkpoint / "tokenizer.json").unlink()
    (checkpoint / "tokenizer_config.json").unlink()
    without = CliRunner().invoke(app, ["generate", str(checkpoint), "x"])
    assert without.exit_code == 1
    assert "no tokenizer there" in without.stderr.replace("\n", "")
