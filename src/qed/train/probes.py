"""What the layers do with real tokens: ranges of gates, decays and eigenvalues, measured while training.

The eigenvalue of a token's transition along its key is e = 1 − aᵀk: at 1 what is stored there is kept, at 0 it is
erased, and below 0 its sign changes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..layers import Mixer
from ..model.causal_lm import QEDForCausalLM
from ..model.inspection import mixer_inputs


@torch.no_grad()
def ranges(model: QEDForCausalLM, ids: Tensor) -> dict[str, dict[str, list[float]]]:
    """By layer: [least, mean, most] of the erase gate b, the write gate w, the decay exp g and the eigenvalue."""
    return {str(i): _ranges_of(mixer, x) for i, (mixer, x) in mixer_inputs(model, ids).items()}


def _ranges_of(mixer: Mixer, x: Tensor) -> dict[str, list[float]]:
    projections = mixer.projections(x)
    operands = mixer.row.operands(projections)
    eigenvalues = 1 - (operands.a.float() * operands.k.float()).sum(-1)
    decay = None if projections.g is None else projections.g.exp()
    measured: dict[str, Any] = {"b": projections.b, "w": projections.w, "decay": decay, "eigenvalue": eigenvalues}
    present = {name: y.float() for name, y in measured.items() if y is not None}
    return {name: [float(y.min()), float(y.mean()), float(y.max())] for name, y in present.items()}
