"""`qed eigenvalues`: what a checkpoint's transitions do with real text.

A token's transition (I − k aᵀ) Diag(exp g) keeps, along its key, the share e = 1 − aᵀk of what is stored there: 0
erases it, below 0 overshoots, above 1 would let it grow. By layer, over tokens and heads:

    eigenvalue   e                                 its range, quantiles and histogram
    change       |λ dᵀk|                           what projecting the correction would change of e
    rho          ρ = qᵀk                           through which the correction reaches the read (eq. 12)
    correction   ‖a − b⊙k‖ / ‖a‖                   how much of the erase vector is correction
    outside      ‖S̄ᵀq⊥‖ / (‖S̄ᵀq⊥‖ + ‖o − S̄ᵀq⊥‖)   how much of the read the key's edit cannot reach (eq. 10)

S̄ᵀq⊥ is the op itself with q⊥ for its query: an edit along k changes nothing that is read across it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data.shards import TokenShards
from ..layers import Mixer
from ..model.causal_lm import QEDForCausalLM
from ..model.inspection import mixer_inputs
from ..ops import erase_write
from ..rules import orthogonal

QUANTILES = (0.0, 0.001, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999, 1.0)
EDGES = np.linspace(-0.5, 1.5, 201)  # of the eigenvalue's histogram; what lies beyond counts in the last bins
ROW = 2048  # tokens read at once


def quantities(mixer: Mixer, x: Tensor) -> dict[str, Tensor]:
    """Of every token (or sub-step) and head, [B, T, H], from a mixer's inputs [B, T, hidden]; in float32."""
    found = mixer.projections(x)
    q, k, a, u, g = mixer.row.operands(found)
    wide = [t.float() for t in (q, k, a)]
    q_, k_, a_ = wide
    along = (a_ * k_).sum(-1)
    named = {"eigenvalue": 1 - along, "rho": (q_ * k_).sum(-1)}
    across = orthogonal(q_, k_)
    outside = erase_write(across.to(q.dtype), k, a, u, g, scale=mixer.read_scale)[0].float()
    inside = erase_write(q, k, a, u, g, scale=mixer.read_scale)[0].float() - outside
    sizes = outside.norm(dim=-1), inside.norm(dim=-1)
    named["outside"] = sizes[0] / (sizes[0] + sizes[1]).clamp(min=1e-30)
    for name in ("rho", "outside"):  # of the sub-step that is read
        named[name] = named[name][:, mixer.row.substeps - 1 :: mixer.row.substeps]
    if mixer.row.strength and found.b is not None:
        correction = a_ - (found.b * found.k).float()
        named["correction"] = correction.norm(dim=-1) / a_.norm(dim=-1).clamp(min=1e-30)
        named["change"] = (correction * k_).sum(-1).abs()
    return named


@torch.no_grad()
def study(model: QEDForCausalLM, rows: Tensor) -> dict[int, dict[str, Tensor]]:
    """By layer, from tokens [B, T]."""
    found = mixer_inputs(model, rows)
    return {i: {name: y.cpu() for name, y in quantities(mixer, x).items()} for i, (mixer, x) in found.items()}


def summary(values: np.ndarray) -> dict[str, Any]:
    return {
        "samples": int(values.size),
        "mean": float(values.mean()),
        "quantiles": {str(q): float(x) for q, x in zip(QUANTILES, np.quantile(values, QUANTILES), strict=True)},
    }


def measure(model: QEDForCausalLM, shards: TokenShards, *, samples: int, done: Any = lambda n: None) -> dict[str, Any]:
    """Over the first tokens of a corpus, until `samples` tokens times heads times layers have been seen."""
    heads = sum(block.mixer.num_heads for block in model.model.layers if isinstance(block.mixer, Mixer))
    if heads == 0:
        raise ValueError("CHECKPOINT: expected a model with recurrent layers, got none")
    tokens = -(-samples // heads)
    if tokens > len(shards):
        raise ValueError(f"--data: expected {tokens} tokens for {samples} samples, got {len(shards)}")
    device = model.lm_head.weight.device
    collected: dict[int, dict[str, list[np.ndarray]]] = {}
    for start in range(0, tokens, ROW):
        row = torch.from_numpy(shards.read(start, min(ROW, tokens - start)))[None].to(device)
        for layer, found in study(model, row).items():
            for name, values in found.items():
                collected.setdefault(layer, {}).setdefault(name, []).append(values.flatten().numpy())
        done(min(start + ROW, tokens))
    layers = {
        layer: {name: np.concatenate(parts) for name, parts in found.items()} for layer, found in collected.items()
    }
    names = sorted({name for found in layers.values() for name in found})
    whole = {name: np.concatenate([x[name] for x in layers.values() if name in x]) for name in names}
    histogram = {
        str(layer): np.histogram(np.clip(found["eigenvalue"], EDGES[0], EDGES[-1]), EDGES)[0].tolist()
        for layer, found in layers.items()
    }
    return {
        "tokens": tokens,
        "all": {name: summary(values) for name, values in whole.items()},
        "layers": {str(i): {name: summary(values) for name, values in found.items()} for i, found in layers.items()},
        "eigenvalue_histogram": {"edges": [round(float(x), 4) for x in EDGES], "counts": histogram},
    }
