"""`qed prepare`: a source of documents into token shards, over all cores, in flat memory, resumable.

Documents go through in blocks: one thread reads ahead while the tokenizer, which is parallel inside, works on a block.
"""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from tokenizers import Tokenizer

from .. import locks
from ..files import read_json, remove_leftovers, write_json, write_text
from . import sources, tokenization
from .cutting import Encoder, between_words, cut
from .shards import FORMAT, Shard, ShardWriter, TokenShards, shard_dicts, verify

BLOCK = 4_000_000  # characters
AHEAD = 2  # blocks
SAMPLE = 20_000  # documents a tokenizer is trained on


Texts = Callable[[], Iterator[str]]  # the documents once more, from the first


class Mix(Protocol):
    """A corpus with something mixed in, as a function of it and of what `about` says."""

    @property
    def about(self) -> dict[str, Any]:
        """What decides the documents that are mixed in, besides the corpus."""
        ...

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
    look: Callable[[Tokenizer], object] = lambda tokenizer: None,
    console: Console,
) -> dict[str, Any]:
    """Writes token shards and returns their index. The same call on an unfinished folder resumes; on a finished one it
    checks that everything is still what was written.

    Args:
        source: of documents, as `sources.py` has it.
        tokenizer: a file; or bpe:N or words:N for one that is trained on the source.
        out: the folder to write.
        column: under which a document's text stands, in files that have columns.
        licence: of the corpus, kept in the index.
        shard_tokens: after how many tokens a new shard begins.
        limit: how many documents to take, from the first.
        part: held:N or rest:N, as `sources.part` has it.
        mix: something to mix into the documents.
        look: called with the tokenizer before the documents are encoded.
        console: for progress.
    """
    asked: dict[str, Any] = {"source": source, "column": column, "tokenizer": tokenizer, "limit": limit}
    asked |= {"shard_tokens": shard_tokens} | ({"part": part} if part else {})
    asked |= {} if mix is None else {"mix": mix.about}

    def texts() -> Iterator[str]:
        documents = islice(sources.part(sources.documents(source, column), part), limit)
        return documents if mix is None else mix(documents)

    if out.exists() and not out.is_dir():
        raise ValueError(f"--out: expected a folder, got the file {out}")
    if (out / "index.json").exists():
        return _complete(out, asked, console)
    given = None if tokenization.is_trained(tokenizer) else tokenization.load(tokenizer)
    if given is not None:
        tokenization.ends(given)
    if next(texts(), None) is None:
        raise ValueError(f"SOURCE: expected documents, got none from {source}")
    with locks.held(out, "prepare"):
        if (out / "index.json").exists():
            return _complete(out, asked, console)
        return _write(out, asked, texts, given, licence, look, console)


def _complete(out: Path, asked: dict[str, Any], console: Console) -> dict[str, Any]:
    """Whether it is what was asked for, of the source as it is now, where that still is, and undamaged."""
    shards = TokenShards(out)
    index = shards.index
    if index["asked"] != asked:
        raise ValueError(f"--out: {out} holds another corpus, made from {index['asked']['source']}")
    if Path(asked["source"]).exists():
        _check_source(out, asked["source"], index.get("source_files"), sources.identity(asked["source"]))
    if Path(asked["tokenizer"]).is_file():
        _check_tokenizer(out, asked["tokenizer"], index["tokenizer_sha256"], tokenization.load(asked["tokenizer"]))
    shards.verify()
    (out / "progress.json").unlink(missing_ok=True)  # of a run that was killed between its last two writes
    console.print(f"{out} is complete: {index['tokens']:,} tokens, checksums right", markup=False)
    return dict(index)


def _check_source(out: Path, source: str, before: dict[str, str] | None, now: dict[str, str]) -> None:
    """ValueError if files of the source are not those that `out` was begun with. Older folders do not say which."""
    if before is None or before == now:
        return
    name = min(x for x in before.keys() | now.keys() if before.get(x) != now.get(x))
    was, is_ = (x.get(name, "none, being absent") for x in (before, now))
    raise ValueError(
        f"SOURCE: {source} has changed since {out} was begun: {name} had sha256 {was}, now it has {is_}; "
        "bring the old files back, or use another --out"
    )


def _check_tokenizer(out: Path, name: str, before: str, now: Tokenizer) -> None:
    after = tokenization.identity(now)
    if after != before:
        raise ValueError(
            f"--tokenizer: {name} has changed since {out} was begun: its identity was {before}, now it is {after}; "
            "bring the old one back, or use another --out"
        )


class _Taken:
    """The sha256 over documents in their order, which a run that resumes has to find again."""

    def __init__(self) -> None:
        self.sum = hashlib.sha256()

    def add(self, text: str) -> None:
        data = text.encode()
        self.sum.update(len(data).to_bytes(8, "little"))
        self.sum.update(data)


def _write(
    out: Path,
    asked: dict[str, Any],
    texts: Texts,
    given: Tokenizer | None,
    licence: str,
    look: Callable[[Tokenizer], object],
    console: Console,
) -> dict[str, Any]:
    remove_leftovers(out)
    source_files = sources.identity(asked["source"])
    tokenizer, done, skip, expected = _begin(out, asked, texts, given, source_files)
    look(tokenizer)
    stream, taken = texts(), _Taken()
    for text in islice(stream, skip):
        taken.add(text)
    if expected is not None and taken.sum.hexdigest() != expected:
        raise ValueError(
            f"SOURCE: {asked['source']} has changed since {out} was begun: its first {skip:,} documents had sha256 "
            f"{expected}, now they have {taken.sum.hexdigest()}; bring the old ones back, or use another --out"
        )
    begin, end = tokenization.ends(tokenizer)
    dtype = "uint16" if tokenizer.get_vocab_size() <= 2**16 else "uint32"
    writer = ShardWriter(out, dtype, asked["shard_tokens"], done)

    def finished(documents: int) -> None:
        state = {"asked": asked, "documents": documents, "shards": shard_dicts(done)}
        state |= {"source_files": source_files, "documents_sha256": taken.sum.hexdigest()}
        write_json(out / "progress.json", state)

    _encode(stream, skip, tokenizer, writer, taken, finished, console)
    index = {
        "format": FORMAT,
        "asked": asked,
        "source": asked["source"],
        "source_files": source_files,
        "licence": licence,
        "dtype": dtype,
        "vocab_size": tokenizer.get_vocab_size(),
        "begin": begin,
        "end": end,
        "tokenizer_sha256": tokenization.identity(tokenizer),
        "tokens": sum(shard.tokens for shard in done),
        "documents": sum(shard.documents for shard in done),
        "shards": shard_dicts(done),
    }
    write_json(out / "index.json", index)
    (out / "progress.json").unlink(missing_ok=True)
    console.print(f"{out}: {index['documents']:,} documents, {index['tokens']:,} tokens", markup=False)
    return index


def _encode(
    stream: Iterator[str],
    documents: int,
    tokenizer: Tokenizer,
    writer: ShardWriter,
    taken: _Taken,
    finished: Callable[[int], None],
    console: Console,
) -> None:
    """All that is left of the documents into shards. `finished` is told of every shard, with the documents so far."""
    begin, end = tokenization.ends(tokenizer)
    first = np.array([] if begin is None else [begin], np.uint32)
    last = np.array([end], np.uint32)
    encoder, tokens, new, start = Encoder(tokenizer), sum(x.tokens for x in writer.done), 0, time.perf_counter()
    with _progress(console) as progress:
        task = progress.add_task("", total=None)
        for block in _ahead(_blocks(stream)):
            encoded = [np.concatenate([first, ids, last]) for ids in encoder(block)]
            for text in block:
                taken.add(text)
            documents += len(block)
            if writer.add(encoded):
                finished(documents)
            new += sum(map(len, encoded))
            rate = new / (time.perf_counter() - start)
            progress.update(task, description=f"{documents:,} documents, {tokens + new:,} tokens, {rate:,.0f} tokens/s")
    writer.finish()


def _begin(
    out: Path, asked: dict[str, Any], texts: Texts, given: Tokenizer | None, source_files: dict[str, str]
) -> tuple[Tokenizer, list[Shard], int, str | None]:
    """The tokenizer, finished shards, documents in them and these documents' sum: of a run before, or none."""
    state = out / "progress.json"
    if not state.exists():
        sample = (piece for text in islice(texts(), SAMPLE) for piece in cut(text, between_words))
        tokenizer = given or tokenization.load(asked["tokenizer"], sample)
        write_text(out / "tokenizer.json", tokenizer.to_str(pretty=True))
        return tokenizer, [], 0, None
    progress = read_json(state)
    try:
        before, shards = progress["asked"], [Shard(**shard) for shard in progress["shards"]]
        count, total, files = int(progress["documents"]), progress.get("documents_sha256"), progress.get("source_files")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{state}: expected what `qed prepare` wrote, got something else: {error}") from error
    if before != asked:
        raise ValueError(f"--out: {out} holds an unfinished corpus of {before['source']}; use another folder")
    _check_source(out, asked["source"], files, source_files)
    tokenizer = tokenization.load(str(out / "tokenizer.json"))
    if given is not None:
        _check_tokenizer(out, asked["tokenizer"], tokenization.identity(tokenizer), given)
    for shard in shards:
        verify(out, shard)
    return tokenizer, shards, count, total


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
