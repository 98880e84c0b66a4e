"""Where documents come from, one after the other, never all in memory.

corpus.jsonl, .jsonl.gz, .jsonl.xz   one JSON object a line, its text under "text"
shard.parquet                        the same as columns
notes.txt, .txt.gz, .txt.xz          documents separated by blank lines
a folder                             all such files in it, in the order of their names
hf:NAME[:CONFIG][:SPLIT]             a dataset of the Hugging Face hub, streamed (needs the `data` extra)
synthetic:N[:SEED]                   N built-in documents (`synthetic.py`)
"""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from .synthetic import documents as synthetic_documents

KINDS = (".jsonl", ".parquet", ".txt")
OPENERS: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}


class SourceError(ValueError):
    """Something in a source is not what it must be: where, what was expected, what came."""


def documents(source: str, column: str = "text") -> Iterator[str]:
    """The texts of a source."""
    for number, text in enumerate(_texts(source, column), 1):
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON can spell half a character
            raise SourceError(f"{source}: document {number}: expected Unicode text, got {error}") from error
        yield text


def _texts(source: str, column: str) -> Iterator[str]:
    if source.startswith("hf:"):
        yield from _hub(source, column)
    elif source.startswith("synthetic:"):
        yield from _synthetic(source)
    else:
        for path in files(source):
            yield from _file(path, column)


def check(source: str, column: str = "text") -> None:
    """SourceError unless a source has a first document."""
    if next(documents(source, column), None) is None:
        raise SourceError(f"SOURCE: expected documents, got none from {source}")


def identity(source: str) -> dict[str, str]:
    """The sha256 of every file of a source by its name; none for a dataset of the hub and for built-in documents."""
    if source.startswith(("hf:", "synthetic:")):
        return {}
    base, digests = Path(source), {}
    for path in files(source):
        with path.open("rb") as file:
            name = str(path.relative_to(base)) if base.is_dir() else path.name
            digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def part(texts: Iterator[str], which: str) -> Iterator[str]:
    """The documents of a part: held:N is one document in N, chosen by its hash, rest:N is all others, and an empty name
    is all of them."""
    if not which:
        return texts
    kind, _, number = which.partition(":")
    if kind not in ("held", "rest") or not number.isdigit() or int(number) < 2:
        raise SourceError(f"--part: expected held:N or rest:N with N of 2 or more, got {which!r}")

    def held(text: str) -> bool:
        return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) % int(number) == 0

    return (text for text in texts if held(text) == (kind == "held"))


def files(source: str) -> list[Path]:
    """The files of a source that is a file or a folder, in the order of their names."""
    path = Path(source)
    paths = sorted(x for x in path.rglob("*") if _kind(x) in KINDS) if path.is_dir() else [path]
    if not path.exists():
        raise SourceError(f"SOURCE: expected a file, a folder, hf:… or synthetic:…, got {source}, which does not exist")
    if not paths or (path.is_file() and _kind(path) not in KINDS):
        raise SourceError(f"SOURCE: expected {', '.join(KINDS)}, plain or with .gz or .xz, got {source}")
    return paths


def _kind(path: Path) -> str:
    return Path(path.stem).suffix if path.suffix in OPENERS else path.suffix


def _file(path: Path, column: str) -> Iterator[str]:
    if _kind(path) == ".parquet":
        yield from _parquet(path, column)
        return
    try:
        with OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8") as lines:
            yield from _jsonl(path, lines, column) if _kind(path) == ".jsonl" else _paragraphs(lines)
    except (UnicodeDecodeError, EOFError, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise SourceError(f"{path}: expected UTF-8 text, got a damaged file: {error}") from error


def _jsonl(path: Path, lines: IO[str], column: str) -> Iterator[str]:
    number = 0
    for line in lines:
        number += 1
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise SourceError(f"{path}:{number}: expected a JSON object, got {line[:60]!r} ({error})") from error
        text = row.get(column) if isinstance(row, dict) else None
        if not isinstance(text, str):
            got = f"keys {sorted(row)}" if isinstance(row, dict) else type(row).__name__
            raise SourceError(f"{path}:{number}: expected a text under {column!r}, got {got}")
        line = row = ""  # a long document is not kept twice while it is worked on
        yield text


def _paragraphs(lines: IO[str]) -> Iterator[str]:
    part: list[str] = []
    for line in lines:
        if line.strip():
            part.append(line)
        elif part:
            yield "".join(part)
            part = []
    if part:
        yield "".join(part)


def _parquet(path: Path, column: str) -> Iterator[str]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise SourceError(f"{path}: Parquet needs the `data` extra: pip install 'qed-attention[data]'") from error
    try:
        file = parquet.ParquetFile(path)
    except Exception as error:
        raise SourceError(f"{path}: expected a Parquet file, got: {error}") from error
    if column not in file.schema_arrow.names:
        raise SourceError(f"{path}: expected a column {column!r}, got {', '.join(file.schema_arrow.names)}")
    for batch in file.iter_batches(batch_size=256, columns=[column]):
        yield from (text for text in batch.column(0).to_pylist() if text is not None)


def _hub(source: str, column: str) -> Iterator[str]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise SourceError(f"{source}: the hub needs the `data` extra: pip install 'qed-attention[data]'") from error
    name, config, split = (*source.removeprefix("hf:").split(":"), "", "")[:3]
    if not name:
        raise SourceError(f"SOURCE: expected hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT, got {source}")
    try:
        rows = load_dataset(name, config or None, split=split or "train", streaming=True)
    except Exception as error:
        raise SourceError(f"{source}: expected a dataset that can be read, got: {error}") from error
    for row in rows:
        if not isinstance(row.get(column), str):
            raise SourceError(f"{source}: expected a text under {column!r}, got columns {sorted(row)}")
        yield row[column]


def _synthetic(source: str) -> Iterator[str]:
    try:
        count, seed = (int(x) for x in (*source.split(":")[1:], "0")[:2])
    except ValueError as error:
        raise SourceError(f"SOURCE: expected synthetic:N or synthetic:N:SEED, got {source}") from error
    return synthetic_documents(count, seed)
