"""Tokens on disk: files of fixed-width numbers, and an index of what they are.

    DIR/index.json         dtype, vocabulary, tokenizer's sha256, source, licence, and every shard's counts and sha256
    DIR/tokens-00000.bin   tokens one behind the other, documents parted by the end token
    DIR/starts-00000.bin   where each document starts in it, uint64
    DIR/tokenizer.json

A shard is written under another name and renamed when it is whole; the index comes last, so a folder with an index is
complete. Until then `progress.json` says how many documents are in finished shards: a run goes on from there.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Shard:
    file: str
    tokens: int
    documents: int
    sha256: str


def write_json(path: Path, value: Any) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value, indent=2) + "\n")
    part.replace(path)


class ShardWriter:
    """Appends documents; holds one shard's starts and one buffer, however large the corpus."""

    def __init__(self, folder: Path, dtype: str, shard_tokens: int, done: list[Shard]):
        self.folder, self.dtype, self.shard_tokens, self.done = folder, np.dtype(dtype), shard_tokens, done
        self._open()

    def _open(self) -> None:
        self.name = f"tokens-{len(self.done):05d}.bin"
        self.file = (self.folder / (self.name + ".part")).open("wb")
        self.starts: list[int] = []
        self.tokens, self.hash = 0, hashlib.sha256()

    def add(self, documents: list[np.ndarray]) -> bool:
        """True if this finished a shard."""
        for tokens in documents:
            self.starts.append(self.tokens)
            self.tokens += len(tokens)
        data = np.concatenate(documents).astype(self.dtype).tobytes() if documents else b""
        self.file.write(data)
        self.hash.update(data)
        if self.tokens < self.shard_tokens:
            return False
        self.finish()
        self._open()
        return True

    def finish(self) -> None:
        """Close and name the shard at hand, if there is anything in it."""
        self.file.close()
        part = self.folder / (self.name + ".part")
        if not self.starts:
            part.unlink()
            return
        starts = self.folder / self.name.replace("tokens", "starts")
        starts.with_name(starts.name + ".part").write_bytes(np.array(self.starts, np.uint64).tobytes())
        starts.with_name(starts.name + ".part").replace(starts)
        part.replace(self.folder / self.name)
        shard = Shard(file=self.name, tokens=self.tokens, documents=len(self.starts), sha256=self.hash.hexdigest())
        self.done.append(shard)


class TokenShards:
    """A prepared corpus, mapped into memory: tokens are read from disk when they are looked at."""

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)
        try:
            self.index = json.loads((self.folder / "index.json").read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise ValueError(f"{folder}: expected what `qed prepare` finished, got no index: {error}") from error
        if self.index.get("format") != FORMAT:
            raise ValueError(f"{folder}: this version reads shards of format {FORMAT}, got {self.index.get('format')}")
        self.parts = [self._map(Shard(**shard)) for shard in self.index["shards"]]
        self.ends = np.cumsum([len(part) for part in self.parts])

    def _map(self, shard: Shard) -> np.ndarray:
        path = self.folder / shard.file
        try:
            found = np.memmap(path, dtype=self.index["dtype"], mode="r")
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: expected {shard.tokens} tokens, got: {error}") from error
        if len(found) != shard.tokens:
            raise ValueError(f"{path}: expected {shard.tokens} tokens, got {len(found)}")
        return found

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens [start, start + count) of all shards as one, in int64."""
        if start < 0 or start + count > len(self):
            raise IndexError(f"tokens {start} to {start + count} of {len(self)}")
        found = []
        shard = int(np.searchsorted(self.ends, start, side="right"))
        while count:
            first = start - (int(self.ends[shard - 1]) if shard else 0)
            piece = self.parts[shard][first : first + count]
            found.append(piece)
            start, count, shard = start + len(piece), count - len(piece), shard + 1
        return np.concatenate(found).astype(np.int64) if found else np.zeros(0, np.int64)

    def verify(self) -> None:
        """Read everything and compare with the checksums."""
        for shard in self.index["shards"]:
            with (self.folder / shard["file"]).open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != shard["sha256"]:
                raise ValueError(f"{self.folder / shard['file']}: expected sha256 {shard['sha256']}, got {digest}")


def shard_dicts(shards: list[Shard]) -> list[dict[str, Any]]:
    return [asdict(shard) for shard in shards]
