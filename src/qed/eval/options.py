"""What a user may choose about an evaluation: lengths, samples, files, and the form of prompts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ..choices import check_choice

SIZINGS = ("linear", "binary")  # how a haystack is made to fill its length (`tasks/niah.py`)
VARIANTS = ("A0", "A1", "B")  # how prompts of recall tasks are made (`tasks/recall.py`)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What decides which examples there are and how they are answered; each task reads those that concern it."""

    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384, 32768)
    samples: int | None = None  # None: 500 of needle tasks, all of recall tasks, 64 rows of `positions`
    seed: int = 42
    sizing: str = "linear"
    words: Path | None = None
    essays: Path | None = None
    data: dict[str, Path] = field(default_factory=dict)
    variant: str = "A1"
    context: int = 2048  # of variant B
    max_length: int | None = None  # of variants A: longer prompts lose their beginning
    bos: bool = True  # where the tokenizer has one
    batch: int = 64
    strength: float = 1.0
    prompts: Path | None = None  # where frozen prompts are kept, if not with the results

    def __post_init__(self) -> None:
        if not self.lengths:
            raise ValueError("--lengths: expected one or more, got none")
        if self.samples is not None and self.samples < 1:
            raise ValueError(f"--samples: expected 1 or more, got {self.samples}")
        check_choice("--sizing", self.sizing, SIZINGS)
        check_choice("--variant", self.variant, VARIANTS)
