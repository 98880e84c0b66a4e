"""Converts the weights of flash-linear-attention's (fla's) layers into those of a mixer, and back.

The numbers are the same. fla has a matrix for each projection and three convolutions where a mixer has one of each, and
the second matrix of a low-rank pair has another name. Options say what a layer does with its weights; `mixer_from_fla`
sets them as in fla's classes.

| kind | fla's class | rule |
|---|---|---|
| gdn2 | GatedDeltaNet2 | gdn2 |
| kda | KimiDeltaAttention | kda |
| gdn | GatedDeltaNet | gdn |
| deltanet | DeltaNet | deltanet |
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..files import write_bytes
from ..layers import Mixer

KINDS = ("gdn2", "kda", "gdn", "deltanet")
CONVOLUTIONS = ("q_conv1d", "k_conv1d", "v_conv1d")


# fla's names of the matrices that in_proj stacks, in their order. Layers without an output gate have no "g".
QKV = {"q": "q_proj", "k": "k_proj", "v": "v_proj"}
ROWS = {
    "gdn2": QKV | {"b": "b_proj", "w": "w_proj", "f": "f_proj.0", "g": "g_proj.0"},
    "kda": QKV | {"b": "b_proj", "f": "f_proj.0", "g": "g_proj.0"},
    "gdn": QKV | {"b": "b_proj", "f": "a_proj", "g": "g_proj"},
    "deltanet": QKV | {"b": "b_proj", "g": "g_proj"},
}
RENAMED = {"f_proj.1.weight": "f_proj.weight", "g_proj.1.weight": "g_proj.weight", "g_proj.1.bias": "g_proj.bias"}


def from_fla(kind: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `weights` with all of fla's layers in them converted, whatever their prefix. Other tensors stay as they
    are."""
    _check_kind(kind)
    converted = dict(weights)
    for prefix in _layers(weights, "q_conv1d.weight", "a layer of flash-linear-attention with short convolutions"):
        if f"{prefix}q_conv1d.bias" in converted:
            raise ValueError(f"{prefix}q_conv1d.bias: our convolution has none; expected a layer with conv_bias=False")
        taps = [_take(converted, f"{prefix}{name}.weight") for name in CONVOLUTIONS]
        matrices = [_take(converted, f"{prefix}{name}.weight") for key, name in ROWS[kind].items() if key != "g"]
        gate = f"{ROWS[kind]['g']}.weight"
        if kind in ("gdn2", "kda") or prefix + gate in converted:
            matrices.append(_take(converted, prefix + gate))
        renamed = {new: _take(converted, prefix + old) for old, new in RENAMED.items() if prefix + old in converted}
        converted |= {prefix + name: x for name, x in renamed.items()}
        converted[f"{prefix}in_proj.weight"] = torch.cat(matrices)
        converted[f"{prefix}conv.weight"] = torch.cat([x.squeeze(1) for x in taps])
        _check_layer(kind, prefix, converted)
    return converted


def to_fla(kind: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `weights` with all mixers in them converted to fla's layers. This is the exact inverse of `from_fla`."""
    _check_kind(kind)
    converted = dict(weights)
    for prefix in _layers(weights, "conv.weight", "a mixer of this package"):
        extra = [name for name in ("theta", "random_direction") if prefix + name in converted]
        if extra:
            known = ", ".join(KINDS)
            raise ValueError(f"{prefix}{extra[0]}: flash-linear-attention has no such rule; expected one of {known}")
        _check_layer(kind, prefix, converted)
        values = converted[f"{prefix}o_proj.weight"].shape[1]
        keys = (converted[f"{prefix}conv.weight"].shape[0] - values) // 2
        rank = converted[f"{prefix}f_proj.weight"].shape[1] if kind in ("gdn2", "kda") else 0
        heads = values // converted[f"{prefix}o_norm.weight"].shape[0]
        matrix = converted.pop(f"{prefix}in_proj.weight")
        sizes = {"q": keys, "k": keys, "v": values, "b": keys if kind == "gdn2" else heads, "w": values}
        sizes |= {"f": rank or heads}
        named = {key: name for key, name in ROWS[kind].items() if key != "g"}
        rest = matrix.shape[0] - sum(sizes[key] for key in named)
        parts = matrix.split([*(sizes[key] for key in named), *([rest] if rest else [])])
        names = [*named.values(), *([ROWS[kind]["g"]] if rest else [])]
        converted |= {f"{prefix}{name}.weight": x.contiguous() for name, x in zip(names, parts, strict=True)}
        if rank:
            converted |= {
                prefix + old: converted.pop(prefix + new) for old, new in RENAMED.items() if prefix + new in converted
            }
        taps = converted.pop(f"{prefix}conv.weight").unsqueeze(1).split([keys, keys, values])
        converted |= {f"{prefix}{name}.weight": x.contiguous() for name, x in zip(CONVOLUTIONS, taps, strict=True)}
    return converted


def _check_layer(kind: str, prefix: str, weights: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless the tensors under `prefix`, as a mixer names them, have the names and shapes of a mixer
    with the rule `kind`."""
    given = {name.removeprefix(prefix): list(x.shape) for name, x in weights.items() if name.startswith(prefix)}
    expected = _shapes(kind, prefix, given)
    problems = [f"{name}: {shape}, but such a layer has none" for name, shape in given.items() if name not in expected]
    problems += [f"{name}: not there, expected {shape}" for name, shape in expected.items() if name not in given]
    both = [name for name in given if name in expected and given[name] != expected[name]]
    problems += [f"{name}: expected {expected[name]}, got {given[name]}" for name in both]
    if problems:
        raise ValueError(f"{prefix or 'the layer'}: not of kind {kind}:\n  " + "\n  ".join(problems))


def _shapes(kind: str, prefix: str, given: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """Return the shapes of a mixer of this kind by name, with the sizes that the given shapes imply."""
    ranks = ("f_proj.weight", "g_proj.weight") if kind in ("gdn2", "kda") else ()
    for name in ("in_proj.weight", "conv.weight", "o_proj.weight", "o_norm.weight", *ranks):
        dimensions = 1 if name == "o_norm.weight" else 2
        if len(given.get(name, ())) != dimensions:
            shape = given.get(name, "nothing")
            raise ValueError(f"{prefix}{name}: expected {dimensions} dimensions in a layer of kind {kind}, got {shape}")
    (rows, hidden), (channels, taps), (width,) = (given[f"{x}.weight"] for x in ("in_proj", "conv", "o_norm"))
    values = given["o_proj.weight"][1]
    keys, heads = (channels - values) // 2, values // max(width, 1)
    if not heads or heads * width != values or 2 * keys + values != channels or keys < heads or keys % heads:
        sizes = f"{channels} channels of the convolution, {values} values and {width} of a head"
        raise ValueError(f"{prefix}conv.weight: not of kind {kind}: {sizes} do not go together")
    options: dict[str, Any] = {"output_gate": None if rows < 2 * (keys + values) else "silu", "output_gate_rank": 0}
    if ranks:
        options = {"decay_rank": given["f_proj.weight"][1], "output_gate_rank": given["g_proj.weight"][1]}
    options |= {"num_heads": heads, "head_dim": keys // heads, "value_head_dim": width}
    with torch.device("meta"):
        mixer = Mixer(hidden_size=hidden, rule=kind, conv_size=taps, **options)
    return {name: list(x.shape) for name, x in mixer.state_dict().items()}


def mixer_from_fla(kind: str, weights: Mapping[str, Tensor], *, num_heads: int, norm_eps: float = 1e-5) -> Mixer:
    """Return a mixer that computes the same as fla's layer with these weights.

    Args:
        kind: one of `KINDS`.
        weights: the state dict of fla's layer, with names without a prefix.
        num_heads: number of heads, which the weights do not say.
        norm_eps: number that the output norm adds to the mean square.
    """
    ours = from_fla(kind, weights)
    keys, values = weights["q_proj.weight"].shape[0], weights["v_proj.weight"].shape[0]
    if keys % num_heads or values % num_heads:
        raise ValueError(f"num_heads: expected a divisor of {keys} and {values}, got {num_heads}")
    low_rank = kind in ("gdn2", "kda")
    options: dict[str, Any] = {"output_gate": "silu" if "g_proj.weight" in weights else None, "output_gate_rank": 0}
    if low_rank:
        options = {"output_gate": "sigmoid", "output_gate_rank": ours["g_proj.weight"].shape[1]}
        options["decay_rank"] = ours["f_proj.weight"].shape[1]
    mixer = Mixer(
        hidden_size=ours["in_proj.weight"].shape[1],
        num_heads=num_heads,
        head_dim=keys // num_heads,
        value_head_dim=values // num_heads,
        rule=kind,
        conv_size=ours["conv.weight"].shape[1],
        read_scale=(keys // num_heads) ** -0.5,
        norm_eps=norm_eps,
        **options,
    )
    mixer.load_state_dict(ours)
    return mixer


def convert_file(source: Path, target: Path, *, kind: str, to: str) -> int:
    """Convert a safetensors file of layers, or of a whole model, and return how many tensors the new one has.

    Args:
        source: the file to read.
        target: the file to write, which must not exist.
        kind: one of `KINDS`.
        to: "qed" to convert from fla, "fla" to convert back.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file, save

    if target.exists():
        raise FileExistsError(f"{target} exists; it is not overwritten")
    if source.exists() and not source.is_file():
        raise ValueError(f"{source}: expected a safetensors file, got something that is no regular file")
    try:
        weights = load_file(source)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{source}: expected a safetensors file, got: {error}") from error
    converted = from_fla(kind, weights) if to == "qed" else to_fla(kind, weights)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(target, save({name: x.contiguous() for name, x in converted.items()}, metadata={"format": "pt"}))
    return len(converted)


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")


def _layers(weights: Mapping[str, Tensor], last: str, expected: str) -> list[str]:
    """The prefixes of all layers, each of which has a tensor whose name ends so."""
    found = [name.removesuffix(last) for name in weights if name.endswith(last)]
    if not found:
        raise ValueError(f"expected {expected}, found no {last}")
    return found


def _take(weights: dict[str, Tensor], name: str) -> Tensor:
    if name not in weights:
        raise ValueError(f"{name}: expected in a layer of this kind, but it is not there")
    return weights.pop(name)
