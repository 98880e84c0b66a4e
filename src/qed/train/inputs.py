"""What a run reads, opened and checked before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from ..data import Generated, TokenShards
from ..data.generated import HELD_OUT, is_generated
from ..data.tokenizer_files import TOKENIZER
from ..files import write_text
from .config import TrainConfig


class Inputs(NamedTuple):
    """The corpora of a run, or what makes its rows."""

    training: TokenShards | Generated
    validation: TokenShards | Generated | None

    @property
    def identities(self) -> dict[str, str]:
        """The identity of each corpus's tokens, which is written beside the configuration: other tokens under the same
        path make another run."""
        training = {"data": self.training.identity}
        return training if self.validation is None else training | {"validation": self.validation.identity}

    def tokenizer(self, out: Path) -> Path | None:
        """The file of the corpus's tokenizer; that of rows which are made is written into the run's folder `out`."""
        if isinstance(self.training, Generated):
            write_text(out / TOKENIZER, self.training.tokenizer.to_str(pretty=True))
            return out / TOKENIZER
        path = self.training.folder / TOKENIZER
        return path if path.exists() else None

    def check_same(self, before: Any, config: TrainConfig) -> None:
        """Raise ValueError if a run began with other tokens than there are now.

        `before` is what it wrote as its `identities`; runs of older versions have none.
        """
        for name, now in self.identities.items():
            kept = before.get(name) if isinstance(before, dict) else None
            if kept is not None and kept != now:
                raise ValueError(
                    f"{name}: {getattr(config, name)} has changed since the run began: its tokens had the identity "
                    f"{kept}, now they have {now}; bring the old ones back, or begin a run in another folder"
                )


def open_inputs(config: TrainConfig) -> Inputs:
    """Open both corpora. ValueError if one is missing or too short, or if they have different tokenizers."""
    training = _opened(config.data, f"training at seed {config.seed}")
    vocabulary, size = training.index["vocab_size"], config.model_config().vocab_size
    if vocabulary > size:
        raise ValueError(f"model.vocab_size: expected at least the corpus's {vocabulary}, got {size}")
    if isinstance(training, Generated):
        training.rows([0], config.sequence)  # raises where a row cannot have so many tokens
    if config.validation is None:
        return Inputs(training, None)
    validation = _opened(config.validation, HELD_OUT)
    own, other = (x.index["tokenizer_sha256"] for x in (training, validation))
    if own != other:
        raise ValueError(
            f"validation: expected tokens of the same tokenizer as {config.data}, {own}, got {other} "
            f"in {config.validation}"
        )
    if isinstance(validation, TokenShards) and len(validation) <= config.sequence:
        raise ValueError(f"validation: expected more than {config.sequence} tokens, got {len(validation)}")
    return Inputs(training, validation)


def validation_blocks(source: TokenShards | Generated, config: TrainConfig) -> tuple[int, int]:
    """How many blocks of how many rows a validation reads. All are of the same shape, and rows that are left over are
    not used."""
    there, wanted = source.windows(config.sequence), max(1, config.validation_tokens // config.sequence)
    rows = wanted if there is None else min(there, wanted)
    together = min(rows, max(1, config.micro_tokens // config.sequence))
    return rows // together, together


def _opened(data: str, stream: str) -> TokenShards | Generated:
    return Generated(data, stream) if is_generated(data) else TokenShards(data)
