"""A run, complete and frozen: everything that decides its numbers.

Tokens are the unit of length: a batch, the whole run and the start of the decay are given in them.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..choices import check_choice
from ..model.config import QEDConfig
from .fields import check_type, field_types, parse, parse_field
from .optimizers import settings_of

# What may change when a run is resumed: none of it decides its numbers, apart from the order of sums.
CHANGEABLE_ON_RESUME = {"parallel", "compile", "micro_tokens", "activation_checkpointing", "save_every", "log_every"}
CHANGEABLE_ON_RESUME |= {"stop_after_skipped", "context", "loggers"}

# The least and the largest value of every number.
RANGES: dict[str, tuple[float, float]] = {
    "seed": (0, 2**63 - 1),
    **dict.fromkeys(("sequence", "batch_tokens", "micro_tokens", "total_tokens", "validation_tokens"), (1, math.inf)),
    **dict.fromkeys(("save_every", "validate_every", "log_every", "stop_after_skipped"), (1, math.inf)),
    **dict.fromkeys(("decay_start_tokens", "learning_rate", "theta_learning_rate", "weight_decay"), (0, math.inf)),
    **dict.fromkeys(("epsilon", "clip"), (sys.float_info.min, math.inf)),
    "warmup_fraction": (0, 1),
}
CHOICES = {
    "parallel": ("ddp", "fsdp"),
    "activation_checkpointing": ("none", "light", "cheap", "lean", "full"),
    "precision": ("bfloat16", "float32"),
}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run. ValueError for values that cannot be one, with the field, what was expected and what came.

    Attributes:
        name: the recipe's name, with arm and seed.
        model: fields of the model's configuration, `QEDConfig`, that are other than its defaults.
        data: a folder that `qed prepare` wrote, or rows that are made, such as generated:tracking:s5.
        validation: another such folder, held out; without one the run is not validated.
        seed: of the weights and of the order of the data.
        sequence: tokens of a row.
        batch_tokens: tokens of a step, over all processes.
        micro_tokens: tokens of a forward and backward pass in one process.
        total_tokens: tokens of the whole run; if it alone is set, the decay's start moves in proportion.
        decay_start_tokens: the learning rate falls linearly to 0 from here on.
        warmup_fraction: share of all steps in which the learning rate rises linearly.
        optimizer: adamw or muon.
        optimizer_settings: the optimiser's own settings; those not given have their defaults.
        learning_rate: the largest one.
        theta_learning_rate: factor on the learning rate for θ, which sets λ.
        betas: of AdamW.
        epsilon: of AdamW.
        weight_decay: not applied to norms, biases, A_log, dt_bias, θ and the taps of convolutions.
        clip: the largest norm of the gradient.
        precision: of matrix products, bfloat16 or float32; weights and optimiser are float32.
        parallel: how processes share the model, if there are several: ddp or fsdp.
        context: processes that share one row, each with a stretch of its tokens.
        compile: compile blocks; on a GPU, but with fsdp or context, pieces of the batch are CUDA graphs too.
        activation_checkpointing: what the backward recomputes, from most memory to least: none, light (norms and
            activations), cheap (all but products), lean (SwiGLU's product and bottlenecks too) or full (every block).
        save_every: steps between two checkpoints.
        validate_every: steps between two validations.
        validation_tokens: held-out tokens that a validation reads.
        log_every: steps between two printed lines.
        stop_after_skipped: steps in a row without a finite gradient after which the run stops.
        loggers: tensorboard, trackio, wandb or yours, separated by commas; jsonl (metrics.jsonl) is always written.
    """

    name: str
    model: dict[str, Any] = field(default_factory=dict)
    data: str
    validation: str | None = None
    seed: int = 0
    sequence: int = 2048
    batch_tokens: int = 524_288
    micro_tokens: int = 32_768
    total_tokens: int = 15_000_000_000
    decay_start_tokens: int = 13_500_000_000
    warmup_fraction: float = 0.01
    optimizer: str = "adamw"
    optimizer_settings: dict[str, Any] = field(default_factory=dict)
    learning_rate: float = 3e-4
    theta_learning_rate: float = 10.0
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    precision: str = "bfloat16"
    parallel: str = "ddp"
    context: int = 1
    compile: bool = True
    activation_checkpointing: str = "none"
    save_every: int = 500
    validate_every: int = 500
    validation_tokens: int = 1_048_576
    log_every: int = 1
    stop_after_skipped: int = 20
    loggers: str = "jsonl"

    def __post_init__(self) -> None:
        for name, kind in field_types(type(self)).items():
            check_type(name, kind, getattr(self, name))
        for name, (least, most) in RANGES.items():
            value = getattr(self, name)
            if not least <= value <= most:
                expected = f"{least} or more" if most == math.inf else f"a number from {least} to {most}"
                raise ValueError(f"{name}: expected {expected}, got {value}")
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                expected = f"{', '.join(choices[:-1])} or {choices[-1]}"
                raise ValueError(f"{name}: expected {expected}, got {getattr(self, name)!r}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas: expected two numbers from 0 to below 1, got {list(self.betas)}")
        QEDConfig.check_names(self.model)
        self.model_config()
        settings = settings_of(self.optimizer, self.optimizer_settings)
        object.__setattr__(self, "optimizer_settings", dataclasses.asdict(settings))
        self._check_lengths()

    def _check_lengths(self) -> None:
        if self.batch_tokens % self.sequence or self.micro_tokens % self.sequence:
            raise ValueError(
                f"batch_tokens, micro_tokens: expected multiples of a row of {self.sequence} tokens, "
                f"got {self.batch_tokens} and {self.micro_tokens}"
            )
        if self.context < 1 or self.sequence % self.context:
            raise ValueError(f"context: expected a divisor of a row's {self.sequence} tokens, got {self.context}")
        if self.decay_start_tokens > self.total_tokens:
            raise ValueError(
                f"decay_start_tokens: expected at most total_tokens, {self.total_tokens}, got {self.decay_start_tokens}"
            )

    @property
    def steps(self) -> int:
        """The number of optimiser steps of the whole run."""
        return -(-self.total_tokens // self.batch_tokens)

    @property
    def batch(self) -> int:
        """The number of rows in a step."""
        return self.batch_tokens // self.sequence

    def model_config(self) -> QEDConfig:
        """The configuration of the model that is trained."""
        return QEDConfig(**self.model)

    def to_json(self) -> str:
        """Write all fields as a JSON object."""
        return json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> TrainConfig:
        """The inverse of `to_json`. Fields that an older version did not write have their defaults."""
        values: dict[str, Any] = json.loads(text)
        return TrainConfig(**(values | {"betas": tuple(values["betas"])}))

    def changed(self, changes: dict[str, str], parameters: Iterable[str] = ()) -> TrainConfig:
        """The same run with fields set from the command line.

        `model.rule=gdn2` sets a field of the model, `optimizer.momentum=0.9` a setting of the optimiser. If
        `total_tokens` is set and `decay_start_tokens` is not, the decay starts after the same share of the run. The
        names `parameters` of the recipe may be set as well, but not here: the error for an unknown name lists them.
        """
        values: dict[str, Any] = {}
        model, settings = dict(self.model), dict(self.optimizer_settings)
        if changes.get("optimizer", self.optimizer) != self.optimizer:
            settings = {}  # those of the optimiser before
        kinds = field_types(type(self))
        plain = kinds.keys() - {"name", "model", "optimizer_settings"}
        for name, text in changes.items():
            if name.startswith("model."):
                model[name.removeprefix("model.")] = parse(text)
            elif name.startswith("optimizer."):
                settings[name.removeprefix("optimizer.")] = parse(text)
            elif name in plain:
                values[name] = parse_field(text, kinds[name])
            else:
                check_choice("--set", name, [*sorted({*parameters, *plain}), "model.FIELD", "optimizer.SETTING"])
        total = values.get("total_tokens")
        if isinstance(total, int):  # anything else is refused below
            values.setdefault("decay_start_tokens", self.decay_start_tokens * total // self.total_tokens)
        return dataclasses.replace(self, **values, model=model, optimizer_settings=settings)
