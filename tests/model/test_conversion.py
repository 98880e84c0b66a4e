"""Weights of flash-linear-attention's layers: there and back exactly, and with them our layer gives what theirs does.

Theirs is written out here from its documentation, around its own torch recurrences: the layer classes need a GPU.
"""

import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import conv1d, rms_norm, silu, softplus
from typer.testing import CliRunner

from qed.cli import app
from qed.model.conversion import KINDS, from_fla, mixer_from_fla, to_fla
from qed.testing import relative_error

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("fla")
    from fla.ops.delta_rule.naive import delta_rule_recurrence
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
    from fla.ops.gdn2.naive import naive_recurrent_gdn2
    from fla.ops.kda.naive import naive_recurrent_kda

HIDDEN, H, K, V = 24, 2, 8, 12


def weights(kind: str, gated: bool = True) -> dict[str, Tensor]:
    """A state dict with the names and shapes of fla 0.6.0's class."""
    random = torch.Generator().manual_seed(0)
    keys, values = H * K, H * V
    shapes: dict[str, tuple[int, ...]] = {
        "q_proj.weight": (keys, HIDDEN),
        "k_proj.weight": (keys, HIDDEN),
        "v_proj.weight": (values, HIDDEN),
        "q_conv1d.weight": (keys, 1, 4),
        "k_conv1d.weight": (keys, 1, 4),
        "v_conv1d.weight": (values, 1, 4),
        "o_norm.weight": (V,),
        "o_proj.weight": (HIDDEN, values),
        "b_proj.weight": (keys if kind == "gdn2" else H, HIDDEN),
    }
    if kind in ("gdn2", "kda"):
        shapes |= {"f_proj.0.weight": (V, HIDDEN), "f_proj.1.weight": (keys, V), "A_log": (H,), "dt_bias": (keys,)}
        shapes |= {"g_proj.0.weight": (V, HIDDEN), "g_proj.1.weight": (values, V), "g_proj.1.bias": (values,)}
    elif gated:
        shapes |= {"g_proj.weight": (values, HIDDEN)}
    if kind == "gdn2":
        shapes |= {"w_proj.weight": (values, HIDDEN)}
    if kind == "gdn":
        shapes |= {"a_proj.weight": (H, HIDDEN), "A_log": (H,), "dt_bias": (H,)}
    return {name: torch.randn(*shape, generator=random) * 0.4 for name, shape in shapes.items()}


def theirs(kind: str, w: dict[str, Tensor], x: Tensor) -> Tensor:
    def convolved(name: str) -> Tensor:
        y = (x @ w[f"{name}_proj.weight"].T).mT
        taps = w[f"{name}_conv1d.weight"]
        return silu(conv1d(torch.nn.functional.pad(y, (3, 0)), taps, groups=taps.shape[0])).mT.unflatten(-1, (H, -1))

    def normal(y: Tensor) -> Tensor:
        return y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt()

    q, k, v = normal(convolved("q")), normal(convolved("k")), convolved("v")
    b = (x @ w["b_proj.weight"].T).sigmoid()
    if kind in ("gdn2", "kda"):
        f = softplus(x @ w["f_proj.0.weight"].T @ w["f_proj.1.weight"].T + w["dt_bias"]).unflatten(-1, (H, -1))
        g = -w["A_log"].exp()[:, None] * f
    if kind == "gdn2":
        write = (x @ w["w_proj.weight"].T).sigmoid().unflatten(-1, (H, -1))
        o, _ = naive_recurrent_gdn2(q, k, v, g, b.unflatten(-1, (H, -1)), write)
    elif kind == "kda":
        o, _ = naive_recurrent_kda(q, k, v, g, b)
    elif kind == "gdn":
        g = -w["A_log"].exp() * softplus(x @ w["a_proj.weight"].T + w["dt_bias"])
        o, _ = naive_recurrent_gated_delta_rule(q, k, v, b, g)
    else:
        o, _ = delta_rule_recurrence(*(y.transpose(1, 2) for y in (q, k, v, b)))
        o = o.transpose(1, 2)
    o = rms_norm(o, (V,), w["o_norm.weight"], 1e-5)
    if "g_proj.0.weight" in w:
        gate = x @ w["g_proj.0.weight"].T @ w["g_proj.1.weight"].T + w["g_proj.1.bias"]
        o = o * gate.unflatten(-1, (H, -1)).sigmoid()
    elif "g_proj.weight" in w:
        o = o * silu((x @ w["g_proj.weight"].T).unflatten(-1, (H, -1)))
    return o.flatten(-2) @ w["o_proj.weight"].T


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_our_layer_gives_their_output(kind: str, gated: bool) -> None:
    given, x = weights(kind, gated), torch.randn(2, 20, HIDDEN, generator=torch.Generator().manual_seed(1))
    y, _ = mixer_from_fla(kind, given, num_heads=H)(x)
    assert relative_error(y, theirs(kind, given, x)) < 1e-5


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back(kind: str, gated: bool) -> None:
    """Of several layers in a model, with tensors that are none of theirs."""
    given = {f"model.layers.{i}.attn.{name}": x + i for i in (0, 1) for name, x in weights(kind, gated).items()}
    given["model.embeddings.weight"] = torch.randn(5, 3)
    back = to_fla(kind, from_fla(kind, given))
    assert set(back) == set(given)
    for name, x in given.items():
        assert torch.equal(back[name], x), name


def test_on_the_command_line(tmp_path: Path) -> None:
    given = weights("gdn")
    save_file(given, tmp_path / "theirs.safetensors")
    files = [str(tmp_path / f"{name}.safetensors") for name in ("theirs", "ours", "back")]
    first = CliRunner().invoke(app, ["convert", files[0], files[1], "--kind", "gdn"])
    assert first.exit_code == 0, first.output
    again = CliRunner().invoke(app, ["convert", files[0], files[1], "--kind", "gdn"])
    assert again.exit_code == 1
    assert "exists; it is not overwritten" in " ".join(again.output.split())
    second = CliRunner().invoke(app, ["convert", files[1], files[2], "--kind", "gdn", "--to", "fla"])
    assert second.exit_code == 0, second.output
    for name, x in load_file(files[2]).items():
        assert torch.equal(x, given[name])


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("rwkv", {}, "kind: expected one of gdn2, kda, gdn, deltanet, got 'rwkv'"),
        ("gdn2", {"w_proj.weight": None}, "w_proj.weight: expected in a layer of this kind"),
        ("gdn2", {"q_conv1d.weight": None}, "found no q_conv1d.weight"),
        ("gdn2", {"q_conv1d.bias": torch.zeros(1)}, "q_conv1d.bias: our convolution has none"),
    ],
)
def test_what_is_no_such_layer(kind: str, change: dict[str, Tensor | None], message: str) -> None:
    given = weights("gdn2") | change
    with pytest.raises(ValueError, match=message):
        from_fla(kind, {name: x for name, x in given.items() if x is not None})


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("to", ["qed", "fla"])
@pytest.mark.parametrize("claimed", KINDS)
@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_another_kind_are_refused(kind: str, claimed: str, to: str, gated: bool, tmp_path: Path) -> None:
    """With a name or a shape that does not fit, and nothing is written."""
    given = {f"model.layers.0.attn.{name}": x for name, x in weights(kind, gated).items()}
    given["model.layers.0.mlp.weight"] = torch.zeros(3)
    save_file(given if to == "qed" else from_fla(kind, given), tmp_path / "given.safetensors")
    command = ["convert", str(tmp_path / "given.safetensors"), str(tmp_path / "new" / "out"), "--to", to]
    result = CliRunner().invoke(app, [*command, "--kind", claimed])
    if kind == claimed:
        assert result.exit_code == 0, result.output
        return
    assert result.exit_code == 1, result.output
    said = " ".join(result.output.split())
    assert "of this kind" in said or "of kind" in said
    assert "model.layers.0.attn." in said
    assert not (tmp_path / "new").exists()


def test_shapes_that_do_not_fit_are_named() -> None:
    given = weights("gdn2") | {"A_log": torch.zeros(5)}
    with pytest.raises(ValueError, match=r"A_log: expected \[2\], got \[5\]"):
        from_fla("gdn2", given)
    with pytest.raises(ValueError, match=r"w_proj.weight: \[24, 24\], but such a layer has none"):
        from_fla("kda", weights("kda") | {"w_proj.weight": torch.zeros(24, 24)})


def test_a_rule_they_do_not_have() -> None:
    given = from_fla("gdn2", weights("gdn2")) | {"theta": torch.zeros(2)}
    with pytest.raises(ValueError, match="theta: flash-linear-attention has no such rule"):
        to_fla("gdn2", given)


def test_a_pickle_is_not_read(tmp_path: Path) -> None:
    torch.save(weights("kda"), tmp_path / "layer.bin")
    result = CliRunner().invoke(app, ["convert", str(tmp_path / "layer.bin"), str(tmp_path / "out"), "--kind", "kda"])
    assert result.exit_code == 1
    assert "expected a safetensors file" in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()
