"""lm-eval's tasks on our checkpoints, one after the other: all is checked first, each result is kept as it comes.

OUT/lm-eval-NAME.json            what is being asked, then lm-eval's own scores; NAME is the task, and its length if any
OUT/lm-eval-NAME.jsonl           a line for every example: what was said, what is right, its scores
OUT/lm-eval-NAME.answers.jsonl   while the task runs: a line for every request, from which a killed run goes on
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from ...files import read_json, write_json
from ...locks import held
from ..expressing import example_obstacle
from ..prompts import progress
from ..records import check_same, text_digest, write_lines
from ..run import Evaluation
from ..tasks import niah
from . import tasks as harness_tasks
from .hub import asked_once
from .journal import Journal
from .model import UNLIMITED, harness_model
from .ruler import Ruler
from .suites import MEMBERS, PREFIX, SUITES, has_files

if TYPE_CHECKING:
    from ..options import Options

EXAMPLES = 4  # of a task that are looked at to know whether the tokenizer can express it
END = 500  # characters from the end of a prompt that are kept with an answer


class Job:
    """One task, at one length if it has lengths: what it is about, and its examples."""

    def __init__(self, task: str, length: int | None, make: Callable[[], Any], about: dict[str, Any]):
        """Args: task, lm-eval's name; length, in tokens; make, builds it; about, what decides its result."""
        self.task, self.length, self.make, self.about = task, length, make, about
        self.name = f"{PREFIX}-{task}" if length is None else f"{PREFIX}-{task}-{length}"


class HarnessRun:
    """A checkpoint, and the tasks of lm-eval that are to be asked of it."""

    def __init__(
        self,
        checkpoint: Path,
        tokenizer: str | None,
        options: Options,
        *,
        out: Path,
        device: str,
        console: Console,
        folder: Path,
    ):
        """Load the checkpoint.

        Args:
            checkpoint: a folder that save_pretrained wrote.
            tokenizer: a file, where the checkpoint has none.
            options: lengths, samples, files, batch, strength and so on.
            out: the folder for results.
            device: where the model runs.
            console: for progress bars and the table.
            folder: an empty one, for the tokenizer as lm-eval reads it.
        """
        self.options, self.out, self.console = options, out, console
        make = harness_model()
        self.run = Evaluation(checkpoint, tokenizer, options, device, console)
        with harness_tasks.quiet():
            self.model = make(
                self.run.model,
                tokenizer=self.run.tokenizer,
                bos=options.bos,
                batch_size=options.batch,
                max_length=options.max_length or UNLIMITED,
            )
        # A folder of its own: lm-eval lets a tokenizer's folder bring code, and here is nothing but what we write.
        self.model.tokenizer.save_pretrained(folder)
        self.ruler = Ruler(options, self.model.tokenizer, folder, out)
        self.about = self.run.about | {"lm_eval": version("lm-eval"), "samples": options.samples}
        self.about |= {"bos": self.model.bos, "max_length": options.max_length}

    def jobs(self, names: list[str]) -> list[Job]:
        """All that is to be done. Whatever is wrong with names, files, lengths or earlier results raises here."""
        names = checked_names(names)
        with_lengths = [name for name in names if name in MEMBERS and MEMBERS[name].lengths]
        if with_lengths and (self.options.max_length or UNLIMITED) < max(self.options.lengths):
            most = self.options.max_length
            raise ValueError(f"--max-length: expected {max(self.options.lengths)} or more, as --lengths, got {most}")
        others = [name for name in names if name not in with_lengths]
        tasks = harness_tasks.built(others, self.options)
        self.ruler.check(with_lengths)
        jobs = [self._job(name, task) for name, task in tasks.items()]
        jobs += [self._ruler_job(name, length) for name in with_lengths for length in self.options.lengths]
        for job in jobs:
            check_same(self.out, job.name, job.about)
        return jobs

    def _job(self, name: str, task: Any) -> Job:
        given = "file" if name in self.options.data else str(getattr(task, "DATASET_PATH", None))
        about = {"task": name, "version": task.VERSION, "from": given}
        about |= {"examples": harness_tasks.identity(task, self.options.samples)}
        return Job(name, None, lambda: task, self.about | about)

    def _ruler_job(self, name: str, length: int) -> Job:
        def make() -> Any:
            import datasets

            rows = self.ruler.rows(name, length)
            drawn = {"task": name, "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(rows)}}
            with harness_tasks.quiet():
                return harness_tasks.task_manager().load([{"group": "drawn", "task": [drawn]}])["tasks"][name]

        entry = harness_tasks.task_manager().task_index[name]
        about = {
            "task": name,
            "version": _version(entry),
            "length": length,
            "prompts": self.ruler.path(name, length).name,
        }
        return Job(name, length, make, self.about | about)

    def do(self, job: Job) -> dict[str, Any]:
        """Asks one task, or goes on with it, writes its result and returns it. A result that is there is read."""
        summary = self.out / f"{job.name}.json"
        if summary.exists():
            before = read_json(summary, "a result of lm-eval")
            if "result" in before:
                return dict(before["result"])
        start = time.perf_counter()
        head = {"about": job.about, "provenance": self.run.provenance}
        self.out.mkdir(parents=True, exist_ok=True)
        write_json(summary, head)
        task = job.make()
        self._warn(job, task)
        journal = self.out / f"{job.name}.answers.jsonl"
        with self._asking(job.name, journal):
            evaluated = _scored(self.model, job.task, task, self.options.samples)
        write_lines(self.out / f"{job.name}.jsonl", map(_line, evaluated["samples"][job.task]))
        (found,) = evaluated["results"].values()
        measures = {key: x for key, x in found.items() if isinstance(x, int | float) and x != -1}
        better = evaluated["higher_is_better"][job.task]
        result = {job.task: measures | {"higher_is_better": better}}
        write_json(summary, head | {"result": result})
        journal.unlink(missing_ok=True)
        return {job.task: result[job.task] | {"seconds": time.perf_counter() - start}}

    @contextmanager
    def _asking(self, name: str, journal: Path) -> Iterator[None]:
        """A bar that shows how many requests are answered, on the terminal as it is now: lm-eval is kept silent."""
        shown = Console(file=self.console.file, force_terminal=self.console.is_terminal, quiet=self.console.quiet)
        with progress(shown) as bar:
            number = bar.add_task(name.removeprefix(f"{PREFIX}-"), total=None)
            self.model.journal = Journal(journal, lambda done, total: bar.update(number, completed=done, total=total))
            yield
        self.model.journal = Journal()

    def _warn(self, job: Job, task: Any) -> None:
        """Says so where the tokenizer cannot express what a task asks."""
        with harness_tasks.quiet():
            task.build_all_requests(limit=EXAMPLES)
        asked = [x for x in task.instances if isinstance(x.args[0], str)][: 4 * EXAMPLES]
        examples = []
        for x in asked:
            generated = x.request_type == "generate_until"
            golds = tuple(x.doc["outputs"]) if generated and job.length is not None else ()
            text = x.args[0] if generated else "".join(x.args)
            examples.append((golds, self.run.tokenizer.encode(text, add_special_tokens=False).ids))
        reason = example_obstacle(job.task, niah.correct, examples, self.run.tokenizer)
        if reason is not None:
            self.console.print(f"warning: {reason}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def checked_names(names: list[str]) -> list[str]:
    """The tasks of suites and tasks of these names; ValueError for a name that lm-eval does not have."""
    tasks = [task for name in names for task in SUITES.get(name, (name,))]
    harness_tasks.check_names(tasks)
    return tasks


def _version(entry: Any) -> Any:
    """The version of a task that is not built yet."""
    from lm_eval.tasks._yaml_loader import load_yaml

    with harness_tasks.quiet():
        return load_yaml(entry.yaml_path, resolve_func=False).get("metadata", {}).get("version")


def _scored(model: Any, name: str, task: Any, samples: int | None) -> Any:
    """lm-eval's own scores of a model's answers to one task."""
    from lm_eval.evaluator import evaluate

    if task.config.num_fewshot is None:
        task.set_config(key="num_fewshot", value=0)
    with harness_tasks.quiet():
        return evaluate(model, {"tasks": {name: task}}, limit=samples, bootstrap_iters=0, log_samples=True)


def _line(sample: dict[str, Any]) -> dict[str, Any]:
    """What is kept of an example."""
    prompt = str(sample["arguments"][0][0])
    said = [x[0] for x in sample["resps"]]
    return {
        "index": sample["doc_id"],
        "prompt_end": prompt[-END:],
        "prompt_sha256": text_digest(prompt),
        "prediction": said[0] if len(said) == 1 else said,
        "gold": sample["target"],
        "metrics": {name: sample[name] for name in sample["metrics"] if sample[name] != -1},
    }


def run(
    checkpoint: Path,
    names: list[str],
    options: Options,
    *,
    out: Path,
    device: str,
    console: Console,
    tokenizer: str | None = None,
) -> dict[str, dict[str, Any]]:
    """Runs lm-eval's tasks, writes their results, prints a table, and returns the results by name.

    Args:
        checkpoint: a folder that save_pretrained wrote.
        names: of suites, or of lm-eval's tasks.
        options: lengths, samples, files, batch and strength.
        out: the folder for results; a run that is there unfinished is resumed.
        tokenizer: a file, where the checkpoint has none.
        device: where the model runs.
        console: for progress bars and the table.
    """
    harness_model()  # which says so where lm-eval is not installed
    downloaded = [x for x in checked_names(names) if not has_files(x, options)]  # before a model is loaded
    results = {}
    with tempfile.TemporaryDirectory() as folder, asked_once() if downloaded else nullcontext():
        place: dict[str, Any] = {"out": out, "device": device, "console": console, "folder": Path(folder)}
        work = HarnessRun(checkpoint, tokenizer, options, **place)
        for job in work.jobs(names):
            with held(out, job.name):
                results[job.name] = work.do(job)
    console.print(table(results, f"lm-eval {version('lm-eval')}, {checkpoint}"))
    console.print(f"written to {out}", markup=False)
    return results


def table(results: dict[str, dict[str, Any]], title: str) -> Table:
    """Results of lm-eval by name, as a table: what their suite shows of them, or all measures."""
    shown = Table("task", "length", "measure", "value", "of", "seconds", title=title)
    for name, result in results.items():
        for task, found in result.items():
            length = name.removeprefix(f"{PREFIX}-{task}").removeprefix("-")
            for key, value in found.items():
                measure = key.partition(",")[0]
                wanted = MEMBERS[task].shown or (length,) if task in MEMBERS else None
                if "," in key and isinstance(value, int | float) and (wanted is None or measure in wanted):
                    named = "correct" if measure == length else measure
                    took = f"{found['seconds']:.1f}" if "seconds" in found else "done before"
                    shown.add_row(task, length, named, f"{value:.4f}", str(found["sample_len"]), took)
    return shown
