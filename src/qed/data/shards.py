"""Tokens on disk: files of fixed-width numbers, and an index of what they are.

    DIR/index.json         dtype, vocabulary, tokenizer's sha256, source, licence, and every shard's counts and sha256
    DIR/tokens-00000.bin   tokens one behind the other, documents separated by the end token
    DIR/starts-00000.bin   where each document starts in it, uint64
    DIR/tokenizer.json

A shard is written under another name and renamed when it is whole; the index comes last, so a folder with an index is
complete. Until then `progress.json` says how many documents are in finished shards: a run resumes there.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..files import PART, create, read_json, write_bytes

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A file of tokens, as the index describes it."""

    file: str
    tokens: int
    documents: int
    sha256: str


class ShardWriter:
    """Appends documents; holds one shard's starts and one buffer, however large the corpus."""

    def __init__(self, folder: Path, dtype: str, shard_tokens: int, done: list[Shard]):
        self.folder, self.dtype, self.shard_tokens, self.done = folder, np.dtype(dtype), shard_tokens, done
        self._open()

    def _open(self) -> None:
        self.name = f"tokens-{len(self.done):05d}.bin"
        self.file = create(self.folder / (self.name + PART))
        self.starts: list[int] = []
        self.tokens, self.hash = 0, hashlib.sha256()

    def add(self, documents: list[np.ndarray]) -> bool:
        """True if this finished a shard."""
        for tokens in documents:
            self.starts.append(self.tokens)
            self.tokens += len(tokens)
            data = tokens.astype(self.dtype).tobytes()
            self.file.write(data)
            self.hash.update(data)
        if self.tokens < self.shard_tokens:
            return False
        self.finish()
        self._open()
        return True

    def finish(self) -> None:
        """Close and name the shard at hand, if there is anything in it."""
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        part = self.folder / (self.name + PART)
        if not self.starts:
            part.unlink()
            return
        starts = np.array(self.starts, np.uint64).tobytes()
        write_bytes(self.folder / self.name.replace("tokens", "starts"), starts)
        part.replace(self.folder / self.name)
        shard = Shard(file=self.name, tokens=self.tokens, documents=len(self.starts), sha256=self.hash.hexdigest())
        self.done.append(shard)


class TokenShards:
    """A prepared corpus, mapped into memory: tokens are read from disk when they are looked at."""

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)
        try:
            self.index = read_json(self.folder / "index.json")
        except (OSError, ValueError) as error:
            raise ValueError(f"{folder}: expected what `qed prepare` finished, got no index: {error}") from error
        if not isinstance(self.index, dict) or self.index.get("format") != FORMAT:
            got = self.index.get("format") if isinstance(self.index, dict) else str(self.index)[:100]
            raise ValueError(f"{folder}: this version reads shards of format {FORMAT}, got {got}")
        try:
            shards = [Shard(**shard) for shard in self.index["shards"]]
            self.identity = _identity(self.index)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{folder}/index.json: expected what `qed prepare` wrote, got {error}") from error
        self.parts = [self._map(shard) for shard in shards]
        self.ends = np.cumsum([len(part) for part in self.parts])

    def _map(self, shard: Shard) -> np.ndarray:
        path = self.folder / shard.file
        try:
            tokens = np.memmap(path, dtype=self.index["dtype"], mode="r")
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: expected {shard.tokens} tokens, got: {error}") from error
        if len(tokens) != shard.tokens:
            raise ValueError(f"{path}: expected {shard.tokens} tokens, got {len(tokens)}")
        return tokens

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens [start, start + count) of all shards as one, in int64."""
        if start < 0 or start + count > len(self):
            raise IndexError(f"tokens {start} to {start + count} of {len(self)}")
        pieces = []
        shard = int(np.searchsorted(self.ends, start, side="right"))
        while count:
            first = start - (int(self.ends[shard - 1]) if shard else 0)
            piece = self.parts[shard][first : first + count]
            pieces.append(piece)
            start, count, shard = start + len(piece), count - len(piece), shard + 1
        return np.concatenate(pieces).astype(np.int64) if pieces else np.zeros(0, np.int64)

    def windows(self, tokens: int) -> int:
        """How many rows of so many tokens, each with the one after it, there are."""
        return max(0, len(self) - 1) // tokens

    def rows(self, numbers: Sequence[int], tokens: int) -> Tensor:
        """Rows [B, tokens + 1] by their numbers; each begins with the last token of the one before."""
        return torch.from_numpy(np.stack([self.read(number * tokens, tokens + 1) for number in numbers]))

    def targets(self, rows: int, tokens: int) -> int:
        """The number of tokens that are predicted in so many rows: all but the first of each."""
        return rows * tokens

    def verify(self) -> None:
        """Read everything and compare with the checksums."""
        for shard in self.index["shards"]:
            verify(self.folder, Shard(**shard))


def verify(folder: Path, shard: Shard) -> None:
    """ValueError unless a shard's file is what was written."""
    try:
        with (folder / shard.file).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        digest = "no file"
    if digest != shard.sha256:
        raise ValueError(f"{folder / shard.file}: expected sha256 {shard.sha256}, got {digest}")


def _identity(index: dict[str, Any]) -> str:
    """sha256 of what the index says of the tokens: which, by their own sums, and of which tokenizer."""
    about = {name: index[name] for name in ("dtype", "vocab_size", "tokenizer_sha256", "shards")}
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def shard_dicts(shards: list[Shard]) -> list[dict[str, Any]]:
    """Shards as the index has them."""
    return [asdict(shard) for shard in shards]
