"""First values: one place, a standard deviation for every kind of parameter, also after the meta device."""

import math
from pathlib import Path

import pytest
import torch

from qed import QEDConfig, QEDForCausalLM

CONFIG = {
    "hidden_size": 256,
    "num_heads": 4,
    "head_dim": 64,
    "intermediate_size": 512,
    "vocab_size": 1000,
    "num_hidden_layers": 3,
}


def expected_deviation(name: str) -> float | None:
    kind = name.rsplit(".", 2)
    if kind[-2] in ("o_proj", "down_proj"):
        return 0.02 / math.sqrt(2 * 3)
    if kind[-2] == "conv":
        return 0.5 / math.sqrt(3)  # uniform in ± ½
    if kind[-1] == "weight" and "norm" not in kind[-2]:
        return 0.02
    return None


@pytest.mark.parametrize("on", ["cpu", "meta"])
def test_every_parameter(on: str) -> None:
    torch.manual_seed(0)
    with torch.device(on):
        model = QEDForCausalLM(QEDConfig.tiny(**CONFIG, layer_types=["qed", "eda", "qed-rand"]))
    if on == "meta":
        model = model.to_empty(device="cpu")
        model.init_weights()
    for name, x in model.named_parameters():
        deviation = expected_deviation(name)
        if deviation is not None:
            assert x.std().item() == pytest.approx(deviation, rel=0.05), name
            assert abs(x.mean().item()) < deviation / 10, name
        elif "norm" in name:
            assert (x == 1).all(), name
        elif name.endswith("bias") and "dt" not in name:
            assert (x == 0).all(), name
        elif name.endswith("A_log"):
            assert (x.exp() >= 1).all() and (x.exp() <= 16).all(), name  # noqa: PT018
        elif name.endswith("dt_bias"):
            dt = torch.nn.functional.softplus(x)
            assert (dt > 0.99e-3).all() and (dt < 0.101).all(), name  # noqa: PT018
            assert dt.log().mean().item() == pytest.approx(math.log(1e-2), abs=0.3), name
        else:
            assert name.endswith("theta")
            assert (x == -2).all()
    directions = model.model.layers[2].mixer.random_direction
    assert torch.allclose(directions.norm(dim=-1), torch.ones(4))
    assert directions.requires_grad is False


@pytest.mark.parametrize("on", ["cpu", "meta"])
def test_xavier_of_each_projection(on: str) -> None:
    """gain · √(2 / (inputs + outputs)) for each projection of a mixer, also where several are one matrix, and uniform;
    the rest as ever."""
    torch.manual_seed(0)
    layers = ["qed", "eda", "full_attention"]
    with torch.device(on):
        model = QEDForCausalLM(QEDConfig.tiny(**CONFIG, layer_types=layers, initializer="xavier"))
    if on == "meta":
        model = model.to_empty(device="cpu")
        model.init_weights()

    def check(name: str, x: torch.Tensor) -> None:
        deviation = 2**-2.5 * math.sqrt(2 / sum(x.shape))
        assert x.std().item() == pytest.approx(deviation, rel=0.05), name
        assert x.abs().max().item() == pytest.approx(math.sqrt(3) * deviation, rel=0.01), name  # of a uniform one

    keys, rank = 4 * 64, 64
    widths = {"qed": [keys] * 5 + [rank] * 2, "eda": [keys] * 3 + [4, 4, rank, rank, keys]}  # eda's gates: one a head
    for i in (0, 1):
        mixer = model.model.layers[i].mixer
        parts = mixer.in_proj.weight.split(widths[layers[i]])
        for j, x in enumerate(parts):
            if x.shape[0] >= rank:  # of four rows too little is known
                check(f"in_proj {i} {j}", x)
        for name in ("f_proj", "g_proj", "o_proj"):
            check(name, getattr(mixer, name).weight)
        assert (mixer.g_proj.bias == 0).all()
    for name, x in model.named_parameters():
        if "mixer" not in name or "layers.2" in name:
            deviation = expected_deviation(name)
            assert deviation is None or x.std().item() == pytest.approx(deviation, rel=0.05), name


def test_a_checkpoint_is_not_drawn_over(tmp_path: Path) -> None:
    model = QEDForCausalLM(QEDConfig.tiny(initializer="xavier"))
    model.save_pretrained(tmp_path)
    again = QEDForCausalLM.from_pretrained(tmp_path)
    assert again.config.initializer == "xavier"
    for name, x in model.state_dict().items():
        assert torch.equal(x, again.state_dict()[name]), name


def test_the_seed_decides() -> None:
    def made(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        model = QEDForCausalLM(QEDConfig.tiny(rule="qed-rand"))
        return torch.cat([x.flatten() for x in model.state_dict().values()])

    assert torch.equal(made(0), made(0))
    assert not torch.equal(made(0), made(1))
