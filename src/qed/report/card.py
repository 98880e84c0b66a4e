"""The model card of a training: what was trained on what, how the loss fell, and what was measured."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from safetensors import safe_open

from ..analysis.names import NEEDLES, RECALL, name_of, result_title
from ..analysis.results import Result, Run, folder
from ..eval.harness.suites import PREFIX
from ..files import read_json, write_bytes
from ..model.card import card, cell, write_card
from ..model.config import QEDConfig
from ..provenance import imported
from .charts import Axis, Chart, Panel, Series, tokens

FIGURE = "training_loss.png"
INTERVALS = (
    "In brackets are 95 % intervals over examples. They do not cover other trainings of the same arm, which may differ "
    "by more."
)
LINES = {"training": "loss", "validation": "validation_loss"}  # the lines of the figure, and their fields of metrics


def describe(model: Path, place: Path) -> tuple[bool, list[str]]:
    """Write the model card and the figure of a training into a model's folder.

    Args:
        model: the model's folder.
        place: the folder of its run, or of anything else with results in eval/.

    Returns:
        Whether the card was written, which it is not over one of somebody else, and the results that cannot be read.
    """
    problems: list[str] = []
    run = Run(place) if _is_run(place) else None
    sections = {} if run is None else {"Training": _training(run)}
    if run is not None and (drawn := _figure(run)) is not None:
        write_bytes(model / FIGURE, drawn)
        sections["Training"] += f"\n\n![The loss over the course of training]({FIGURE})"
    if evaluated := _evaluation(place, problems):
        sections["Evaluation"] = evaluated
    config = QEDConfig.from_pretrained(model)
    text = card(
        config,
        _parameters(model),
        facts={} if run is None else {"arm": name_of(run.arm), "seed": str(run.seed)},
        sections=sections,
        limits=_limits(run),
    )
    return write_card(model, text), problems


def _is_run(place: Path) -> bool:
    path = place / "config.json"
    return path.is_file() and isinstance(read_json(path, "a configuration").get("config"), dict)


def _parameters(model: Path) -> int:
    """Return how many parameters a folder's weights have, from their shapes alone."""
    total = 0
    for path in model.glob("*.safetensors"):
        with safe_open(path, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118  # it is no dictionary
                count = 1
                for size in weights.get_slice(name).get_shape():
                    count *= size
                total += count
    return total


def _training(run: Run) -> str:
    """Return what a run was trained on and how, as a table."""
    config, written = run.config, read_json(run.path / "config.json")
    versions = written.get("environment", {})
    last = {name: _last(run, key) for name, key in LINES.items()}
    rows = {
        "recipe": str(config.get("name", "")),
        **_data(Path(str(config.get("data", "")))),
        "tokens trained on": f"{config['total_tokens']:,}, in rows of {config['sequence']:,}",
        "tokens a step": f"{config['batch_tokens']:,}",
        "optimiser": f"{config.get('optimizer')}, largest learning rate {config.get('learning_rate'):g}",
        "precision": str(config.get("precision", "")),
        **{f"last {name} loss (nats)": f"{value:.4f}" for name, value in last.items() if value is not None},
        "date": str(written.get("date", "")),
        "versions": ", ".join(f"{name} {versions[name]}" for name in ("qed-attention", "torch") if name in versions),
        "code (sha256)": str(written.get("code", "")),
    }
    return "| | |\n|---|---|\n" + "\n".join(f"| {name} | {cell(value)} |" for name, value in rows.items() if value)


def _last(run: Run, key: str) -> float | None:
    values = [row[key] for row in run.metrics if row.get(key) is not None]
    return values[-1] if values else None


def _data(data: Path) -> dict[str, str]:
    """Return what the index of a corpus says of it, if it is still there. Of files only the names are told: where they
    lay is nobody's business."""
    try:
        index = read_json(data / "index.json", "the index of a corpus")
    except ValueError:
        return {}
    asked = index.get("asked", {})
    source, tokenizer = (str(x) for x in (index.get("source", ""), asked.get("tokenizer", "")))
    count = index.get("tokens")
    size = f", {count:,} tokens" if isinstance(count, int) else ""
    licence = str(index.get("licence", "unknown"))
    return {
        "data": f"{source if ':' in source else Path(source).name}{size}; licence of the data: {licence}",
        "tokenizer": tokenizer if ":" in tokenizer else Path(tokenizer).name,
    }


def _figure(run: Run) -> bytes | None:
    """Return the figure of a run's losses as PNG; None without losses, and where matplotlib is not installed."""
    series = []
    for i, (name, key) in enumerate(LINES.items()):
        points = [(float(row["tokens"]), float(row[key])) for row in run.metrics if row.get(key) is not None]
        if points:
            x, y = (list(values) for values in zip(*points, strict=True))
            series.append(Series(name=name, colour=i, x=x, y=y, marked=name == "validation"))
    if not series or find_spec("matplotlib") is None:
        return None
    from .drawing import drawn

    panel = Panel(x=Axis(label="training tokens", shown=tokens), y=Axis(label="loss (nats)"), series=series)
    chart = Chart(title="Loss over the course of training", caption="", panels=[panel])
    return drawn(chart, ["png"])["png"]


def _evaluation(place: Path, problems: list[str]) -> str:
    """Return the table of all results of a folder, empty if there are none."""
    results = folder(place / "eval", problems, 1.0)
    counted = {name: x for name, x in results.items() if name.partition("-")[0] in (*NEEDLES, *RECALL)}
    rows = list(_harness(place / "eval"))
    if counted:
        from .tables import percent  # which needs scipy, unlike everything else here

        in_order = sorted(counted.items(), key=_by_task_and_length)
        about = [(result_title(name, [x]), percent(x) or "", f"{x.result['samples']:,}") for name, x in in_order]
        rows = [(title, "per cent right", value, samples) for title, value, samples in about] + rows
    if not rows:
        return ""
    table = "\n".join(f"| {' | '.join(map(cell, row))} |" for row in rows)
    head = "| task | measure | value | examples |\n|---|---|---|---|"
    return f"{head}\n{table}\n\n{INTERVALS if counted else ''}".strip()


def _by_task_and_length(item: tuple[str, Result]) -> tuple[str, int]:
    task, _, length = item[0].partition("-")
    return task, int(length) if length.isdigit() else 0


def _harness(place: Path) -> Iterator[tuple[str, str, str, str]]:
    """Yield what lm-eval's own tasks gave, a row for every measure."""
    for path in sorted(place.glob(f"{PREFIX}-*.json")):
        for task, measures in read_json(path, "a result of lm-eval").get("result", {}).items():
            for name, value in measures.items():
                if isinstance(value, int | float) and value != -1 and not name.startswith("sample"):
                    yield f"{task} (lm-eval)", name, f"{value:.4f}", str(measures.get("sample_len", ""))


def _limits(run: Run | None) -> list[str]:
    limits = []
    if run is not None:
        limits.append(
            f"It was trained on rows of {run.train_length:,} tokens. It takes longer texts, but how well it uses them "
            "only a measurement at that length says."
        )
        limits.append("It is one training of its arm: another seed gives another model, and other figures.")
    limits += [
        f"It was made with {name} (sha256 {sha256}), a file that adds rules to the package. A program that loads the "
        f"model has to run that file first; the package's own commands take it with `--import {name}`."
        for name, sha256 in sorted(imported().items())
    ]
    return limits
