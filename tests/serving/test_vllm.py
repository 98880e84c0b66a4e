"""The model under vLLM answers as it does under transformers, however the engine cuts and mixes requests."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}

from qed import QEDForCausalLM

from .engines import STACKS, answers, checkpoint, engine, greedy, prompts, tokens

pytestmark = pytest.mark.filterwarnings("default")  # vLLM warns of much that is not ours
MODES: dict[str, dict[str, Any]] = {
    "whole": {"max_num_batched_tokens": 4096},
    "pieces": {"max_num_batched_tokens": 32},
    "prefix cache": {"enable_prefix_caching": True, "block_size": 32, "max_num_batched_tokens": 96},
}


@pytest.fixture(scope="module", params=STACKS)
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A checkpoint, and what transformers answers to every prompt."""
    folder = tmp_path_factory.mktemp("model")
    model = checkpoint(folder, request.param)
    return folder, [greedy(model, prompt) for prompt in prompts()]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What the engine told recurrent layers of every step."""
    from qed.serving.vllm_model import Step, StepBuilder

    seen: list[Step] = []
    build = StepBuilder.build

    def recorded(self: Any, *arguments: Any, **options: Any) -> Step:
        seen.append(build(self, *arguments, **options))
        return seen[-1]

    monkeypatch.setattr(StepBuilder, "build", recorded)
    return seen


@pytest.mark.parametrize("mode", MODES)
def test_greedy_tokens_are_those_of_transformers(
    stack: tuple[Path, list[list[int]]], mode: str, steps: list[Any]
) -> None:
    folder, expected = stack
    texts = prompts()
    assert len(texts) >= 50
    assert len({tuple(x) for x in expected}) == len(texts), "answers that are alike would show nothing"
    with engine(folder, **MODES[mode]) as llm:
        first = answers(llm, texts)
        again = answers(llm, texts) if mode == "prefix cache" else []
    assert tokens(first) == expected
    # Requests came and went while others were decoded, and the prompts were cut as the mode says.
    packed = [x for step in steps for x in step.requests if x.sequences.cu_seqlens is not None]
    assert any(len(step.requests) == 2 for step in steps)
    assert all(x.begins is not None and x.begins.all() for x in packed) == (mode == "whole")
    assert {type(x.slots) for step in steps for x in step.requests} == {slice, torch.Tensor}
    if mode == "prefix cache":
        assert tokens(again) == expected
        assert sum(x.num_cached_tokens for x in again) > sum(map(len, texts)) / 4
        assert sum(x.num_cached_tokens for x in first) > 0, "prompts that begin alike share their beginning"


def test_sampling_follows_its_seed_and_its_bounds(stack: tuple[Path, list[list[int]]]) -> None:
    folder, expected = stack
    texts = prompts()[:20]
    with engine(folder) as llm:
        drawn = [tokens(answers(llm, texts, temperature=1.0, seed=seed)) for seed in (1, 1, 2)]
        nearly_greedy = tokens(answers(llm, texts, temperature=1.0, top_p=1e-6))
        one = tokens(answers(llm, texts, temperature=2.0, top_k=1))
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]
    assert drawn[0] != expected[:20]
    assert nearly_greedy == one == expected[:20]


def test_sampled_tokens_have_the_models_distribution(stack: tuple[Path, list[list[int]]]) -> None:
    """First tokens of 2000 requests against the probabilities that transformers gives."""
    folder, _ = stack
    prompt = prompts()[7]
    model = QEDForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0, -1].div(2.0).softmax(-1)
    with engine(folder, max_num_seqs=256, max_num_batched_tokens=8192) as llm:
        (output,) = answers(llm, [prompt], temperature=2.0, max_tokens=1, n=2000, seed=0)
    drawn = torch.bincount(torch.tensor([x.token_ids[0] for x in output.outputs]), minlength=256) / 2000
    assert (drawn - expected).abs().sum() / 2 < 0.15
    assert expected.max() < 0.9, "a distribution that is a point would show nothing"


@torch.no_grad()
def test_bfloat16_is_as_near_to_float32_as_under_transformers(stack: tuple[Path, list[list[int]]]) -> None:
    """Log-probabilities of the likeliest first tokens, where the two differ by rounding alone."""
    folder, _ = stack
    exact, rounded = (QEDForCausalLM.from_pretrained(folder, dtype=x).eval() for x in (torch.float32, torch.bfloat16))
    texts = prompts()
    with engine(folder, dtype="bfloat16") as llm:
        outputs = answers(llm, texts, max_tokens=1, logprobs=5)
    errors = []
    for text, output in zip(texts, outputs, strict=True):
        found = output.outputs[0].logprobs[0]
        expected, near = (x(torch.tensor([text])).logits[0, -1].float().log_softmax(-1) for x in (exact, rounded))
        errors += [(x.logprob - expected[token], near[token] - expected[token]) for token, x in found.items()]
    under_vllm, under_transformers = torch.tensor(errors).abs().mean(0)
    assert 0 < under_vllm < 1.5 * under_transformers


REFUSED = {
    "speculative decoding": (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}},
        "speculative_config: QED under vLLM expects none, got 'ngram': a recurrent state cannot go back",
    ),
    "adapters": ({"enable_lora": True}, "enable_lora: QED under vLLM expects none, got True: merge the adapter"),
    "quantisation": ({"quantization": "fp8"}, "quantization: QED under vLLM expects none, got 'fp8'"),
    "a pipeline": ({"pipeline_parallel_size": 2}, "pipeline_parallel_size: QED under vLLM expects none, got 2"),
    "more processes than heads": (
        {"tensor_parallel_size": 4},
        "tensor_parallel_size: expected a divisor of num_heads, which is 2, got 4",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_plugin_lacks_is_refused_at_the_start(what: str, tmp_path: Path) -> None:
    """When the engine is configured, before any process is started or any weight is read."""
    from vllm import EngineArgs

    checkpoint(tmp_path, "hybrid")
    (tmp_path / "model.safetensors").unlink()
    options, message = REFUSED[what]
    with pytest.raises(ValueError, match=message):
        EngineArgs(str(tmp_path), skip_tokenizer_init=True, **options).create_engine_config()


def test_a_checkpoint_of_a_newer_format_is_refused(tmp_path: Path) -> None:
    from vllm import EngineArgs

    checkpoint(tmp_path, "hybrid")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"format_version": 99}))
    with pytest.raises(ValueError, match=r"format_version: this version of qed reads .*, got 99"):
        EngineArgs(str(tmp_path), skip_tokenizer_init=True).create_engine_config()


def test_a_checkpoint_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    """vLLM by itself would leave the weight as it happens to be."""
    from safetensors.torch import load_file, save_file

    checkpoint(tmp_path, "hybrid")
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.2.mixer.random_direction"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.2\..*random_direction: not in the checkpoint"), engine(tmp_path):
        pass
