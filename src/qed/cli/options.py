"""The options that several commands share, and how options are read and checked before anything runs."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from ..choices import check_choice
from ..eval.harness.suites import SUITES
from ..eval.task import RecallTask
from ..eval.tasks import TASKS, of_kind
from ..files import read_json
from . import completion

LARGEST_SEED = 2**32 - 1  # that Python, NumPy and PyTorch all take
LARGEST_SIZE = 2**24  # tokens or samples; a larger number is a typing mistake
LARGEST_WIDTH = 2**13  # heads, or channels of one


def finite(parameter: typer.CallbackParam, value: float | None) -> float | None:
    """Refuse NaN and infinity, which ranges let through; a callback for options that are numbers."""
    if value is not None and not math.isfinite(value):
        raise ValueError(f"{parameter.opts[0]}: expected a finite number, got {value}")
    return value


def checkpoint_folder(path: Path | None) -> Path | None:
    """Return the folder of a checkpoint: for a folder of `qed train`, the model it exported; a callback for arguments.

    Any other path is returned as it is, and refused where it is loaded if it is no checkpoint.
    """
    if path is None or any(path.glob("*.safetensors*")):
        return path
    if (path / "export").is_dir():
        return path / "export"
    if (path / "config.json").exists() and ((path / "checkpoints").is_dir() or (path / "metrics.jsonl").exists()):
        raise ValueError(
            "CHECKPOINT: expected a folder that save_pretrained wrote, or that of a finished run, "
            f"got {path}, a run that is not finished: it has no export yet; the command that began it resumes it"
        )
    return path


def results_folder(checkpoint: Path) -> Path:
    """Return the folder in which results of a checkpoint are kept unless --out names another one: that of its run,
    where `qed report` finds them, or the checkpoint's own."""
    run = checkpoint.parent
    return run if checkpoint.name == "export" and (run / "config.json").exists() else checkpoint


def run_data(checkpoint: Path) -> Path:
    """Return the held-out data of the run whose model a checkpoint is, or its training data if it had no others."""
    config = results_folder(checkpoint) / "config.json"
    run = read_json(config).get("config") if checkpoint.name == "export" and config.exists() else None
    named = [run.get(name) for name in ("validation", "data")] if isinstance(run, dict) else []
    found = next((Path(name) for name in named if name), None)
    if found is None:
        raise ValueError(
            f"--data: expected a folder that `qed prepare` wrote, since {checkpoint} is of no run, got none"
        )
    return found


def _import(paths: list[Path] | None) -> list[Path]:
    """Run the files that --import names, before any other option is looked at."""
    for path in paths or []:
        from ..recipes.importing import import_file

        import_file(path)
    return paths or []


Import = Annotated[
    list[Path] | None,
    typer.Option(
        "--import",
        metavar="FILE",
        is_eager=True,
        callback=_import,
        help="A Python file that adds rules, arms, recipes or loggers; may be repeated. Results keep its sha256.",
    ),
]
CHECKPOINT = typer.Argument(
    help="A folder that save_pretrained wrote, or that of a finished run of `qed train`.", callback=checkpoint_folder
)
Checkpoint = Annotated[Path, CHECKPOINT]
OptionalCheckpoint = Annotated[Path | None, CHECKPOINT]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N; 'auto' takes a GPU if there is one.")]
Seed = Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="Seed of everything that is random.")]
Strength = Annotated[float, typer.Option(help="A factor s on every λ.", callback=finite)]
Tasks = Annotated[
    list[str] | None,
    typer.Option(help=f"One or more of {', '.join(TASKS)}, separated by commas.", autocompletion=completion.tasks),
]
Lengths = Annotated[str, typer.Option(help="Context lengths of needle tasks in tokens, separated by commas.")]
Samples = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=LARGEST_SIZE,
        help="Examples of each task and length; by default 500 of needle tasks, and all of the others.",
    ),
]
Tokenizer = Annotated[
    str | None, typer.Option(help="A .model or .json file, if the checkpoint's folder has no tokenizer.")
]
Words = Annotated[
    Path | None, typer.Option(help="A folder of word lists for keys, instead of the wonderwords package.")
]
Essays = Annotated[
    Path | None, typer.Option(help="The haystack of needle tasks other than niah_single_1: .json or .txt, also .xz.")
]
Data = Annotated[
    list[str] | None,
    typer.Option(
        help="TASK=FILE of JSON lines; a folder with TASK.jsonl of several tasks; positions=FOLDER or states=FOLDER "
        "that `qed prepare` wrote. May be given repeatedly."
    ),
]
Suites = Annotated[
    list[str] | None,
    typer.Option(
        "--suite",
        help=f"Tasks of lm-eval that papers report together: one or more of {', '.join(SUITES)}.",
        autocompletion=completion.suites,
    ),
]
Variant = Annotated[str, typer.Option(help=f"How {', '.join(of_kind(RecallTask))} are asked: A0, A1 or B.")]
Prompts = Annotated[Path | None, typer.Option(help="A folder of frozen prompts that runs share.")]
Batch = Annotated[int, typer.Option(min=1, max=LARGEST_SIZE, help="Prompts at a time.")]
Heads = Annotated[int, typer.Option(min=1, max=LARGEST_WIDTH, help="Heads of the op.")]
Width = Annotated[int, typer.Option(min=1, max=LARGEST_WIDTH, help="Channels of a head, of keys and of values.")]
Tokens = Annotated[int, typer.Option(min=1, max=LARGEST_SIZE, help="Tokens of a sequence.")]
Rows = Annotated[int, typer.Option(min=1, max=LARGEST_SIZE, help="Sequences at a time.")]


def choice(option: str, value: str, allowed: Iterable[str]) -> None:
    """Refuse a value that is not allowed.

    Args:
        option: The option's name, for the message.
        value: What was given.
        allowed: All values that are allowed; an empty one stands for leaving the option out.
    """
    if value or "" not in allowed:
        check_choice(option, value, [name or "nothing" for name in allowed])


def device_for(name: str) -> str:
    """Return the device of this name, for "auto" a GPU if there is one; refuse a device that is not here."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return "cuda" if count else "cpu"
    there = ["cpu", *(["cuda"] if count else []), *(f"cuda:{i}" for i in range(count))]
    if name not in there:
        raise ValueError(f"--device: expected auto or what is here ({', '.join(there)}), got {name!r}")
    return name


def assignments(items: list[str] | None) -> dict[str, str]:
    """Read field=value of every --set; each field may be given once."""
    values: dict[str, str] = {}
    for item in items or []:
        field, separator, value = item.partition("=")
        if not separator or not field:
            raise ValueError(f"--set: expected field=value, got {item!r}")
        if field in values:
            raise ValueError(f"--set: expected one value of {field}, got {values[field]!r} and {value!r}")
        values[field] = value
    return values


ENDINGS = (".jsonl", ".jsonl.xz", ".json", ".json.xz")  # of a task's file in a folder of --data


def files(data: list[str] | None, allowed: Iterable[str]) -> dict[str, Path]:
    """Read TASK=FILE of every --data. Each task in `allowed` may be given once, and its file or folder must exist. Of a
    folder those files are taken that are named after a task in `allowed` which has none of its own."""
    allowed, paths = list(allowed), dict[str, Path]()
    folders = [Path(item) for item in data or [] if "=" not in item and Path(item).is_dir()]
    for item in data or []:
        if Path(item) in folders:
            continue
        task, separator, path = item.partition("=")
        if not separator or not path:
            raise ValueError(f"--data: expected TASK=FILE, got {item!r}")
        if task not in allowed:
            of_these = f"a file of {', '.join(allowed)}, the tasks asked for that read one"
            wanted = of_these if allowed else "nothing, since no task asked for reads a file"
            raise ValueError(f"--data: expected {wanted}, got {item!r}")
        if task in paths:
            raise ValueError(f"--data: expected one file for {task}, got {paths[task]} and {path}")
        if not Path(path).exists():
            raise ValueError(f"--data: expected a file for {task}, got {path}, which does not exist")
        paths[task] = Path(path)
    for folder in folders:
        found = {task: folder / f"{task}{end}" for task in allowed for end in reversed(ENDINGS)}
        found = {task: path for task, path in found.items() if path.is_file()}
        if not found:
            raise ValueError(f"--data: expected files in {folder} named after tasks, TASK.jsonl, got none")
        paths = found | paths
    return paths


def names(option: str, items: list[str] | None, allowed: Iterable[str] | None) -> list[str]:
    """Read names that are given one by one or separated by commas.

    Args:
        option: The option's name, for messages.
        items: What was given.
        allowed: The names there are; any name will do if this is None.
    """
    given = [name.strip() for item in items or [] for name in item.split(",")]
    for name in given if allowed is not None and all(given) else []:
        choice(option, name, allowed or ())
    if not given or not all(given):
        wanted = "names separated by commas" if allowed is None else f"one or more of {', '.join(allowed)}"
        raise ValueError(f"{option}: expected {wanted}, got {','.join(given) or 'none'!r}")
    return given


def numbers(option: str, text: str, least: int, most: int) -> tuple[int, ...]:
    """Read whole numbers separated by commas.

    Args:
        option: The option's name, for messages.
        text: What was given.
        least: The smallest number allowed.
        most: The largest number allowed.
    """
    try:
        values = tuple(int(x) for x in text.split(","))
    except ValueError:
        raise ValueError(f"{option}: expected whole numbers separated by commas, got {text!r}") from None
    for number in values:
        if not least <= number <= most:
            raise ValueError(f"{option}: expected numbers from {least} to {most}, got {number}")
    return values


def factors(option: str, text: str) -> tuple[float, ...]:
    """Read finite numbers separated by commas, each of which may be given once."""
    try:
        values = tuple(float(x) for x in text.split(","))
    except ValueError:
        raise ValueError(f"{option}: expected numbers separated by commas, got {text!r}") from None
    if not all(map(math.isfinite, values)) or len(set(values)) < len(values):
        raise ValueError(f"{option}: expected finite numbers, each once, got {text!r}")
    return values


def existing(option: str, path: Path | None, *, folder: bool) -> Path | None:
    """Refuse a file or folder that does not exist, whether or not a task will read it.

    Args:
        option: The option's name, for the message.
        path: What was given, if anything.
        folder: Whether it should be a folder rather than a file.
    """
    if path is not None and not (path.is_dir() if folder else path.is_file()):
        raise ValueError(f"{option}: expected a {'folder' if folder else 'file'}, got {path}")
    return path


def writable(option: str, path: Path, *, folder: bool) -> Path:
    """Refuse, before any work, a path at which no such folder or file can be written.

    Args:
        option: The option's name, for the message.
        path: What was given.
        folder: Whether a folder is to be written rather than a file.
    """
    if folder and path.exists() and not path.is_dir():
        raise ValueError(f"{option}: expected a folder, got the file {path}")
    if not folder and path.is_dir():
        raise ValueError(f"{option}: expected a file, got the folder {path}")
    where = (path if folder else path.parent).absolute()
    nearest = next(x for x in (where, *where.parents) if x.exists())
    if not nearest.is_dir():
        raise ValueError(f"{option}: expected a path below folders, got {path}: {nearest} is a file")
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise ValueError(f"{option}: expected a path that can be written, got {path}: {error}") from error
    return path
