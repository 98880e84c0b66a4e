"""The loss without logits, the learning rate, the optimiser's groups, recipes."""

import pytest
import torch

from qed import QEDConfig, QEDForCausalLM
from qed.recipes import RECIPES, build
from qed.recipes.paper import ARMS
from qed.train import loss as loss_module
from qed.train.loss import linear_cross_entropy
from qed.train.optimizer import groups, make, set_rate
from qed.train.schedule import learning_rate


@pytest.mark.parametrize("piece", [1, 7, 20, 100])
def test_the_loss_is_cross_entropy(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "PIECE", piece)
    torch.manual_seed(0)
    hidden, weight = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((20, 8), (11, 8)))
    targets = torch.randint(0, 11, (20,))
    targets[[3, 19]] = -100
    found = linear_cross_entropy(hidden, weight, targets)
    truth = torch.nn.functional.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    assert torch.allclose(found, truth, rtol=1e-12)
    pairs = zip(*(torch.autograd.grad(0.3 * x, [hidden, weight]) for x in (found, truth)), strict=True)
    for a, b in pairs:
        assert torch.allclose(a, b, rtol=0, atol=1e-13)


def test_warm_up_plateau_and_fall() -> None:
    config = build("paper_340m", {"data": "x"})
    assert config.steps == 28611
    assert learning_rate(config, 0) == pytest.approx(3e-4 / 286)
    assert learning_rate(config, 285) == learning_rate(config, 20_000) == 3e-4
    start = 13_500_000_000 // 524_288
    assert learning_rate(config, start) == pytest.approx(3e-4, rel=1e-3)
    middle = (13_500_000_000 + 750_000_000) // 524_288
    assert learning_rate(config, middle) == pytest.approx(1.5e-4, rel=1e-2)
    assert 0 < learning_rate(config, config.steps - 1) < 3e-7


def test_groups() -> None:
    model = QEDForCausalLM(QEDConfig.tiny(layer_types=["qed", "eda"]))
    found = {name: {x.split(".", 3)[-1] for x, _ in rows} for name, rows in groups(model).items()}
    assert {x.rsplit(".", 1)[-1] for x in found["theta"]} == {"theta"}
    assert all(x.endswith("weight") and "norm" not in x and "conv" not in x for x in found["decayed"])
    plain = {x.split(".", 1)[-1] for x in found["plain"]}
    assert {"A_log", "dt_bias", "conv.weight", "g_proj.bias", "o_norm.weight"} <= plain
    assert sum(len(rows) for rows in groups(model).values()) == len(list(model.parameters()))
    config = build("mini", {"data": "x"})
    optimizer = make(model, config)
    set_rate(optimizer, 0.5)
    assert {(group["weight_decay"], group["lr"]) for group in optimizer.param_groups} == {
        (0.1, 0.5),
        (0.0, 5.0),
        (0.0, 0.5),
    }


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_complete(name: str) -> None:
    config = build(name, {"data": "somewhere", "seed": "1"})
    assert config.seed == 1
    assert type(config).from_json(config.to_json()) == config


def test_the_papers_arms() -> None:
    made = [build("paper_340m", {"data": "x", "arm": arm}) for arm in ARMS]
    assert len({config.name for config in made}) == 5
    assert [config.model_config().rule for config in made] == list(ARMS)
    config = made[1]
    assert (config.batch_tokens, config.total_tokens, config.decay_start_tokens) == (
        524_288,
        15_000_000_000,
        13_500_000_000,
    )
    assert (config.learning_rate, config.theta_learning_rate, config.sequence, config.seed) == (3e-4, 10.0, 2048, 0)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "micro",
            {},
            "RECIPE: expected one of paper_340m, paper_short, medium, small, mini, lambda_max_sweep, got micro",
        ),
        ("mini", {}, "RECIPE: mini needs --set data=…"),
        ("mini", {"data": "x", "rate": "3"}, "--set: expected one of .*, got rate"),
        ("mini", {"data": "x", "sequence": "100"}, "batch_tokens, micro_tokens: expected multiples of a row of 100"),
        ("mini", {"data": "x", "model.rule": "qet"}, "rule: expected one of linear"),
        ("mini", {"data": "x", "total_tokens": "10"}, "decay_start_tokens: expected at most total_tokens"),
        ("paper_340m", {"data": "x", "arm": "kda"}, "arm: expected one of gdn2, qed"),
    ],
)
def test_what_is_no_recipe(name: str, changes: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(name, changes)


def test_fields_from_the_command_line() -> None:
    given = {"data": "x", "model.lambda_max": "0.5", "total_tokens": "1e9", "betas": "[0.8, 0.9]", "compile": "true"}
    config = build("mini", given)
    assert (config.model["lambda_max"], config.total_tokens, config.betas, config.compile) == (
        0.5,
        10**9,
        (0.8, 0.9),
        True,
    )
