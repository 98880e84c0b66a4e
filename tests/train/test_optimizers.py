"""The table of optimisers: AdamW as it was, Muon matrix by matrix, and another one in one file."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from qed import QEDConfig, QEDForCausalLM
from qed.recipes import build
from qed.rules import RULES
from qed.train import optimizers
from qed.train.loop import Trainer, train
from qed.train.optimizers import adamw, make, muon, set_rate
from qed.train.plan import plan

from .test_loop import QUIET, command, numbers, settings

SHAPES = [(16, 48), (48, 16), (32, 32), (1, 20), (2, 64)]


def tiny(**fields: object) -> QEDForCausalLM:
    torch.manual_seed(0)
    return QEDForCausalLM(QEDConfig.tiny(**fields))


def give_gradients(model: QEDForCausalLM) -> None:
    generator = torch.Generator().manual_seed(1)
    for x in model.parameters():
        x.grad = torch.randn(x.shape, generator=generator)


# AdamW


def test_groups() -> None:
    model = tiny(layer_types=["qed", "eda"])
    groups = adamw.groups(model)
    names = {group: {x.split(".", 3)[-1] for x, _ in parameters} for group, parameters in groups.items()}
    assert {x.rsplit(".", 1)[-1] for x in names["theta"]} == {"theta"}
    assert all(x.endswith("weight") and "norm" not in x and "conv" not in x for x in names["decayed"])
    plain = {x.split(".", 1)[-1] for x in names["plain"]}
    assert {"A_log", "dt_bias", "conv.weight", "g_proj.bias", "o_norm.weight"} <= plain
    assert sum(len(parameters) for parameters in groups.values()) == len(list(model.parameters()))
    (optimizer,) = made = make(model, build("mini", {"data": "x"}))
    set_rate(made, 0.5)
    assert {(group["weight_decay"], group["lr"]) for group in optimizer.param_groups} == {
        (0.1, 0.5),
        (0.0, 5.0),
        (0.0, 0.5),
    }


def test_a_run_from_before_optimisers_had_names_is_resumed(corpus: str, whole: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(whole, tmp_path / "run"))
    shutil.rmtree(out / "export")
    for step in (28, 30):
        shutil.rmtree(out / "checkpoints" / f"step-{step:08d}")
    about = json.loads((out / "config.json").read_text())
    assert about["config"].pop("optimizer") == "adamw"
    assert about["config"].pop("optimizer_settings") == {}
    (out / "config.json").write_text(json.dumps(about))
    config = build("mini", settings(corpus))
    assert type(config).from_json(json.dumps(about["config"])) == config
    assert train(config, out, device="cpu", console=QUIET) == 0
    assert numbers(out) == numbers(whole)
    with pytest.raises(ValueError, match="holds a run with another optimizer, optimizer_settings"):
        Trainer(build("mini", settings(corpus, optimizer="muon")), out, "cpu", QUIET)


# The Newton–Schulz iteration


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_are_brought_near_1(shape: tuple[int, int]) -> None:
    """The iteration is a polynomial of the singular values, and leaves the singular vectors alone."""
    torch.manual_seed(0)
    x = torch.randn(3, *shape)
    u, before, v = torch.linalg.svd(x, full_matrices=False)
    expected = relative = before / torch.linalg.vector_norm(before, dim=-1, keepdim=True)
    for _ in range(5):
        expected = 3.4445 * expected - 4.7750 * expected**3 + 2.0315 * expected**5
    after = torch.linalg.svdvals(muon.orthogonalize(x))
    assert after.max() <= 1.21
    assert after.sort().values[(relative >= 0.003).flip(-1)].min() >= 0.68  # a square one may have smaller ones
    torch.testing.assert_close(muon.orthogonalize(x), u * expected[:, None] @ v, rtol=0, atol=1e-4)


def test_the_band_of_the_iteration() -> None:
    """Wherever a singular value lies from 0.003 to 1, it comes near 1."""
    x = torch.linspace(0.003, 1, 100_000)
    for _ in range(muon.ITERATIONS):
        x = muon.A * x + muon.B * x**3 + muon.C * x**5
    assert 0.68 <= x.min() <= x.max() <= 1.21


def test_no_gradient_is_no_update() -> None:
    assert torch.equal(muon.orthogonalize(torch.zeros(2, 4, 8)), torch.zeros(2, 4, 8))


# Part by part


@pytest.mark.parametrize("rule", RULES)
def test_the_parts_of_a_layer_are_its_projections(rule: str) -> None:
    model = tiny(rule=rule)
    heights = muon.stacked_heights(model)
    weights = dict(model.named_parameters())
    mixer = model.model.layers[0].mixer
    keys, values = mixer.num_heads * mixer.head_dim, mixer.num_heads * mixer.value_head_dim
    assert len(heights) == 2 * len(model.model.layers)
    for name, rows in heights.items():
        assert sum(rows) == weights[name].shape[0], name
        assert all(rows), name
    assert heights["model.layers.0.mixer.in_proj.weight"][:3] == [keys, keys, values]
    gate, up = heights["model.layers.0.mlp.gate_up_proj.weight"]
    assert gate == up


def test_parts_are_separate_matrices() -> None:
    torch.manual_seed(0)
    heights = [16, 16, 24, 2, 40]
    parts = [torch.randn(rows, 24) * 10**i for i, rows in enumerate(heights)]
    (together,) = muon.updates([torch.cat(parts)], [heights])
    apart = torch.cat([muon.updates([x], [[len(x)]])[0] for x in parts])
    torch.testing.assert_close(together, apart, rtol=0, atol=1e-6)


@pytest.mark.parametrize("part", range(7))
def test_a_larger_part_changes_no_other_part(part: int) -> None:
    """Were in_proj orthogonalised as one matrix, its largest part would take nearly all of the update."""

    def stepped(factor: float) -> list[Tensor]:
        model = tiny(rule="qed")
        give_gradients(model)
        name = "model.layers.1.mixer.in_proj.weight"
        weight, heights = model.get_parameter(name), muon.stacked_heights(model)[name]
        assert len(heights) == 7, "q, k, v, b, w, f, g"
        weight.grad.split(heights)[part].mul_(factor)
        before = weight.detach().clone()
        made = make(model, build("mini", {"data": "x", "optimizer": "muon", "weight_decay": "0"}))
        set_rate(made, 0.01)
        for optimizer in made:
            optimizer.step()
        return list((weight.detach() - before).split(heights))

    plain, scaled = stepped(1), stepped(1000)
    for i, (a, b) in enumerate(zip(plain, scaled, strict=True)):
        if i == part:  # the size of a gradient makes no difference to its own part either
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)
        else:
            assert torch.equal(a, b)


def test_matrices_and_the_rest() -> None:
    """Every parameter once; the embedding, the read-out, convolutions and all vectors are AdamW's, in its groups."""
    model = tiny(layer_types=["qed", "full_attention"], tie_word_embeddings=False)
    groups = muon.groups(model)
    matrices = {name for name, _ in groups["matrices"]}
    assert {x.split(".", 3)[-1] for x in matrices} == {
        *(f"mixer.{x}_proj.weight" for x in ("in", "f", "g", "o", "q", "k", "v")),
        *(f"mlp.{x}_proj.weight" for x in ("gate_up", "down")),
    }
    assert {name for name, _ in groups["decayed"]} == {"model.embed_tokens.weight", "lm_head.weight"}
    usual = adamw.groups(model)
    assert groups["theta"] == usual["theta"]
    assert groups["plain"] == usual["plain"]
    assert sum(map(len, groups.values())) == len(list(model.parameters()))


def test_one_matrix_as_torch_does_it() -> None:
    """torch.optim.Muon has no parts and computes in bfloat16; a weight that is one matrix moves as it does there."""
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Parameter(x) for x in torch.randn(1, 24, 40).expand(2, -1, -1).clone())
    options = {"lr": 0.05, "weight_decay": 0.1, "momentum": 0.9}
    pair = muon.Muon([(ours, [24])], **options), torch.optim.Muon([theirs], **options, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        ours.grad = torch.randn(24, 40)
        theirs.grad = ours.grad.clone()
        for optimizer in pair:
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-3)
    assert torch.equal(pair[0].state[ours]["momentum_buffer"], pair[1].state[theirs]["momentum_buffer"])


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float32), ("cuda", torch.bfloat16)])
def test_nothing_in_a_step_waits_for_the_device(device: str, dtype: torch.dtype) -> None:
    """Tensors without values have nothing that Python could read; they also tell dtypes on a GPU that is not there."""
    with FakeTensorMode():
        weight = torch.nn.Parameter(torch.empty(40, 24, device=device))
        weight.grad = torch.empty_like(weight)
        optimizer = muon.Muon([(weight, [16, 16, 2, 6])], lr=0.1, weight_decay=0.1, momentum=0.9)
        optimizer.step()
        assert weight.dtype == optimizer.state[weight]["momentum_buffer"].dtype == torch.float32
        assert muon.orthogonalize(torch.empty(1, 24, 40, device=device)).dtype == dtype


# Runs with Muon


def same_run(out: Path, truth: Path) -> None:
    assert numbers(out) == numbers(truth)
    for file in ("weights", "optimizer"):
        found, expected = (load_file(x / "checkpoints" / "step-00000030" / f"{file}.safetensors") for x in (out, truth))
        assert found.keys() == expected.keys()
        assert all(torch.equal(x, expected[name]) for name, x in found.items())


def test_it_learns(muon_run: Path, whole: Path) -> None:
    losses = [json.loads(str(row[2])) for row in numbers(muon_run)]
    assert losses[0] == json.loads(str(numbers(whole)[0][2]))
    assert losses[-1] < losses[0] - 0.5


def test_stopped_anywhere_it_resumes_bit_for_bit(corpus: str, muon_run: Path, tmp_path: Path) -> None:
    config = build("mini", settings(corpus, optimizer="muon"))
    for stop_at in (3, 17):
        trainer = Trainer(config, tmp_path, "cpu", QUIET)
        taken = trainer._step

        def step(trainer: Trainer = trainer, taken: object = taken, stop_at: int = stop_at) -> object:
            trainer.stopping = trainer.step + 1 >= stop_at
            return taken()

        trainer._step = step
        trainer.run()
        assert trainer.step == stop_at
    assert train(config, tmp_path, device="cpu", console=QUIET) == 0
    same_run(tmp_path, muon_run)


@pytest.mark.slow
def test_killed_it_resumes_bit_for_bit(corpus: str, muon_run: Path, tmp_path: Path) -> None:
    words = [*command(corpus, tmp_path), "--set", "optimizer=muon"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while not list((tmp_path / "checkpoints").glob("step-*8")):
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert train(build("mini", settings(corpus, optimizer="muon")), tmp_path, device="cpu", console=QUIET) == 0
    same_run(tmp_path, muon_run)


# The table


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": "muom"}, "optimizer: expected one of adamw, muon, got 'muom'; the nearest is muon"),
        ({"optimizer": "1"}, "optimizer: expected one of adamw, muon, got '1'"),
        ({"optimizer.momentum": "0.9"}, "optimizer.momentum: adamw has no settings of its own, got 0.9"),
        (
            {"optimizer": "muon", "optimizer.momentun": "0.9"},
            "optimizer.momentun: expected a setting of muon, one of momentum; the nearest is momentum",
        ),
        ({"optimizer": "muon", "optimizer.momentum": "1"}, "optimizer.momentum: expected a number from 0 to below 1"),
        ({"optimizer": "muon", "optimizer.momentum": "x"}, "optimizer.momentum: expected a number, got 'x'"),
        ({"optimizer_settings": "{}"}, "--set: expected one of .*optimizer.SETTING, got 'optimizer_settings'"),
    ],
)
def test_what_is_no_optimiser(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build("mini", {"data": "x"} | changes)


def test_settings_from_the_command_line() -> None:
    config = build("mini", {"data": "x", "optimizer.momentum": "0.9", "optimizer": "muon"})
    assert config.optimizer_settings == {"momentum": 0.9}
    assert make(tiny(), config)[0].param_groups[0]["momentum"] == 0.9
    assert type(config).from_json(config.to_json()) == config
    assert build("mini", {"data": "x", "optimizer": "muon"}).optimizer_settings == {"momentum": 0.95}
    assert config.changed({"optimizer": "adamw"}).optimizer_settings == {}
    sizes = plan(config, Console(quiet=True))
    assert sizes["parameters"] == sum(size for name, size in sizes.items() if name.startswith("parameters, "))


SGD = """
from dataclasses import dataclass
import torch
from qed.train.optimizers.row import OptimizerRow

@dataclass(frozen=True)
class Settings:
    nesterov: bool = False

def make(model, config, settings):
    group = {"params": list(model.parameters()), "scale": 1.0}
    return [torch.optim.SGD([group], lr=config.learning_rate, momentum=0.9, nesterov=settings.nesterov)]

ROW = OptimizerRow("sgd", lambda model: {"all": list(model.named_parameters())}, make, Settings)
"""


def test_another_optimiser_is_one_file(corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sgd.py").write_text(SGD)
    monkeypatch.setattr(optimizers, "__path__", [*optimizers.__path__, str(tmp_path)])
    monkeypatch.setattr(optimizers, "OPTIMIZERS", optimizers._scan())
    monkeypatch.delitem(sys.modules, f"{optimizers.__name__}.sgd")
    changes = {"optimizer": "sgd", "optimizer.nesterov": "true", "learning_rate": "0.3"}
    config = build("mini", settings(corpus, total_tokens="2560", **changes))
    trainer = Trainer(config, tmp_path / "run", "cpu", QUIET)
    assert trainer.optimizers[0].param_groups[0]["nesterov"] is True
    trainer.run()
    losses = [json.loads(str(row[2])) for row in numbers(tmp_path / "run")]
    assert losses[-1] < losses[0] - 0.1
    assert "all" in "".join(plan(config, Console(quiet=True)))
