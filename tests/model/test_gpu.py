"""The model on a GPU: captured decoding, compiled training and padding give what plain passes give."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from qed import QEDConfig, QEDForCausalLM
from qed.model.generation import Sampling, decoder_of, stream
from qed.testing import relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")]
SIZES = {"hidden_size": 128, "num_heads": 2, "head_dim": 64, "intermediate_size": 256, "num_hidden_layers": 3}


def make(dtype: torch.dtype = torch.float32, **changes: object) -> QEDForCausalLM:
    torch.manual_seed(0)
    return QEDForCausalLM(QEDConfig.tiny(**(SIZES | {"initializer_range": 0.1} | changes))).to("cuda", dtype).eval()


def prompt(*shape: int) -> torch.Tensor:
    return torch.randint(3, 256, shape, generator=torch.Generator().manual_seed(1)).cuda()


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("rule", ["qed", "gdn", "eda"])
def test_captured_decoding_gives_the_logits_of_a_plain_pass(rule: str, batch: int) -> None:
    model, x = make(rule=rule), prompt(batch, 90)
    with torch.no_grad():
        truth = model(x).logits
        decoder = decoder_of(model, batch)
        decoder.start(model(x[:, :70], use_cache=True).past_key_values)
        for t in range(70, 90):
            assert relative_error(decoder.step(x[:, t : t + 1]), truth[:, t]) < 1e-3, t
    assert decoder.graphs


def test_generate_takes_the_captured_step_and_agrees_with_stream() -> None:
    model, x = make(), prompt(2, 20)
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    found = model.generate(x, attention_mask=torch.ones_like(x), **options)[:, 20:]
    assert decoder_of(model, 2).graphs
    assert torch.equal(found, torch.cat(list(stream(model, x, max_new_tokens=24)), 1))
    uncached = model.generate(x, attention_mask=torch.ones_like(x), use_cache=False, **options)[:, 20:]
    assert (found == uncached).float().mean() > 0.9  # near ties may fall otherwise


def test_beams_and_sampling_run() -> None:
    model, x = make(torch.bfloat16), prompt(2, 10)
    mask = torch.ones_like(x)
    model.generate(x, attention_mask=mask, max_new_tokens=8, num_beams=3, do_sample=False, pad_token_id=0)
    drawn = torch.cat(list(stream(model, x, max_new_tokens=40, sampling=Sampling(temperature=1.0, top_p=0.9))), 1)
    assert drawn.shape == (2, 40)
    assert drawn.unique().numel() > 10


def test_memory_does_not_grow_with_what_is_generated() -> None:
    model, x = make(torch.bfloat16), prompt(1, 10)
    tokens = stream(model, x, max_new_tokens=10_000)
    next(tokens), next(tokens)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in tokens:
        pass
    assert torch.cuda.memory_allocated() <= before + 2**20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_training_is_eager(dtype: torch.dtype) -> None:
    """As near to the same weights in float32."""
    model, x = make(dtype).train(), prompt(2, 150)
    wide = copy.deepcopy(model).float()

    def results(run: Callable[..., Any], parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        found = run(x, labels=x)
        return [found.logits, *torch.autograd.grad(found.loss, parameters)]

    truth = results(wide, list(wide.parameters()))
    eager = results(model, list(model.parameters()))
    compiled = results(torch.compile(model, fullgraph=True), list(model.parameters()))
    least = 1e-4 if dtype == torch.float32 else 1e-2
    for found, plain, true in zip(compiled, eager, truth, strict=True):
        if dtype == torch.bfloat16 and true.numel() < 16:
            continue  # a few numbers, each a sum over all tokens that all but cancels
        assert relative_error(found, true) < 2 * relative_error(plain, true) + least


def test_padding_is_inert() -> None:
    model, x = make(), prompt(1, 100)
    padded = torch.cat([torch.zeros(1, 37, dtype=torch.long, device="cuda"), x], 1)
    mask = torch.ones_like(padded)
    mask[:, :37] = 0
    with torch.no_grad():
        assert relative_error(model(padded, attention_mask=mask).logits[:, 37:], model(x).logits) < 1e-4
