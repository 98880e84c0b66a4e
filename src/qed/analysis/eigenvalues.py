"""`qed eigenvalues`: what a checkpoint's transitions do with real text.

A token's transition (I − k aᵀ) Diag(exp g) keeps, along its key, the share e = 1 − aᵀk of what is stored there: 0
erases it, below 0 overshoots, above 1 would let it grow. These are measured by layer, over tokens and heads:

    eigenvalue   e                                 its range, quantiles and histogram
    change       |λ dᵀk|                           how much projecting the correction would change e
    rho          ρ = qᵀk                           through which the correction reaches the read (eq. 12)
    correction   ‖a − b⊙k‖ / ‖a‖                   how much of the erase vector is correction
    outside      ‖S̄ᵀq⊥‖ / (‖S̄ᵀq⊥‖ + ‖o − S̄ᵀq⊥‖)   how much of the read the key's edit cannot reach (eq. 10)

S̄ᵀq⊥ is what the op itself reads with q⊥ as its query: an edit along k changes nothing that is read across it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from ..data.shards import TokenShards
from ..eval.options import Options
from ..eval.run import Evaluation
from ..files import write_json
from ..layers import Mixer
from ..model.causal_lm import QEDForCausalLM
from ..model.inspection import mixer_inputs
from ..ops import erase_write
from ..provenance import provenance
from ..rules import orthogonal
from .paper import EIGENVALUES

QUANTILES = (0.0, 0.001, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999, 1.0)
EDGES = np.linspace(-0.5, 1.5, 201)  # of the eigenvalue's histogram; values beyond them count in the outermost bins
ROW = 2048  # tokens that the model reads at once


def quantities(mixer: Mixer, x: Tensor) -> dict[str, Tensor]:
    """The float32 quantities [B, T, H] of every token (or sub-step) and head, from a mixer's inputs [B, T, hidden]."""
    projections = mixer.projections(x)
    q, k, a, u, g = mixer.row.operands(projections)
    wide = [t.float() for t in (q, k, a)]
    q_, k_, a_ = wide
    along = (a_ * k_).sum(-1)
    named = {"eigenvalue": 1 - along, "rho": (q_ * k_).sum(-1)}
    across = orthogonal(q_, k_)
    outside = erase_write(across.to(q.dtype), k, a, u, g, scale=mixer.read_scale)[0].float()
    inside = erase_write(q, k, a, u, g, scale=mixer.read_scale)[0].float() - outside
    sizes = outside.norm(dim=-1), inside.norm(dim=-1)
    named["outside"] = sizes[0] / (sizes[0] + sizes[1]).clamp(min=1e-30)
    for name in ("rho", "outside"):  # only the last sub-step of a token is read
        named[name] = named[name][:, mixer.row.substeps - 1 :: mixer.row.substeps]
    if mixer.row.strength and projections.b is not None:
        correction = a_ - (projections.b * projections.k).float()
        named["correction"] = correction.norm(dim=-1) / a_.norm(dim=-1).clamp(min=1e-30)
        named["change"] = (correction * k_).sum(-1).abs()
    return named


@torch.no_grad()
def study(model: QEDForCausalLM, rows: Tensor) -> dict[int, dict[str, Tensor]]:
    """The quantities of every layer, on the CPU, for rows of tokens [B, T]."""
    inputs = mixer_inputs(model, rows)
    return {i: {name: y.cpu() for name, y in quantities(mixer, x).items()} for i, (mixer, x) in inputs.items()}


def summary(values: np.ndarray) -> dict[str, Any]:
    """The number, mean and quantiles of one quantity's values."""
    return {
        "samples": int(values.size),
        "mean": float(values.mean()),
        "quantiles": {str(q): float(x) for q, x in zip(QUANTILES, np.quantile(values, QUANTILES), strict=True)},
    }


def measure(
    model: QEDForCausalLM, shards: TokenShards, *, samples: int | None, done: Callable[[int], object] = lambda n: None
) -> dict[str, Any]:
    """Summaries of all quantities over the first tokens of a corpus.

    Args:
        model: a model with recurrent layers.
        shards: the corpus, in tokens of the model's tokenizer.
        samples: values of each quantity to see at least: tokens times heads times layers; if it is None, as many as
            the paper has, or all that the corpus gives if they are fewer.
        done: called with the number of tokens read so far.
    """
    heads = sum(block.mixer.num_heads for block in model.model.layers if isinstance(block.mixer, Mixer))
    if heads == 0:
        raise ValueError("CHECKPOINT: expected a model with recurrent layers, got none")
    if samples is None:
        samples = min(EIGENVALUES["samples"], len(shards) * heads)
    tokens = -(-samples // heads)
    if tokens > len(shards):
        raise ValueError(f"--data: expected {tokens} tokens for {samples} samples, got {len(shards)}")
    device = model.device
    collected: dict[int, dict[str, list[np.ndarray]]] = {}
    for start in range(0, tokens, ROW):
        row = torch.from_numpy(shards.read(start, min(ROW, tokens - start)))[None].to(device)
        for layer, by_name in study(model, row).items():
            for name, values in by_name.items():
                collected.setdefault(layer, {}).setdefault(name, []).append(values.flatten().numpy())
        done(min(start + ROW, tokens))
    layers = {
        layer: {name: np.concatenate(rows) for name, rows in by_name.items()} for layer, by_name in collected.items()
    }
    names = sorted({name for by_name in layers.values() for name in by_name})
    whole = {name: np.concatenate([x[name] for x in layers.values() if name in x]) for name in names}
    histogram = {
        str(layer): np.histogram(np.clip(by_name["eigenvalue"], EDGES[0], EDGES[-1]), EDGES)[0].tolist()
        for layer, by_name in layers.items()
    }
    return {
        "tokens": tokens,
        "all": {name: summary(values) for name, values in whole.items()},
        "layers": {str(i): {name: summary(values) for name, values in x.items()} for i, x in layers.items()},
        "eigenvalue_histogram": {"edges": [round(float(x), 4) for x in EDGES], "counts": histogram},
    }


def write_eigenvalues(
    checkpoint: Path, data: Path, *, samples: int | None, out: Path, device: str, console: Console
) -> None:
    """Do what `qed eigenvalues` asks for: measure a checkpoint over a corpus, write the result, print its summary.

    Args:
        checkpoint: a folder that `save_pretrained` wrote.
        data: a folder of `qed prepare`, of the checkpoint's tokenizer.
        samples: values to see at least: tokens times heads times layers; None for the usual number.
        out: the JSON file to write.
        device: where the model runs.
        console: where progress and the summary are printed.
    """
    shards = TokenShards(data)
    run = Evaluation(
        checkpoint,
        None if (checkpoint / "tokenizer.json").exists() else str(data / "tokenizer.json"),
        Options(),
        device,
        console,
    )
    if shards.index["tokenizer_sha256"] != run.about["tokenizer"]:
        raise ValueError(f"--data: expected tokens of the checkpoint's tokenizer, got another's in {data}")
    run.model = run.model.to(torch.float32)  # e is a difference from 1
    with console.status("reading text") as status:
        measured = measure(run.model, shards, samples=samples, done=lambda n: status.update(f"{n:,} tokens read"))
    about = {
        "checkpoint": run.about["checkpoint"],
        "tokenizer": run.about["tokenizer"],
        "samples": samples or measured["all"]["eigenvalue"]["samples"],
    }
    came_from = provenance(device) | {"data": str(data)}
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, {"about": about, "provenance": came_from} | measured)
    e = measured["all"]["eigenvalue"]
    console.print(
        f"e = 1 − aᵀk over {e['samples']:,} samples: from {e['quantiles']['0.0']:.4f} to {e['quantiles']['1.0']:.4f}"
    )
    for name, x in measured["all"].items():
        if name != "eigenvalue":
            console.print(f"{name}: mean {x['mean']:.4f}, largest {x['quantiles']['1.0']:.4g}")
    console.print(f"written to {out}", markup=False)
