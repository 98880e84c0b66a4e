"""`qed prepare`: a source of documents into token shards, over all cores, in flat memory, resumable.

Documents go through in blocks: one thread reads ahead while the tokenizer, which is parallel inside, works on a block.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ..files import write_json
from . import sources, tokenization
from .shards import FORMAT, Shard, ShardWriter, TokenShards, shard_dicts

BLOCK = 4_000_000  # characters
AHEAD = 2  # blocks
SAMPLE = 20_000  # documents a tokenizer is trained on


class Mix(Protocol):
    """A corpus with something mixed in, as a function of it and of what `about` says."""

    @property
    def about(self) -> dict[str, Any]: ...

    def __call__(self, texts: Iterator[str]) -> Iterator[str]: ...


def prepare(
    source: str,
    *,
    tokenizer: str,
    out: Path,
    column: str = "text",
    licence: str = "unknown",
    shard_tokens: int = 100_000_000,
    limit: int | None = None,
    part: str = "",
    mix: Mix | None = None,
    console: Console,
) -> dict[str, Any]:
    """Writes `out` and returns its index. The same call on a folder that was not finished goes on; on one that was, it
    looks whether it is still what was written."""
    asked: dict[str, Any] = {"source": source, "column": column, "tokenizer": tokenizer, "limit": limit}
    asked |= {"shard_tokens": shard_tokens} | ({"part": part} if part else {})
    asked |= {} if mix is None else {"mix": mix.about}

    def texts() -> Iterator[str]:
        found = islice(sources.part(sources.documents(source, column), part), limit)
        return found if mix is None else mix(found)

    if out.exists() and not out.is_dir():
        raise ValueError(f"--out: expected a folder, got the file {out}")
    if (out / "index.json").exists():
        shards = TokenShards(out)
        index = shards.index
        if index["asked"] != asked:
            raise ValueError(f"--out: {out} holds another corpus, made from {index['asked']['source']}")
        shards.verify()
        console.print(f"{out} is complete: {index['tokens']:,} tokens, checksums right")
        return dict(index)
    out.mkdir(parents=True, exist_ok=True)
    encoder, done, skip = _begin(out, asked, texts(), tokenizer)
    encoder.encode_special_tokens = True  # "<s>" in a text is three characters, not a token
    begin, end = tokenization.ends(encoder)
    dtype = "uint16" if encoder.get_vocab_size() <= 2**16 else "uint32"
    writer = ShardWriter(out, dtype, shard_tokens, done)
    tokens, start = sum(shard.tokens for shard in done), time.perf_counter()
    new, documents = 0, skip
    with _progress(console) as progress:
        task = progress.add_task("", total=None)
        for block in _ahead(_blocks(islice(texts(), skip, None))):
            encoded = encoder.encode_batch_fast(block, add_special_tokens=False)
            first = [] if begin is None else [begin]
            finished = writer.add([np.array([*first, *e.ids, end], np.int64) for e in encoded])
            documents += len(block)
            new += sum(len(e.ids) + 1 + len(first) for e in encoded)
            if finished:
                write_json(out / "progress.json", {"asked": asked, "documents": documents, "shards": shard_dicts(done)})
            rate = new / (time.perf_counter() - start)
            progress.update(task, description=f"{documents:,} documents, {tokens + new:,} tokens, {rate:,.0f} tokens/s")
    writer.finish()
    index = {
        "format": FORMAT,
        "asked": asked,
        "source": source,
        "licence": licence,
        "dtype": dtype,
        "vocab_size": encoder.get_vocab_size(),
        "begin": begin,
        "end": end,
        "tokenizer_sha256": tokenization.identity(encoder),
        "tokens": sum(shard.tokens for shard in done),
        "documents": sum(shard.documents for shard in done),
        "shards": shard_dicts(done),
    }
    if not index["tokens"]:
        raise ValueError(f"SOURCE: expected documents, got none from {source}")
    write_json(out / "index.json", index)
    (out / "progress.json").unlink(missing_ok=True)
    console.print(f"{out}: {index['documents']:,} documents, {index['tokens']:,} tokens")
    return index


def _begin(out: Path, asked: dict[str, Any], texts: Iterator[str], tokenizer: str) -> tuple[Any, list[Shard], int]:
    """The tokenizer, finished shards and documents in them: of a run before, or none."""
    state = out / "progress.json"
    if state.exists():
        found = json.loads(state.read_text())
        if found["asked"] != asked:
            raise ValueError(
                f"--out: {out} holds an unfinished corpus of {found['asked']['source']}; use another folder"
            )
        encoder = tokenization.load(str(out / "tokenizer.json"))
        return encoder, [Shard(**shard) for shard in found["shards"]], found["documents"]
    encoder = tokenization.load(tokenizer, islice(texts, SAMPLE))
    tokenization.ends(encoder)
    part = out / "tokenizer.json.part"
    encoder.save(str(part))
    part.replace(out / "tokenizer.json")
    return encoder, [], 0


def _blocks(texts: Iterator[str]) -> Iterator[list[str]]:
    block: list[str] = []
    size = 0
    for text in texts:
        block.append(text)
        size += len(text)
        if size >= BLOCK:
            yield block
            block, size = [], 0
    if block:
        yield block


def _ahead(blocks: Iterator[list[str]]) -> Iterator[list[str]]:
    """The same, read by a thread of its own; what it raises is raised here."""
    waiting: queue.Queue[list[str] | BaseException | None] = queue.Queue(AHEAD)
    stopped = threading.Event()

    def put(item: list[str] | BaseException | None) -> None:
        while not stopped.is_set():
            try:
                waiting.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def read() -> None:
        try:
            for block in blocks:
                put(block)
            put(None)
        except BaseException as error:
            put(error)

    threading.Thread(target=read, daemon=True).start()
    try:
        while (item := waiting.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stopped.set()


def _progress(console: Console) -> Progress:
    return Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console)
