"""What a run reads, opened and checked before anything is written."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..data import TokenShards
from .config import TrainConfig


class Inputs(NamedTuple):
    """The corpora of a run."""

    training: TokenShards
    validation: TokenShards | None

    @property
    def identities(self) -> dict[str, str]:
        """The identity of each corpus's tokens, which is written beside the configuration: other tokens under the same
        path make another run."""
        training = {"data": self.training.identity}
        return training if self.validation is None else training | {"validation": self.validation.identity}

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
    training = TokenShards(config.data)
    vocabulary, size = training.index["vocab_size"], config.model_config().vocab_size
    if vocabulary > size:
        raise ValueError(f"model.vocab_size: expected at least the corpus's {vocabulary}, got {size}")
    if config.validation is None:
        return Inputs(training, None)
    validation = TokenShards(config.validation)
    own, other = (x.index["tokenizer_sha256"] for x in (training, validation))
    if own != other:
        raise ValueError(
            f"validation: expected tokens of the same tokenizer as {config.data}, {own}, got {other} "
            f"in {config.validation}"
        )
    if len(validation) <= config.sequence:
        raise ValueError(f"validation: expected more than {config.sequence} tokens, got {len(validation)}")
    return Inputs(training, validation)
