"""Runs on rows that are made: what a state can follow (state tracking), and how much it can hold (recall)."""

from __future__ import annotations

from typing import Any

from ..choices import check_choice
from ..data.generated import PREFIX, Generated
from ..train.config import TrainConfig
from .parts import run_of, steps_of

WORDS = 1024  # of recall, half of them keys
# The most pairs that a state of this width is told, and the rows of a step; a row has four tokens a pair.
LOADS = {16: (32, 16), 32: (64, 8), 64: (256, 8), 128: (512, 8)}

# What all of them share: so small a model takes float32, and no compiler.
SHARED: dict[str, Any] = {
    **{"precision": "float32", "compile": False, "weight_decay": 0.0},
    **{"validate_every": 250, "log_every": 250},
}


def tracking(group: str = "z2", arm: str = "qed", seed: int = 0) -> TrainConfig:
    """One layer learns the running product of a group's letters, in 1,500 steps of 16 rows of 32: half a minute.

    There is a single layer, because theory says of single layers what they can follow: two of them may do together what
    one cannot. It has no short convolution and no output gate, so that a token's transition depends on that token alone
    and all that is known of earlier ones is in the state. A training goes on after its loss is nearly 0: it is the last
    steps, with a small learning rate, that make the transitions exact enough for words longer than those of training.

    Args:
        group: a name of `qed.data.groups.GROUPS`.
        arm: any rule.
        seed: of the weights and of the words.
    """
    data = f"{PREFIX}tracking:{group}"
    model = {
        **{"hidden_size": 64, "num_hidden_layers": 1, "num_heads": 2, "head_dim": 32, "intermediate_size": 128},
        **{"vocab_size": Generated(data).vocab_size, "tie_word_embeddings": False},
        **{"conv_size": 1, "output_gate": None},
    }
    return TrainConfig(
        **run_of(f"tracking-{group}", model, data, arm, seed, data),
        **steps_of(16, 32, tokens=1500 * 16 * 32, decay_start=750 * 16 * 32),
        learning_rate=2e-3,
        save_every=1000,
        validation_tokens=64 * 32,
        **SHARED,
    )


def recall(width: int = 16, arm: str = "qed", seed: int = 0) -> TrainConfig:
    """Two layers with one head of `width` channels learn to recall pairs, of which a row tells 32 to 512.

    Without an output gate, and with larger initial weights than a language model's, recall appears within some hundred
    steps instead of some thousand.

    Args:
        width: channels of the head, keys' and values': a layer's state has width² numbers.
        arm: any rule.
        seed: of the weights and of the pairs.
    """
    check_choice("width", str(width), list(map(str, LOADS)))
    pairs, rows = LOADS[width]
    data, row = f"{PREFIX}recall:{WORDS}", 4 * pairs
    model = {
        **{"hidden_size": 64, "num_hidden_layers": 2, "num_heads": 1, "head_dim": width, "intermediate_size": 128},
        **{"vocab_size": Generated(data).vocab_size, "output_gate": None, "initializer_range": 0.1},
    }
    return TrainConfig(
        **run_of(f"recall-{width}", model, data, arm, seed, data),
        **steps_of(rows, row, tokens=2500 * rows * row, decay_start=1250 * rows * row),
        learning_rate=5e-3,
        save_every=500,
        validation_tokens=32 * row,
        **SHARED,
    )
