"""Files of an evaluation: frozen examples, a line for every prediction, and a summary that says where it all came from.

OUT/prompts/TASK-LENGTH-HASH.jsonl    prompt, answer, tokens, depth; HASH of all that decided them
OUT/prompts/TASK-LENGTH-HASH.npz      the prompts' tokens, so that prompts are tokenised once
OUT/prompts/TASK-LENGTH-HASH.json     all that decided them, and the sha256 of both files
OUT/NAME.jsonl                        a line for every example, in the order they were done
OUT/NAME.json                         what is being evaluated, written first; the result, when all are done
"""

from __future__ import annotations

import hashlib
import json
import lzma
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..files import read_json, replacing, write_bytes, write_json


def digest(value: Any) -> str:
    """The sha256 of anything that JSON can hold."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def text_digest(text: str) -> str:
    """The sha256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def file_digest(path: Path) -> str:
    """The sha256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a .jsonl or .jsonl.xz; an error names the line."""
    return (row for _, row in numbered_lines(path))


def numbered_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a .jsonl or .jsonl.xz, each with the number of its line in the file."""
    if not path.is_file():
        raise ValueError(f"{path}: expected a file of JSON lines, got none")
    with (lzma.open if path.suffix == ".xz" else open)(path, "rt", encoding="utf-8") as file:
        number = 0
        while True:
            number += 1
            try:
                line = file.readline()
            except (UnicodeDecodeError, lzma.LZMAError, EOFError) as error:
                raise ValueError(f"{path}:{number}: expected lines of text in UTF-8, got: {error}") from error
            if not line:
                return
            if line.strip():
                yield number, _row(line, f"{path}:{number}")


def _row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
        if "\\u" in line:  # half of a character in two parts is no text
            json.dumps(row, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: expected a JSON object, got {line[:60]!r} ({error})") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected a JSON object, got {type(row).__name__}")
    return row


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Writes objects as a .jsonl; the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        for row in rows:
            file.write((json.dumps(row, ensure_ascii=False) + "\n").encode())


def write_rows(path: Path, rows: list[list[int]]) -> None:
    """Writes rows of tokens as a .npz; the file appears whole or not at all."""
    with replacing(path) as file:
        np.savez(
            file, tokens=np.concatenate([np.array(x, np.uint32) for x in rows]), sizes=np.array(list(map(len, rows)))
        )


def read_rows(path: Path) -> list[list[int]]:
    """The rows of tokens that `write_rows` wrote."""
    try:
        with np.load(path, allow_pickle=False) as file:
            tokens, sizes = file["tokens"], file["sizes"]
        if sizes.sum() != tokens.size:
            raise ValueError(f"{tokens.size} tokens for rows of {sizes.sum()}")
        return [x.tolist() for x in np.split(tokens, np.cumsum(sizes)[:-1])]
    except (OSError, EOFError, ValueError, TypeError, KeyError, AttributeError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: expected the tokens of frozen prompts, got: {error}") from error


def by_index(path: Path) -> dict[int, dict[str, Any]]:
    """Predictions of one file, each example once."""
    predictions: dict[int, dict[str, Any]] = {}
    for number, row in numbered_lines(path):
        index = row.get("index")
        if type(index) is not int or row.get("correct") not in (0, 1):
            raise ValueError(f"{path}:{number}: expected the index of an example and whether it is correct, got others")
        if index in predictions:
            raise ValueError(f"{path}:{number}: expected each example once, got example {index} again")
        predictions[index] = row
    return predictions


def check_same(out: Path, name: str, about: dict[str, Any]) -> None:
    """Raises ValueError if the results that are there already are of another evaluation.

    Args:
        out: the folder of results.
        name: of the result.
        about: what decides its predictions now.
    """
    path = out / f"{name}.json"
    if not path.exists():
        return
    before = read_json(path, "a result of `qed eval`").get("about")
    if not isinstance(before, dict):
        raise ValueError(f"{path}: expected a result of `qed eval`, got one that does not say what it is about")
    now = json.loads(json.dumps(about))
    differing = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    if differing:
        key = differing[0]
        raise ValueError(f"{path}: another evaluation is there; {key} was {before.get(key)!r}, now {now.get(key)!r}")


class Results:
    """The files of one result: predictions are appended, and a run of the same evaluation that stopped is resumed."""

    def __init__(self, out: Path, name: str, about: dict[str, Any], provenance: dict[str, Any]):
        """`about` decides the predictions and must be the same when a run is resumed; `provenance` is only kept."""
        self.path, self.summary = out / f"{name}.jsonl", out / f"{name}.json"
        self.head = {"about": about, "provenance": provenance}
        check_same(out, name, about)
        out.mkdir(parents=True, exist_ok=True)
        if not self.summary.exists():
            write_json(self.summary, self.head)
        self.rows = self._before()

    def _before(self) -> dict[int, dict[str, Any]]:
        """The predictions that are there already; a last line that is not whole is dropped."""
        if not self.path.exists():
            return {}
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if whole != data:
            write_bytes(self.path, whole)
        return by_index(self.path)

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Appends predictions."""
        with self.path.open("a", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self.rows |= {row["index"]: row for row in rows}

    def finish(self, result: dict[str, Any]) -> dict[str, Any]:
        """Writes the summary with the result, and returns the result."""
        write_json(self.summary, self.head | {"result": result})
        return result
