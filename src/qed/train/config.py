"""A run, complete and frozen: everything that decides its numbers.

Tokens are the unit of length: a batch, the whole run and the start of the decay are given in them.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from ..model.config import QEDConfig

# What may change when a run goes on: none of it decides its numbers, but for the order of sums.
FREE = {"parallel", "compile", "micro_tokens", "activation_checkpointing", "save_every", "log_every"}
FREE |= {"stop_after_skipped", "context"}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    name: str  # the recipe's
    model: dict[str, Any] = field(default_factory=dict)  # arguments of QEDConfig
    data: str  # a folder of `qed prepare`
    validation: str | None = None  # another one, held out
    seed: int = 0
    sequence: int = 2048  # tokens of a row
    batch_tokens: int = 524_288  # of a step, over all processes
    micro_tokens: int = 32_768  # of a forward and backward in one process
    total_tokens: int = 15_000_000_000
    decay_start_tokens: int = 13_500_000_000  # the learning rate falls linearly to 0 from here on
    warmup_fraction: float = 0.01  # of all steps, linear
    learning_rate: float = 3e-4
    theta_learning_rate: float = 10.0  # times the learning rate, for θ
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    weight_decay: float = 0.1  # not on norms, biases, A_log, dt_bias, θ and convolutions' taps
    clip: float = 1.0  # of the gradient's norm
    precision: str = "bfloat16"  # of products; weights and optimiser are float32
    parallel: str = "ddp"  # or "fsdp": how processes share the model, if there are several
    context: int = 1  # processes that share one row, each with a stretch of its tokens
    compile: bool = True  # blocks; and on one GPU a piece is captured as a CUDA graph
    activation_checkpointing: str = "none"  # "cheap": all but products is made again; "full": every block is
    save_every: int = 500  # steps
    validate_every: int = 500
    validation_tokens: int = 1_048_576
    log_every: int = 1
    stop_after_skipped: int = 20  # steps in a row without a finite gradient

    def __post_init__(self) -> None:
        QEDConfig.check_names(self.model)
        self.model_config()
        for name in ("sequence", "batch_tokens", "micro_tokens", "total_tokens", "save_every", "validate_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected a positive number, got {getattr(self, name)}")
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
        if self.parallel not in ("ddp", "fsdp"):
            raise ValueError(f"parallel: expected ddp or fsdp, got {self.parallel!r}")
        if self.activation_checkpointing not in ("none", "cheap", "full"):
            raise ValueError(
                f"activation_checkpointing: expected none, cheap or full, got {self.activation_checkpointing!r}"
            )
        if self.precision not in ("bfloat16", "float32"):
            raise ValueError(f"precision: expected bfloat16 or float32, got {self.precision!r}")

    @property
    def steps(self) -> int:
        return -(-self.total_tokens // self.batch_tokens)

    @property
    def batch(self) -> int:
        """Rows of a step."""
        return self.batch_tokens // self.sequence

    def model_config(self) -> QEDConfig:
        return QEDConfig(**self.model)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> TrainConfig:
        values = json.loads(text)
        return TrainConfig(**(values | {"betas": tuple(values["betas"])}))

    def changed(self, changes: dict[str, str]) -> TrainConfig:
        """With fields set from the command line; `model.rule=gdn2` reaches into the model."""
        values: dict[str, Any] = {}
        model = dict(self.model)
        known = {f.name for f in dataclasses.fields(self)}
        for name, text in changes.items():
            if name.startswith("model."):
                model[name.removeprefix("model.")] = _parsed(text)
            elif name in known - {"model", "name"}:
                values[name] = _parsed(text)
            else:
                raise ValueError(f"--set: expected one of {', '.join(sorted(known - {'name'}))}, got {name}")
            if name == "betas":
                values[name] = tuple(values[name])
        return dataclasses.replace(self, **values, model=model)


def _parsed(text: str) -> Any:
    """JSON where it is, else the text itself; 1e9 is a whole number."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return text
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) >= 1e3 else value
