"""`qed reproduce --collect`: results without models and data, small enough to keep.

Answers, metrics and eigenvalues are packed, and other JSON files are kept as they are. `qed report` reads packed
results too. Trainings that are collected into one folder at different times stand side by side there, and its
plan.json says all of them. Trainings at several settings are many and small: all of them become one archive.
"""

from __future__ import annotations

import io
import json
import lzma
import shutil
import tarfile
from pathlib import Path
from typing import Any

from ..analysis.settings import PACKED, has_settings, unpacked_runs
from ..eval.packing import ANSWERS, Examples, compressed, packable, packed, unpacked
from ..eval.records import lines
from ..eval.task import RecallTask
from ..eval.tasks import of_kind
from ..files import read_json, write_bytes
from ..provenance import last_name, without_folders
from .plan import other_fields

PREDICTION_CHARACTERS = 160  # characters of a prediction that are kept
ADDED = {"arms", "seeds", "settings"}  # fields of a plan of which a folder has those of all that was collected in it
EVERY = 10  # metrics of every tenth step are kept, and those of validations and of the last step
VALIDATIONS, LOSSES = 4, ("step", "tokens", "loss", "validation_loss")  # kept of trainings at several settings
LEFT_OUT = {"prompt_sha256"}  # not needed: the name of the prompts' file and a line's index tell which prompt it is
LICENSED = {"gold"}  # left out for recall tasks, whose answers belong to a data set with a licence of its own


def collect(out: Path, target: Path) -> int:
    """Copy the results of a folder of `qed reproduce` to `target`, packed, and return the number of files read.

    Nothing is written before all of it is read. A folder with the results of a reproduction that differs in more than
    arms, seeds and settings raises ValueError.
    """
    if not (out / "plan.json").exists():
        raise ValueError(f"--out: expected a folder of `qed reproduce`, got {out}")
    if target.resolve() == out.resolve():
        raise ValueError(f"--collect: expected another folder than that of the reproduction, got {target}")
    plan = _plan_of_both(out, target)
    with unpacked_runs(out) as runs:
        if runs is not None and has_settings(runs):
            return _collect_settings(out, runs, target, plan)
    examples = Examples(target)
    answers: dict[Path, list[dict[str, Any]]] = {}
    made: dict[Path, bytes] = {target / "plan.json": plan}
    count = 1
    names = ["state.json", "data/index.json", "validation/index.json"]
    for path in [*(out / name for name in names), *sorted((out / "runs").rglob("*.json*"))]:
        inside = path.relative_to(out)
        if not path.exists() or {"checkpoints", "export", "prompts", "tensorboard", "wandb"} & set(inside.parts):
            continue
        count += 1
        copy = target / inside
        name = path.name.removesuffix(".xz")
        if name == "metrics.jsonl":
            made[copy.with_name(f"{name}.xz")] = compressed(_thinned(list(lines(path))))
        elif path.name == ANSWERS:
            answers[copy.parent] = [packed(x, *result, examples) for x, result in unpacked(path.parent).items()]
        elif name.endswith(".jsonl"):
            summary, rows = path.with_name(name).with_suffix(".json"), _short(path)
            about = json.loads(_without_folders(summary, out)) if summary.exists() else {}
            if packable(about, rows):
                answers.setdefault(copy.parent, []).append(packed(summary.stem, about, rows, examples))
            else:  # the evaluation is not finished
                made[copy.with_name(f"{name}.xz")] = compressed(rows)
                if summary.exists():
                    made[copy.with_name(summary.name)] = _without_folders(summary, out).encode()
        elif name == "eigenvalues.json":
            made[copy.with_name(f"{name}.xz")] = compressed([json.loads(_without_folders(path, out))])
        elif not any(path.with_suffix(x).exists() for x in (".jsonl", ".jsonl.xz")):
            made[copy] = _without_folders(path, out).encode()
    made |= {folder / ANSWERS: compressed(results) for folder, results in answers.items()}
    for path, content in (made | ({examples.path: examples.compressed()} if examples.known else {})).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, content)
    for folder, results in answers.items():  # what was not finished when it was collected before lies there unpacked
        for name in (f"{x['name']}{kind}" for x in results for kind in (".json", ".jsonl.xz")):
            (folder / name).unlink(missing_ok=True)
    if (out / "report").is_dir():
        shutil.copytree(out / "report", target / "report", dirs_exist_ok=True)
    return count


def _plan_of_both(out: Path, target: Path) -> bytes:
    """The plan of a folder as it is kept, together with the arms, seeds and settings of what is kept in `target`."""
    now, path = json.loads(_without_folders(out / "plan.json", out)), target / "plan.json"
    if path.exists():
        before = read_json(path, "the plan of a reproduction")
        changed = other_fields(before, now)
        if changed:
            raise ValueError(f"--collect: {target} has results of other {', '.join(changed)}; use another folder")
        for name in ADDED & before.keys() & now.keys():
            now[name] = [*before[name], *(x for x in now[name] if x not in before[name])]
        now |= {"imported": before.get("imported", {}) | now.get("imported", {})}
    return (json.dumps(now, indent=2) + "\n").encode()


def _collect_settings(out: Path, runs: Path, target: Path, plan: bytes) -> int:
    """Put the configuration, the result and a few metrics of every training in `runs` into one archive beside those
    that are there, and write the plan; return the number of trainings. The report is copied if it has all of them."""
    kept: dict[str, bytes] = {}
    with unpacked_runs(target) as before:
        for path in sorted(before.rglob("*.json*")) if before is not None else []:
            kept[path.relative_to(before).as_posix()] = path.read_bytes()  # type: ignore[arg-type]
    folders = [path.parent for path in sorted(runs.glob("*/*/config.json"))]
    names = {(folder / "config.json").relative_to(runs).as_posix() for folder in folders}
    others = {name for name in kept if name.endswith("/config.json")} - names
    for folder in folders:
        for path in (folder / "config.json", *sorted((folder / "eval").glob("*.json"))):
            kept[path.relative_to(runs).as_posix()] = _without_folders(path, out).encode()
        rows = [json.dumps(row) for row in _few(list(lines(folder / "metrics.jsonl")))]
        kept[(folder / "metrics.jsonl").relative_to(runs).as_posix()] = "\n".join([*rows, ""]).encode()
    target.mkdir(parents=True, exist_ok=True)
    write_bytes(target / PACKED, _archive(kept))
    write_bytes(target / "plan.json", plan)
    if (out / "report").is_dir() and not others:  # the page and the figures for print can be made again
        unwanted = shutil.ignore_patterns("*.html", "*.pdf")
        shutil.copytree(out / "report", target, dirs_exist_ok=True, ignore=unwanted)
    return len(folders)


def _archive(files: dict[str, bytes]) -> bytes:
    """Files by name as a tar archive, packed: the same files give the same bytes."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as archive:
        for name, content in sorted(files.items()):
            about = tarfile.TarInfo(name)
            about.size = len(content)
            archive.addfile(about, io.BytesIO(content))
    return lzma.compress(whole.getvalue(), preset=9)


def _few(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The losses at some validations, among them the last one."""
    validated = [row for row in rows if row.get("validation_loss") is not None]
    chosen = validated[:: max(1, len(validated) // VALIDATIONS)]
    chosen += [] if chosen and chosen[-1] is rows[-1] else rows[-1:]
    return [{name: row[name] for name in LOSSES if row.get(name) is not None} for row in chosen]


def _thinned(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["step"] % EVERY == 0 or "validation_loss" in row or row is rows[-1]]


def _short(path: Path) -> list[dict[str, Any]]:
    """The answers of a file as they are kept."""
    hidden = LEFT_OUT | (LICENSED if path.name.split("-")[0] in of_kind(RecallTask) else set())
    kept = [{name: x for name, x in row.items() if name not in hidden} for row in lines(path)]
    return [row | {"prediction": str(row["prediction"])[:PREDICTION_CHARACTERS]} for row in kept]


def _without_folders(path: Path, out: Path) -> str:
    """The text of a JSON file, without the folders of the machine on which it was made: paths below `out` are relative
    to it, and of any other absolute path the last name is left."""
    return json.dumps(_shortened(read_json(path), out), indent=2) + "\n"


def _shortened(value: Any, out: Path) -> Any:
    if isinstance(value, dict):
        return {name: _command(x, out) if name == "command" else _shortened(x, out) for name, x in value.items()}
    if isinstance(value, list):
        return [_shortened(x, out) for x in value]
    if not isinstance(value, str):
        return value
    for folder in (out, out.resolve()):
        value = value.removeprefix(f"{folder}/")
    return last_name(value)


def _command(value: Any, out: Path) -> Any:
    """A command line, in which the folder of the reproduction is called OUT."""
    return without_folders(value.replace(str(out.resolve()), "OUT")) if isinstance(value, str) else value
