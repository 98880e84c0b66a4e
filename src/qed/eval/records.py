"""Files of an evaluation: examples frozen before, predictions one line each, a summary with where it all came from.

OUT/prompts/TASK-LENGTH-HASH.jsonl    prompt, answer, tokens, depth; HASH of all that decided them
OUT/prompts/TASK-LENGTH-HASH.npz      the prompts' tokens, so that they are found once
OUT/NAME.jsonl                        one line an example, in the order they were done
OUT/NAME.json                         what is being evaluated, written first; the result, when all are done
"""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..files import replacing, write_json, write_text


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def text_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """Objects of a .jsonl or .jsonl.xz; an error names the line."""
    if not path.is_file():
        raise ValueError(f"{path}: expected a file of JSON lines, got none")
    with (lzma.open if path.suffix == ".xz" else open)(path, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: expected a JSON object, got {line[:60]!r} ({error})") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}:{number}: expected a JSON object, got {type(row).__name__}")
            yield row


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """All or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        for row in rows:
            file.write((json.dumps(row, ensure_ascii=False) + "\n").encode())


def write_rows(path: Path, rows: list[list[int]]) -> None:
    """Rows of tokens, all or nothing."""
    with replacing(path) as file:
        np.savez(
            file, tokens=np.concatenate([np.array(x, np.uint32) for x in rows]), sizes=np.array(list(map(len, rows)))
        )


def read_rows(path: Path) -> list[list[int]]:
    with np.load(path, allow_pickle=False) as file:
        tokens, sizes = file["tokens"], file["sizes"]
    return [x.tolist() for x in np.split(tokens, np.cumsum(sizes)[:-1])]


class Results:
    """Appends predictions; goes on where an earlier run of the same evaluation stopped."""

    def __init__(self, out: Path, name: str, about: dict[str, Any], provenance: dict[str, Any]):
        """`about` decides the predictions and must be the same when a run is taken up again; `provenance` is kept."""
        self.path, self.summary = out / f"{name}.jsonl", out / f"{name}.json"
        self.head = {"about": about, "provenance": provenance}
        out.mkdir(parents=True, exist_ok=True)
        if self.summary.exists():
            before = json.loads(self.summary.read_text())["about"]
            now = json.loads(json.dumps(about))
            differing = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
            if differing:
                key = differing[0]
                raise ValueError(
                    f"{self.summary}: another evaluation is there; {key} was {before.get(key)!r}, now {now.get(key)!r}"
                )
        else:
            write_json(self.summary, self.head)
        self.rows = self._before()

    def _before(self) -> dict[int, dict[str, Any]]:
        """What is there already; a last line that was cut off is dropped."""
        if not self.path.exists():
            return {}
        text = self.path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            write_text(self.path, whole)
        return {row["index"]: row for row in lines(self.path)}

    def add(self, rows: list[dict[str, Any]]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self.rows |= {row["index"]: row for row in rows}

    def finish(self, result: dict[str, Any]) -> dict[str, Any]:
        write_json(self.summary, self.head | {"result": result})
        return result
