"""The model on a GPU: captured decoding, compiled training and padding give what plain passes give."""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BitsAndBytesConfig, TorchAoConfig

from qed import QEDCache, QEDConfig, QEDForCausalLM, explain
from qed.model.base import weights_dtype
from qed.model.decoding import Decoder, stream
from qed.model.fingerprint import fingerprint
from qed.model.matrices import converted, matrices
from qed.model.sampling import Sampling
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
        decoder = model.decoders.of(model, batch)
        decoder.start(model(x[:, :70], use_cache=True).past_key_values)
        for t in range(70, 90):
            assert relative_error(decoder.step(x[:, t : t + 1]), truth[:, t]) < 1e-3, t
    assert decoder.captured


def test_generate_takes_the_captured_step_and_agrees_with_stream() -> None:
    model, x = make(), prompt(2, 20)
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    found = model.generate(x, attention_mask=torch.ones_like(x), **options)[:, 20:]
    assert model.decoders.of(model, 2).captured
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


def test_generate_is_captured_with_padding_and_looks_at_the_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own mask says nothing; it looks once whether the model has changed. Beams too, step by step."""
    model, x, looks, steps = make(), prompt(2, 20), [], []
    mask = torch.ones_like(x)
    mask[0, :7] = 0
    step, follow = Decoder.step, Decoder.follow
    monkeypatch.setattr("qed.model.decoding.fingerprint", lambda m: looks.append(1) or fingerprint(m))
    monkeypatch.setattr(Decoder, "step", lambda self, tokens: steps.append(1) or step(self, tokens))
    monkeypatch.setattr(Decoder, "follow", lambda *given: steps.append(given[-1]) or follow(*given))
    options = {"attention_mask": mask, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    found = model.generate(x, max_new_tokens=12, **options)
    assert (len(looks), sum(steps)) == (1, 11)
    assert torch.equal(found[1:, 20:], torch.cat(list(stream(model, x[1:], max_new_tokens=12)), 1))
    alone = torch.cat(list(stream(model, x[:1, 7:], max_new_tokens=12)), 1)
    assert (found[:1, 20:] == alone).float().mean() > 0.9  # near ties may fall otherwise
    looks.clear(), steps.clear()
    model.generate(x, max_new_tokens=6, num_beams=3, **options)
    assert (len(looks), len(steps)) == (1, 5)


def test_a_mask_counts_for_one_token_too() -> None:
    model, x = make(), prompt(2, 40)
    mask = torch.ones(2, 31, device="cuda")
    mask[1, 30] = 0
    with torch.no_grad():
        cache = model(x[:, :30], use_cache=True).past_key_values
        first = model(x[:, 30:31], attention_mask=mask, past_key_values=cache).logits
        rest = torch.cat([model(x[:, t : t + 1], past_key_values=cache).logits for t in range(31, 40)], 1)
        assert relative_error(torch.cat([first[:1], rest[:1]], 1), model(x[:1]).logits[:, 30:]) < 1e-3
        assert relative_error(rest[1:], model(torch.cat([x[1:, :30], x[1:, 31:]], 1)).logits[:, 30:]) < 1e-3


def test_streams_side_by_side() -> None:
    model, prompts = make(), [prompt(1, 16), prompt(1, 16) + 1]
    alone = [torch.cat(list(stream(model, x, max_new_tokens=60)), 1) for x in prompts]
    pairs = list(zip(*(stream(model, x, max_new_tokens=60) for x in prompts), strict=True))
    for parts, truth in zip(zip(*pairs, strict=True), alone, strict=True):
        assert torch.equal(torch.cat(parts, 1), truth)


CHANGES: dict[str, Callable[[QEDForCausalLM], object]] = {
    "o_proj": lambda m: setattr(
        m.model.layers[0].mixer.o_proj, "weight", torch.nn.Parameter(torch.randn(128, 128).cuda())
    ),
    "norm": lambda m: setattr(m.model.norm, "weight", torch.nn.Parameter(torch.rand(128).cuda())),
    "theta": lambda m: setattr(m.model.layers[1].mixer, "theta", torch.nn.Parameter(torch.full((2,), 3.0).cuda())),
    "read_scale": lambda m: setattr(m.model.layers[1].mixer, "read_scale", 0.3),
    "lambda_max": lambda m: setattr(m.model.layers[1].mixer, "lambda_max", 0.9),
    "eps": lambda m: setattr(m.model.layers[1].mlp_norm, "eps", 0.5),
    "mlp": lambda m: setattr(m.model.layers[2].mlp, "down_proj", torch.nn.Linear(256, 128).cuda()),
    "in place": lambda m: m.model.layers[0].mixer.conv.weight.data.mul_(3.0),
    "moved away and back": lambda m: m.cpu().cuda(),
    "dtype": lambda m: m.double().float(),
    "routes": lambda m: m.set_impl("reference"),
    "hook": lambda m: m.model.layers[0].register_forward_hook(lambda _, x, y: (y[0] * 0.5, y[1])),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_decodes_as_it_is_now(change: str) -> None:
    model, x = make(theta_init=1.0), prompt(1, 40)
    with torch.no_grad():
        cache = model(x[:, :20], use_cache=True).past_key_values
        for t in (20, 21, 22):  # as it is, captured, and replayed
            model(x[:, t : t + 1], past_key_values=cache)
        CHANGES[change](model)
        cache = model(x[:, :30], use_cache=True).past_key_values
        found = torch.cat([model(x[:, t : t + 1], past_key_values=cache).logits for t in range(30, 40)], 1)
        assert relative_error(found, model(x).logits[:, 30:]) < 1e-3


def test_hidden_states_are_not_written_over() -> None:
    model, x = make(), prompt(2, 50)
    with torch.no_grad():
        found = model(x, output_hidden_states=True)
        assert torch.equal(found.hidden_states[0], model.model.embed_tokens(x))
        assert relative_error(found.logits, model(x).logits) < 1e-6
        model.model.layers = model.model.layers[:1]
        one = model.model.norm(found.hidden_states[1])
        assert relative_error(one, model.model(x).last_hidden_state) < 1e-6


@pytest.mark.parametrize("names", [("position_ids",), ("seq_idx",), ("cu_seq_lens_q", "position_ids", "seq_idx")])
def test_what_collators_send_is_packed(names: tuple[str, ...]) -> None:
    model, x = make(), prompt(1, 100)
    lengths = torch.tensor([40, 1, 59])
    said = {
        "position_ids": torch.cat([torch.arange(n) for n in lengths.tolist()])[None].cuda(),
        "seq_idx": torch.repeat_interleave(torch.arange(3), lengths)[None].cuda(),
        "cu_seq_lens_q": torch.tensor([0, 40, 41, 100], dtype=torch.int32).cuda(),
    }
    with torch.no_grad():
        truth = torch.cat([model(part).logits for part in x.split(lengths.tolist(), 1)], 1)
        found = model(x, **{name: said[name] for name in names}).logits
    assert relative_error(found, truth) < 1e-4
    if "cu_seq_lens_q" not in names:
        with pytest.raises(ValueError, match="packed sequences need batch size 1"):
            model(x.expand(2, -1), **{name: said[name] for name in names})


def test_offsets_are_not_waited_for() -> None:
    """With offsets given, nothing of the packing reads from the device."""
    model, x = make(), prompt(1, 100)
    offsets = torch.tensor([0, 40, 100], dtype=torch.int32).cuda()
    places = torch.cat([torch.arange(40), torch.arange(60)])[None].cuda()
    options = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets.clone(), "position_ids": places, "max_length_q": 60}
    with torch.no_grad():
        model(x, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this mode of torch's is a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            model(x, **options)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_the_last_gpu_is_one_too() -> None:
    device = f"cuda:{torch.cuda.device_count() - 1}"
    model = make(weights_dtype(device)).to(device)
    assert model.dtype == torch.bfloat16
    list(stream(model, prompt(1, 8).to(device), max_new_tokens=4))
    cache = QEDCache()
    with torch.no_grad():
        for token in prompt(1, 4).to(device).split(1, 1):
            model(token, past_key_values=cache, use_cache=True)
    assert cache.decoder is not None
    assert cache.decoder.device == torch.device(device)


def test_a_cache_that_goes_back_is_not_captured() -> None:
    """Its tokens are decoded by plain passes, which record them; a captured step would leave what was read behind."""
    model, x = make(), prompt(1, 60)
    cache = QEDCache(rewind=6)
    with torch.no_grad():
        model(x[:, :40], past_key_values=cache)
        for t in range(40, 60):
            model(x[:, t : t + 1], past_key_values=cache)
        assert cache.decoder is None
        cache.crop(-6)
        assert relative_error(model(x[:, 54:], past_key_values=cache).logits, model(x).logits[:, 54:]) < 1e-3
        options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        plain = model.generate(x, **options)
        for help_ in ({"prompt_lookup_num_tokens": 5}, {"assistant_model": make(num_hidden_layers=1)}):
            assert (model.generate(x, **options, **help_) == plain).float().mean() > 0.9  # near ties may fall otherwise


def check_decoding(model: Any, x: torch.Tensor, budget: float) -> torch.Tensor:
    """The captured step's logits are those of a plain pass, and so are the tokens that `generate` gives with it, except
    where the likeliest ones differ by less than the budget. These tokens are returned."""
    with torch.no_grad():
        cache = model(x[:, :20], use_cache=True).past_key_values
        found = torch.cat([model(x[:, t : t + 1], past_key_values=cache).logits for t in range(20, x.shape[1])], 1)
        assert relative_error(found, model(x).logits[:, 20:]) < budget
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    whole = model.generate(input_ids=x, attention_mask=torch.ones_like(x), **options)
    text = whole[:, x.shape[1] :]
    with torch.no_grad():
        logits = model(whole).logits[:, x.shape[1] - 1 : -1].float()
    chosen = logits.gather(-1, text[..., None])[..., 0]
    assert (chosen >= logits.amax(-1) - 4 * budget * logits.std(-1)).all()
    return text


@pytest.mark.parametrize("kind", ["LoRA", "DoRA"])
@pytest.mark.parametrize("batch", [1, 2])
def test_adapters_switched_between_generations_are_captured(batch: int, kind: str) -> None:
    peft = pytest.importorskip("peft")
    base, x = make(), prompt(batch, 40)
    options = {"r": 4, "lora_alpha": 8, "use_dora": kind == "DoRA", "target_modules": "all-linear"}
    model = peft.get_peft_model(base, peft.LoraConfig(**options)).eval()
    model.add_adapter("other", peft.LoraConfig(**options))
    for i, (name, p) in enumerate(model.named_parameters()):
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.2, generator=torch.Generator("cuda").manual_seed(i))
    texts = []
    for name in ("default", "other", "default"):
        model.set_adapter(name)
        texts.append(check_decoding(model, x, 1e-3))
        assert base.decoders.of(base, batch).captured
    with model.disable_adapter():
        off = check_decoding(model, x, 1e-3)
    model.merge_adapter()
    merged = check_decoding(model, x, 1e-3)
    assert base.decoders.of(base, batch).captured
    assert torch.equal(texts[0], texts[2])
    assert not torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], off)
    assert (texts[0] == merged).float().mean() > 0.9


QUANTISERS = {"torchao, 8 bits": 0, "bitsandbytes, 8 bits": 8, "bitsandbytes, 4 bits": 4}


@pytest.mark.parametrize("quantiser", QUANTISERS)
@pytest.mark.parametrize("batch", [1, 2])
def test_a_quantised_model_decodes_as_it_reads(batch: int, quantiser: str, tmp_path: Path) -> None:
    bits, x = QUANTISERS[quantiser], prompt(batch, 40)
    make(torch.bfloat16).save_pretrained(tmp_path)
    if bits:
        pytest.importorskip("bitsandbytes")
        settings: Any = BitsAndBytesConfig(**{f"load_in_{bits}bit": True})
    else:
        settings = TorchAoConfig(pytest.importorskip("torchao.quantization").Int8WeightOnlyConfig())
    options: dict[str, Any] = {"quantization_config": settings, "device_map": "cuda", "dtype": torch.bfloat16}
    model = QEDForCausalLM.from_pretrained(tmp_path, **options)
    assert len(converted(model)) == len(matrices(model)) - 1
    assert "quantised" in str(explain(model))
    check_decoding(model, x, 0.1)  # activations of 8 bits fall to one side or the other by a rounding of bfloat16
