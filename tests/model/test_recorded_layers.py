"""flash-linear-attention 0.6.0's own layers, recorded: `fla_layers.safetensors` has weights, inputs x and the outputs y
that its classes gave for them on an H200 in float32 (heads of 32; random weights)."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from qed.model.conversion import KINDS, mixer_from_fla
from qed.testing import relative_error


@pytest.mark.parametrize("kind", KINDS)
def test_our_layer_gives_their_output(kind: str) -> None:
    recorded = load_file(Path(__file__).parent / "fla_layers.safetensors")
    weights = {name.removeprefix(f"{kind}/"): x for name, x in recorded.items() if name.startswith(f"{kind}/")}
    with torch.no_grad():
        found, _ = mixer_from_fla(kind, weights, num_heads=2)(recorded[f"{kind}:x"])
    assert relative_error(found, recorded[f"{kind}:y"]) < 1e-5
