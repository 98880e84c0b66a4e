"""A run, complete and frozen: everything that decides its numbers.

Tokens are the unit of length: a batch, the whole run and the start of the decay are given in them.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from dataclasses import dataclass, field
from typing import Any

from ..model.config import QEDConfig

# What may change when a run goes on: none of it decides its numbers, but for the order of sums.
FREE = {"parallel", "compile", "micro_tokens", "activation_checkpointing", "save_every", "log_every"}
FREE |= {"stop_after_skipped", "context"}


# Least and most of every number.
RANGES: dict[str, tuple[float, float]] = {
    "seed": (0, 2**63 - 1),
    **dict.fromkeys(("sequence", "batch_tokens", "micro_tokens", "total_tokens", "validation_tokens"), (1, math.inf)),
    **dict.fromkeys(("save_every", "validate_every", "log_every", "stop_after_skipped"), (1, math.inf)),
    **dict.fromkeys(("decay_start_tokens", "learning_rate", "theta_learning_rate", "weight_decay"), (0, math.inf)),
    **dict.fromkeys(("epsilon", "clip"), (sys.float_info.min, math.inf)),
    "warmup_fraction": (0, 1),
}


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
        for field_ in dataclasses.fields(self):
            _check_type(field_.name, str(field_.type), getattr(self, field_.name))
        for name, (least, most) in RANGES.items():
            value = getattr(self, name)
            if not least <= value <= most:
                expected = f"{least} or more" if most == math.inf else f"a number from {least} to {most}"
                raise ValueError(f"{name}: expected {expected}, got {value}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas: expected two numbers from 0 to below 1, got {list(self.betas)}")
        QEDConfig.check_names(self.model)
        self.model_config()
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
        values: dict[str, Any] = json.loads(text)
        return TrainConfig(**(values | {"betas": tuple(values["betas"])}))

    def changed(self, changes: dict[str, str]) -> TrainConfig:
        """With fields set from the command line; `model.rule=gdn2` reaches into the model."""
        values: dict[str, Any] = {}
        model = dict(self.model)
        known = {f.name: f for f in dataclasses.fields(self)}
        for name, text in changes.items():
            if name.startswith("model."):
                model[name.removeprefix("model.")] = _parsed(text)
            elif name in known.keys() - {"model", "name"}:
                values[name] = _parsed_field(text, str(known[name].type))
            else:
                raise ValueError(f"--set: expected one of {', '.join(sorted(known.keys() - {'name'}))}, got {name}")
        return dataclasses.replace(self, **values, model=model)


def _check_type(name: str, kind: str, value: Any) -> None:
    """ValueError unless `value` is what the field's annotation says, and finite."""
    expected, right = {
        "int": ("a whole number", _is_number(value) and isinstance(value, int)),
        "float": ("a number", _is_number(value)),
        "bool": ("true or false", isinstance(value, bool)),
        "str": ("a text", isinstance(value, str)),
        "str | None": ("a text, or nothing", value is None or isinstance(value, str)),
        "tuple[float, float]": (
            "two numbers, such as [0.9, 0.95]",
            isinstance(value, tuple) and len(value) == 2 and all(map(_is_number, value)),
        ),
        "dict[str, Any]": ("fields by name", isinstance(value, dict)),
    }[kind]
    if not right:
        raise ValueError(f"{name}: expected {expected}, got {value!r}")


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # a whole number that no float can stand for
        return False


def _parsed_field(text: str, kind: str) -> Any:
    """A field's value. A text stays the text it is, though it may look like a number: data=2024 is a folder."""
    if kind == "str":
        return text
    value = _parsed(text)
    if kind == "int" and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind == "str | None":
        return None if value is None else text
    return tuple(value) if isinstance(value, list) else value


def _parsed(text: str) -> Any:
    """JSON where it is, else the text itself; 1e9 is a whole number."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) >= 1e3 else value
