"""What `qed train` prints when a run is finished: how it went, where the model is, and what to do next."""

from __future__ import annotations

import shlex
from pathlib import Path

from rich.console import Console

from ..data import Generated
from ..data.generated import is_generated
from ..data.tokenization import load
from ..eval.expressing import usual_task
from ..eval.task import NeedleTask
from ..eval.tasks import named
from ..train.config import TrainConfig
from ..train.display import clock
from ..train.metrics import read_metrics


def summarise(config: TrainConfig, out: Path, console: Console) -> None:
    """Print the summary of a finished run, whether it was trained at once or resumed.

    Args:
        config: the run.
        out: its folder, with metrics.jsonl and the exported model.
        console: where the summary is printed, one line for each thing.
    """
    rows, _ = read_metrics(out / "metrics.jsonl")
    # Every step has its own speed, so that the sum also counts the steps from before the run was resumed.
    speeds = [row.get("tokens_per_s") for row in rows]
    seconds = sum(config.batch_tokens / x for x in speeds if x)
    losses = {
        name: [row[key] for row in rows if row.get(key) is not None]
        for name, key in (("final loss", "loss"), ("validation loss", "validation_loss"))
    }
    said = [f"{name} {values[-1]:.4f}" for name, values in losses.items() if values]
    tokens = f"{config.steps * config.batch_tokens:,} tokens in {clock(seconds)}"
    console.print(f"finished: {', '.join([*said, tokens])}", highlight=False)
    for line in (f"the model is in {out / 'export'}", f"next: {shlex.join(_evaluation(config, out))}"):
        console.print(line, soft_wrap=True, highlight=False)  # to be copied as they are


def _evaluation(config: TrainConfig, out: Path) -> list[str]:
    """The words of a command that evaluates the model at its training length and beyond."""
    if is_generated(config.data):
        made = Generated(config.data).kind
        return ["qed", "eval", str(out), "--task", made.task, "--lengths", str(config.sequence)]
    tokenizer = out / "export" / "tokenizer.json"
    task = usual_task(load(str(tokenizer))) if tokenizer.exists() else named("niah_single_1", NeedleTask)
    lengths = ",".join(str(max(config.sequence, task.shortest) * factor) for factor in (1, 2, 4))
    return ["qed", "eval", str(out), "--task", task.name, "--lengths", lengths]
