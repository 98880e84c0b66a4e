"""`qed strength`: λ → s·λ in a trained checkpoint, at every token of prompt and answer, on the same frozen examples.

Each scale is compared with s = 1 example by example: exact McNemar, corrected (Holm) for all comparisons made.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ..eval.options import Options
from ..eval.run import Evaluation, evaluate
from ..files import write_json
from ..layers import Mixer
from ..model.causal_lm import QEDForCausalLM
from .results import Result, discordant, folder
from .stats import holm, mcnemar

SCALES = (-1.0, 0.0, 0.5, 1.0, 1.5, 2.0)  # the paper's s


def mean_strength(model: QEDForCausalLM) -> float:
    """Over layers and heads."""
    mixers = [block.mixer for block in model.model.layers if isinstance(block.mixer, Mixer)]
    found = [mixer.strength().detach().float() for mixer in mixers if mixer.row.strength]
    if not found:
        raise ValueError("CHECKPOINT: expected a model with a learned λ, got none: there is nothing to scale")
    return float(torch.cat(found).mean())


def compare(by_scale: dict[float, dict[str, Result]]) -> dict[str, dict[str, dict[str, Any]]]:
    """By scale and result: accuracy, and against s = 1, where there is one, the discordant pairs and p-values."""
    trained = by_scale.get(1.0, {})
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    for scale, results in by_scale.items():
        rows[str(scale)] = {}
        for name, result in results.items():
            if "correct" not in result.result:
                continue
            row = rows[str(scale)][name] = {key: result.result[key] for key in ("samples", "correct", "accuracy")}
            if scale != 1.0 and name in trained:
                b, c, _ = discordant(result, trained[name])
                row |= {"better": b, "worse": c, "p": mcnemar(b, c)}
    compared = [row for results in rows.values() for row in results.values() if "p" in row]
    for row, p in zip(compared, holm([row["p"] for row in compared]), strict=True):
        row["p_holm"] = p
    return rows


def sweep(
    checkpoint: Path,
    scales: tuple[float, ...],
    tasks: list[str],
    options: Options,
    *,
    out: Path,
    trained: Path | None = None,
    tokenizer: str | None,
    device: str,
    console: Console,
) -> dict[str, Any]:
    """Results go to a folder of `out` for each scale; those at s = 1 to `trained`, if it is given, where an evaluation
    of the same examples may have left them already."""
    if 1.0 not in scales:
        raise ValueError(f"--scales: expected 1 among them, to compare with, got {', '.join(map(str, scales))}")
    folders = {scale: trained if trained and scale == 1.0 else out / f"{scale:g}" for scale in scales}
    if len(set(folders.values())) < len(scales):
        raise ValueError(f"--scales: expected factors that differ in six digits, got {', '.join(map(str, scales))}")
    options = dataclasses.replace(options, prompts=options.prompts or out / "prompts")
    probe = Evaluation(checkpoint, tokenizer, options, device, Console(quiet=True))
    mean = mean_strength(probe.model)
    for scale, place in folders.items():
        probe.about["strength"] = scale
        probe.jobs(tasks, place)  # every scale's earlier results are looked at before the first is evaluated
    del probe
    for scale, place in folders.items():
        console.rule(f"s = {scale:g}")
        chosen = dataclasses.replace(options, strength=scale)
        done = evaluate(checkpoint, tasks, chosen, out=place, tokenizer=tokenizer, device=device, console=console)
    problems: list[str] = []
    found = {scale: folder(place, problems) for scale, place in folders.items()}
    rows = compare({scale: {name: x[name] for name in done if name in x} for scale, x in found.items()})
    for problem in problems:
        console.print(f"left out: {problem}", style="yellow", soft_wrap=True, markup=False)
    report = {"mean_strength": {str(scale): scale * mean for scale in scales}, "scales": rows}
    write_json(out / "strength.json", report)
    names = list(rows["1.0"])
    table = Table("s", "mean λ", *names, title="accuracy, and p against s = 1 (Holm)")
    for scale in scales:
        cells = []
        for name in names:
            row = rows[str(scale)].get(name)
            cells.append(
                "" if row is None else f"{row['accuracy']:.1%}" + (f" ({row['p_holm']:.2g})" if "p" in row else "")
            )
        table.add_row(f"{scale:g}", f"{scale * mean:.3f}", *cells)
    console.print(table)
    console.print(f"written to {out}", markup=False)
    return report
