"""Answers to lm-eval's requests, a line each as they come, so that a run that was killed goes on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...files import write_bytes
from ..records import digest, numbered_lines


class Journal:
    """The answers that a model has given to the requests of one task."""

    def __init__(self, path: Path | None = None, done: Callable[[int, int], None] = lambda *_: None):
        """Read what is there; a last line that is not whole is dropped.

        Args:
            path: the file, which appears with the first answer; None to keep nothing.
            done: called with the number of answers, and that of requests, whenever there is one more.
        """
        self.path, self.done, self.total = path, done, 0
        self.answers: dict[tuple[str, int], tuple[str, Any]] = {}
        if path is not None and path.exists():
            data = path.read_bytes()
            whole = data[: data.rfind(b"\n") + 1]
            if whole != data:
                write_bytes(path, whole)
            for number, row in numbered_lines(path):
                kind, index, request = row.get("kind"), row.get("index"), row.get("request")
                if not isinstance(kind, str) or type(index) is not int or "answer" not in row:
                    raise ValueError(f"{path}:{number}: expected the answer to a request, got {sorted(row)}")
                self.answers[kind, index] = str(request), row["answer"]

    def known(self, kind: str, requests: Sequence[tuple[Any, ...]]) -> dict[int, Any]:
        """The answers of a kind of request that are there already, by the request's number.

        An answer to another request than the one of its number is a ValueError.
        """
        self.total += len(requests)
        known = {}
        for (its_kind, index), (request, answer) in self.answers.items():
            if its_kind != kind:
                continue
            if index >= len(requests) or digest(requests[index]) != request:
                raise ValueError(
                    f"{self.path}: expected answers to the same requests, got one to another for {kind} {index}; "
                    "use another --out"
                )
            known[index] = answer
        return known

    def add(self, kind: str, index: int, request: tuple[Any, ...], answer: Any) -> None:
        """Keep an answer.

        Args:
            kind: lm-eval's name for the kind of request.
            index: the request's number among those of its kind.
            request: its arguments.
            answer: what the model said, as JSON can hold it.
        """
        if self.path is None:
            return
        request_digest = digest(request)
        self.answers[kind, index] = request_digest, answer
        row = {"kind": kind, "index": index, "request": request_digest, "answer": answer}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self.done(len(self.answers), self.total)
