"""The lm-eval harness on our checkpoints: its own tasks and scoring, with data from files.

Our model is registered there as "qed", an `HFLM` that knows our tokenizer files and by default cuts no prompt. RULER's
tasks make their prompts themselves; where they or others would load a data set from a hub, files of --data and --essays
are read.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from ..data import tokenization
from ..data.tokenizer_files import as_transformers
from ..files import write_json
from ..model.base import weights_dtype
from ..model.loading import load
from ..provenance import environment, git_state
from .records import digest, lines, numbered_lines, text_digest, write_lines
from .task import RecallTask, checked_golds
from .tasks import niah, of_kind

if TYPE_CHECKING:
    from .options import Options

LONGEST = 33_024  # 32K, and room for the answer
ESSAYS = "baber/paul_graham_essays"


@lru_cache
def harness_model() -> Any:
    """The class of our models in lm-eval, registered there as "qed"."""
    try:
        from lm_eval.api.registry import register_model
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise ImportError(f"--harness: lm-eval is not installed: {error}", name="lm_eval") from error

    class QEDLM(HFLM):  # type: ignore[misc]
        def __init__(self, pretrained: str, strength: float = 1.0, device: str = "cpu", **options: Any):
            model = load(Path(pretrained), dtype=weights_dtype(device), device=device)
            model.set_strength_scale(float(strength))
            tokenizer = as_transformers(tokenization.load(str(Path(pretrained) / "tokenizer.json")))
            super().__init__(pretrained=model, tokenizer=tokenizer, **({"max_length": LONGEST} | options))

    return register_model("qed")(QEDLM)


@contextmanager
def data_from_files(options: Options) -> Iterator[None]:
    """Lets lm-eval read the files that are given in place of the hub's data sets."""
    import datasets
    from lm_eval.tasks.ruler import prepare_niah

    whole, sentences = datasets.load_dataset, prepare_niah.sent_tokenize

    def load(path: str, *args: Any, **named: Any) -> Any:
        for name, task in of_kind(RecallTask).items():
            if path == task.dataset and name in options.data:
                examples = datasets.Dataset.from_list(list(lines(options.data[name])))
                return datasets.DatasetDict({"validation": examples})
        if path == ESSAYS and options.essays is not None:
            return datasets.Dataset.from_list([{"text": niah.essays(options.essays)}])
        return whole(path, *args, **named)

    split, _ = niah.splitter()
    datasets.load_dataset = load
    if split is None:
        prepare_niah.sent_tokenize = niah.Haystack().split
    try:
        yield
    finally:
        datasets.load_dataset, prepare_niah.sent_tokenize = whole, sentences


@lru_cache
def task_manager() -> Any:
    """lm-eval's index of its tasks, which takes seconds to read."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


def _check(checkpoint: Path, tasks: list[str], options: Options) -> None:
    known = set(task_manager().all_tasks)
    for task in tasks:
        if task not in known:
            nearest = ", ".join(get_close_matches(task, known)) or "names of lm-eval's tasks"
            raise ValueError(f"--task: expected {nearest}, got {task!r}")
    if not (checkpoint / "tokenizer.json").is_file():
        raise ValueError(f"CHECKPOINT: expected a tokenizer.json in it for --harness, got none in {checkpoint}")
    if options.essays is not None:
        niah.essays(options.essays)
    for task, path in options.data.items():
        rows = 0
        for number, row in numbered_lines(path):
            rows += 1
            checked_golds((row.get("value"),), f"{path}:{number}")
        if not rows:
            raise ValueError(f"{path}: expected examples of {task}, got none")


def run(
    checkpoint: Path, tasks: list[str], options: Options, *, out: Path, device: str, console: Console
) -> dict[str, Any]:
    """Runs lm-eval, writes its results with its samples beside them, and returns the results. Files, names of tasks and
    the tokenizer are checked first.

    Args:
        checkpoint: a folder that save_pretrained wrote, with a tokenizer.json.
        tasks: names of lm-eval's tasks.
        options: lengths, samples, files, batch and strength.
        out: the folder for results.
        device: where the model runs.
        console: for the table.
    """
    make = harness_model()
    _check(checkpoint, tasks, options)
    language_model = make(str(checkpoint), options.strength, device, batch_size=options.batch)
    from lm_eval import simple_evaluate

    # A folder of its own: lm-eval lets a tokenizer's folder bring code, and here is nothing but what we write.
    with tempfile.TemporaryDirectory() as folder, data_from_files(options):
        language_model.tokenizer.save_pretrained(folder)
        evaluated = simple_evaluate(
            model=language_model,
            tasks=list(tasks),
            limit=options.samples,
            log_samples=True,
            bootstrap_iters=0,
            metadata={"tokenizer": folder, "max_seq_lengths": list(options.lengths)},
        )
    for task, samples in evaluated["samples"].items():
        rows = [
            {
                "index": sample["doc_id"],
                "prompt": sample["arguments"][0][0],
                "prompt_sha256": text_digest(sample["arguments"][0][0]),
                "prediction": sample["resps"][0][0],
                "gold": sample["target"],
                "metrics": {name: sample[name] for name in sample["metrics"]},
            }
            for sample in samples
        ]
        write_lines(out / f"lm-eval-{task}.jsonl", rows)
    results = json.loads(json.dumps(evaluated["results"], default=str))
    about = {"harness": "lm-eval", "tasks": list(tasks), "lengths": list(options.lengths), "limit": options.samples}
    provenance = {"environment": environment(device), "git": git_state(), "folder": str(checkpoint)}
    write_json(
        out / f"lm-eval-{digest(about)[:12]}.json", {"about": about, "provenance": provenance, "result": results}
    )
    table = Table("task", "metric", "value", title=f"lm-eval, {checkpoint}")
    for task, metrics in results.items():
        for name, value in metrics.items():
            if isinstance(value, int | float) and value != -1:
                table.add_row(task, name, f"{value:.4f}")
    console.print(table)
    return dict(results)
