"""Results without models and data, small enough to keep: JSON as it is, lines packed. `qed report` reads it too."""

from __future__ import annotations

import json
import lzma
import shutil
from pathlib import Path
from typing import Any

from ..eval import recall
from ..eval.records import lines
from ..files import write_bytes, write_text

KEPT = 160  # characters of a prediction
EVERY = 10  # steps whose metrics are kept; those of a validation and the last are kept as well
LEFT_OUT = {"prompt_sha256"}  # the file of prompts is named after all that decides them, and a line's index tells which
OTHERS = {"gold"}  # of recall tasks: it belongs to a data set with a licence of its own


def collect(out: Path, target: Path) -> int:
    """From a folder of `qed reproduce`; returns the number of files."""
    if not (out / "plan.json").exists():
        raise ValueError(f"--out: expected a folder of `qed reproduce`, got {out}")
    count = 0
    names = ["plan.json", "state.json", "data/index.json", "validation/index.json"]
    for path in [*(out / name for name in names), *sorted((out / "runs").rglob("*.json*"))]:
        inside = path.relative_to(out)
        if not path.exists() or {"checkpoints", "export", "prompts"} & set(inside.parts):
            continue
        copy = target / inside
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".jsonl":
            hidden = LEFT_OUT | (OTHERS if path.name.split("-")[0] in recall.FIELDS else set())
            kept = _thinned(list(lines(path))) if path.name == "metrics.jsonl" else lines(path)
            rows = "".join(json.dumps(_short(row, hidden), ensure_ascii=False) + "\n" for row in kept)
            write_bytes(copy.with_name(copy.name + ".xz"), lzma.compress(rows.encode(), preset=9))
        else:
            text = path.read_text()
            for folder in (out, out.resolve()):  # where it was made is nobody's business
                text = text.replace(f'"{folder}/', '"')
            write_text(copy, text)
        count += 1
    if (out / "report").is_dir():
        shutil.copytree(out / "report", target / "report", dirs_exist_ok=True)
    return count


def _thinned(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["step"] % EVERY == 0 or "validation_loss" in row or row is rows[-1]]


def _short(row: dict[str, object], hidden: set[str]) -> dict[str, object]:
    kept = {name: x for name, x in row.items() if name not in hidden}
    return kept | ({"prediction": str(row["prediction"])[:KEPT]} if "prediction" in row else {})
