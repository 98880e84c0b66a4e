"""`qed strength`: scale λ to s·λ in a trained checkpoint, at every token of prompt and answer, on frozen examples.

Each scale is compared with s = 1 example by example: McNemar's exact test, with Holm's correction over all comparisons.
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
    """The mean λ over layers and heads; ValueError for a model that has none."""
    mixers = [block.mixer for block in model.model.layers if isinstance(block.mixer, Mixer)]
    strengths = [mixer.strength().detach().float() for mixer in mixers if mixer.row.strength]
    if not strengths:
        raise ValueError("CHECKPOINT: expected a model with a learned λ, got none: there is nothing to scale")
    return float(torch.cat(strengths).mean())


def compare(by_scale: dict[float, dict[str, Result]]) -> dict[str, dict[str, dict[str, Any]]]:
    """The accuracy of every result, by scale and name; discordant pairs and p-values where there is one at s = 1."""
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
    """Evaluate a checkpoint at every scale, write and print how each compares with s = 1, and return that.

    Args:
        checkpoint: a folder that `save_pretrained` wrote.
        scales: factors s of λ, with 1 among them.
        tasks: names of evaluation tasks.
        options: lengths, samples and files of the tasks.
        out: the folder to write, with one folder per scale.
        trained: where results at s = 1 go instead, because an evaluation of the same examples may be there already.
        tokenizer: a tokenizer other than the checkpoint's own.
        device: where the model runs.
        console: where progress and the table are printed.
    """
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
    results = {scale: folder(place, problems, scale) for scale, place in folders.items()}
    rows = compare({scale: {name: x[name] for name in done if name in x} for scale, x in results.items()})
    for problem in problems:
        console.print(f"left out: {problem}", style="yellow", soft_wrap=True, markup=False)
    report = {"mean_strength": {str(scale): scale * mean for scale in scales}, "scales": rows}
    write_json(out / "strength.json", report)
    _print_table(rows, {scale: scale * mean for scale in scales}, console)
    console.print(f"written to {out}", markup=False)
    return report


def _print_table(rows: dict[str, dict[str, dict[str, Any]]], means: dict[float, float], console: Console) -> None:
    """A row for each scale with its mean λ, and a column for each result."""
    names = list(rows["1.0"])
    table = Table("s", "mean λ", *names, title="accuracy, and p against s = 1 (Holm)")
    for scale, mean in means.items():
        cells = []
        for name in names:
            row = rows[str(scale)].get(name)
            cells.append(
                "" if row is None else f"{row['accuracy']:.1%}" + (f" ({row['p_holm']:.2g})" if "p" in row else "")
            )
        table.add_row(f"{scale:g}", f"{mean:.3f}", *cells)
    console.print(table)
