"""The model's configuration. With no argument it is the paper's 340M model.

Where the paper leaves a value open, the field says so, with the value chosen here; the documentation of the recipe
explains the choice.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import GenerationConfig, PreTrainedConfig

from ..choices import check_choice, nearest
from ..layers.functions import ACTIVATIONS
from ..layers.initialization import THETA
from ..rules import RULES
from .stub import AUTO_MAP, is_mapped, write_stub

FORMAT_VERSION = 1
_NARROW = {"hidden_size": 64, "num_hidden_layers": 2, "num_heads": 2, "head_dim": 32, "intermediate_size": 128}
SIZES: dict[str, dict[str, Any]] = {
    "paper": {},
    "medium": {"hidden_size": 512, "num_hidden_layers": 12, "num_heads": 4, "head_dim": 128, "intermediate_size": 1408},
    "small": {"hidden_size": 256, "num_hidden_layers": 6, "num_heads": 4, "head_dim": 64, "intermediate_size": 640},
    "mini": _NARROW | {"vocab_size": 512},
    "tiny": _NARROW | {"vocab_size": 256},
}
# The real numbers of a configuration, each with the smallest value that it may have.
LEAST = {
    **dict.fromkeys(("expand_v", "lambda_max", "erase_max", "initializer_range", "norm_eps", "rope_theta"), 0.0),
    **dict.fromkeys(("theta_init", "read_scale"), -sys.float_info.max),
}
RECURRENT = "linear_attention"  # what transformers calls a recurrent layer, whatever its rule is
ATTENTION = ("full_attention", "sliding_attention")
INITIALIZERS = ("normal", "xavier")

# Fields that transformers and libraries around it write into a config.json but `PreTrainedConfig` does not declare:
# where code, quantisation and weights are, and fields of earlier versions, which older files still have.
_OTHERS = frozenset(
    {"attn_implementation", "auto_map", "experts_implementation", "num_labels", "per_layer_config"}
    | {"quantization_config", "compression_config", "transformers_weights", "tokenizer_class", "custom_pipelines"}
    | {"add_cross_attention", "cross_attention_hidden_size", "finetuning_task", "is_decoder", "prefix", "pruned_heads"}
    | {"sep_token_id", "decoder_start_token_id", "task_specific_params", "tie_encoder_decoder", "torchscript"}
    | {"use_bfloat16", "tf_legacy_loss", "is_causal"}
)


def _is_of_transformers(name: str) -> bool:
    """Return whether a field belongs to transformers: it is private, or declared by its configuration, or an option of
    generation."""
    if name.startswith("_") or name in _OTHERS or name in GenerationConfig._get_default_generation_params():
        return True
    return hasattr(PreTrainedConfig, name) and not callable(getattr(PreTrainedConfig, name))


@strict
class QEDConfig(PreTrainedConfig):
    """The configuration of a model. With no argument it is the paper's 340M model.

    Args:
        vocab_size, hidden_size, num_hidden_layers, num_heads, head_dim: sizes; a head's keys have `head_dim` channels.
        expand_v: a head's values have `expand_v · head_dim` channels. (Open in the paper: 1.)
        intermediate_size: width of the SwiGLU. (Open: the multiple of 64 that comes nearest to 340M parameters.)
        rule: a name of `qed.RULES`, for all recurrent layers that are given no other.
        layer_types: for every layer "linear_attention", which is a recurrent layer, "full_attention" or
            "sliding_attention"; None if all are recurrent. These are transformers' own words, which its Trainer asks
            for when it resumes. A name of `qed.RULES` is a recurrent layer with that rule, as in older checkpoints.
        layer_rules: for every layer a name of `qed.RULES`, or None if it is not recurrent; None if `layer_types` and
            `rule` say it.
        lambda_max, theta_init: λ_h = lambda_max · sigmoid(θ_h), θ_h starts at theta_init.
        erase_max: the erase gate is b = erase_max · sigmoid(W_b x), 1 in the paper. With 2, the most that there may be,
            the erase of one step has eigenvalues in [−1, 1] instead of [0, 1].
        conv_size: taps of the short convolution of q, k and v. (Open: 4.)
        read_scale: factor on the read of the state.
        output_gate: "silu", "sigmoid" or None. (Open: silu.)
        output_gate_rank: rank of its projection; None for a head's value channels, 0 for one full matrix.
        decay_rank: rank of the decay's projection; None for `head_dim`.
        sliding_window, rope_theta: window and base of the rotary positions of softmax layers.
        initializer: initial values of the token mixers' matrices: "normal", as everywhere else, or "xavier", as in
            NVIDIA's release of GDN-2. (Open: normal.)
        initializer_range: standard deviation of weights; projections back into the residual stream get
            1/√(2 · layers) of it. (Open.)
        tie_word_embeddings, norm_eps, use_cache, bos_token_id, eos_token_id, pad_token_id: as the names say. There may
            be several tokens that end a text: `eos_token_id` is one or a list of them.

    A field that is neither here nor one of transformers' own is refused.
    """

    model_type = "qed"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012

    vocab_size: int = 32000
    hidden_size: int = 1024
    num_hidden_layers: int = 24
    num_heads: int = 6
    head_dim: int = 128
    expand_v: float = 1.0
    intermediate_size: int = 2496
    rule: str = "qed"
    layer_types: list[str] | None = None
    layer_rules: list[str | None] | None = None
    lambda_max: float = 0.25
    erase_max: float = 1.0
    theta_init: float = THETA
    conv_size: int = 4
    read_scale: float = 1.0
    output_gate: str | None = "silu"
    output_gate_rank: int | None = None
    decay_rank: int | None = None
    sliding_window: int = 512
    rope_theta: float = 10000.0
    initializer: str = "normal"
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    norm_eps: float = 1e-5
    use_cache: bool = True
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    pad_token_id: int | None = None
    format_version: int = FORMAT_VERSION

    def __post_init__(self, **kwargs: Any) -> None:
        self._check_format()  # first: a newer version may have written fields and rules that this one does not know
        self.check_names(name for name in kwargs if not _is_of_transformers(name))
        if self.layer_types is None and type(self.num_hidden_layers) is int:
            self.layer_types = [RECURRENT] * self.num_hidden_layers
        self._separate_rules()
        super().__post_init__(**kwargs)
        if is_mapped(type(self), "AutoConfig"):
            self.auto_map = dict(AUTO_MAP)  # whatever a file says: these classes are found through our stub alone
        self.check()

    def _check_format(self) -> None:
        """Raise ValueError for a checkpoint of another format than this version reads."""
        if self.format_version == FORMAT_VERSION:
            return
        newer = type(self.format_version) is int and self.format_version > FORMAT_VERSION
        advice = "; a newer version of qed wrote it: install a newer qed-attention to read it" if newer else ""
        raise ValueError(
            f"format_version: this version of qed reads checkpoints of format {FORMAT_VERSION}, "
            f"got {self.format_version!r}{advice}"
        )

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Return a configuration of these fields, as `from_pretrained` reads them, with some of them changed.

        Changed fields are checked like all others. A change of `rule` alone is one of all layers that have the rule
        which the fields name.

        Args:
            config_dict: the fields.
            kwargs: changes, and options of transformers.
        """
        changes = {name: kwargs.pop(name) for name in QEDConfig.__annotations__ if name in kwargs}
        if "rule" in changes and "layer_rules" not in changes:
            before = cls(**config_dict)
            rules = [changes["rule"] if rule == before.rule else rule for rule in before.layer_rules or ()]
            config_dict = config_dict | {"layer_types": before.layer_types, "layer_rules": rules}
        return super().from_dict(config_dict | changes, **kwargs)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Save as transformers does, with the stub beside config.json that lets its Auto classes find this package."""
        super().save_pretrained(save_directory, *args, **kwargs)
        if is_mapped(type(self), "AutoConfig"):
            write_stub(Path(save_directory))

    @classmethod
    def register_for_auto_class(cls, auto_class: str | type = "AutoConfig") -> None:
        """As in transformers for a class derived from this one, whose code is then saved with it. This one needs
        nothing: the stub is saved with it anyway."""
        if not is_mapped(cls, auto_class):
            super().register_for_auto_class(auto_class)

    def _separate_rules(self) -> None:
        """Replace every rule among `layer_types` by transformers' word for it, and put it into `layer_rules`."""
        types = self.layer_types or []
        said = [name if name in RULES else self.rule if name == RECURRENT else None for name in types]
        if self.layer_rules is None:
            self.layer_rules = said
        for i, (name, rule) in enumerate(zip(types, self.layer_rules, strict=False)):
            if name in RULES and rule != name:
                raise ValueError(f"layer_rules[{i}]: expected {name!r}, which layer_types[{i}] says, got {rule!r}")
        self.layer_types = [RECURRENT if name in RULES else name for name in types]

    @classmethod
    def check_names(cls, names: Iterable[str]) -> None:
        """Raise ValueError for the first name that is not a field of a model's configuration."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in names:
            if name not in known:
                raise ValueError(
                    f"{name}: not a field of a model's configuration; the nearest is {nearest(name, known)}"
                )

    @property
    def value_head_dim(self) -> int:
        """The channels of a head's values."""
        return int(self.expand_v * self.head_dim)

    @property
    def num_attention_heads(self) -> int:
        """The number of heads, under the name that transformers uses."""
        return self.num_heads

    def check(self) -> None:
        """Raise ValueError for what cannot be a model; the message names the field, what was expected and what came."""
        sizes = ("vocab_size", "hidden_size", "num_heads", "head_dim", "intermediate_size", "conv_size")
        for name in (*sizes, "num_hidden_layers", "sliding_window"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise ValueError(f"{name}: expected a positive whole number, got {getattr(self, name)!r}")
        for name, least in LEAST.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
                expected = "a number" if least == -sys.float_info.max else f"a number of {least:g} or more"
                raise ValueError(f"{name}: expected {expected}, got {value!r}")
        if not 0 < self.erase_max <= 2:  # beyond 2 what lies along the key grows
            raise ValueError(f"erase_max: expected a number above 0 and at most 2, got {self.erase_max!r}")
        for name in ("decay_rank", "output_gate_rank"):
            rank = getattr(self, name)
            if rank is not None and (type(rank) is not int or rank < 0):
                raise ValueError(f"{name}: expected a whole number of 0 or more, or None, got {rank!r}")
        check_choice("rule", self.rule, RULES, "; `--import FILE` adds those of a file of yours")
        check_choice("initializer", self.initializer, INITIALIZERS)
        if self.value_head_dim < 1 or self.value_head_dim != self.expand_v * self.head_dim:
            raise ValueError(
                "expand_v: expected expand_v × head_dim to be a positive whole number, "
                f"got {self.expand_v} × {self.head_dim}"
            )
        if self.output_gate is not None and self.output_gate not in ACTIVATIONS:
            raise ValueError(f"output_gate: expected {', '.join(ACTIVATIONS)} or None, got {self.output_gate!r}")
        self.validate_layer_type()

    def validate_layer_type(self) -> None:
        """Raise ValueError unless every layer has a type that there is, and a recurrent one a rule. This replaces
        transformers' own check, which accepts types that this model does not have."""
        types, rules = self.layer_types or [], self.layer_rules or []
        for field, given in (("layer_types", types), ("layer_rules", rules)):
            if len(given) != self.num_hidden_layers:
                raise ValueError(f"{field}: expected {self.num_hidden_layers} entries, one a layer, got {len(given)}")
        for i, (name, rule) in enumerate(zip(types, rules, strict=True)):
            check_choice(f"layer_types[{i}]", name, (*RULES, RECURRENT, *ATTENTION))
            if name == RECURRENT:
                check_choice(f"layer_rules[{i}]", rule, RULES)
            elif rule is not None:
                raise ValueError(f"layer_rules[{i}]: expected None, as layer_types[{i}] is {name!r}, got {rule!r}")

    @classmethod
    def tiny(cls, **changes: Any) -> QEDConfig:
        """Return a model of two layers of width 64 and 256 tokens, for tests and first steps: it runs in seconds on a
        laptop."""
        return cls(**(SIZES["tiny"] | changes))

    @classmethod
    def mini(cls, **changes: Any) -> QEDConfig:
        """Return the same with 512 tokens, as the `mini` recipe has it."""
        return cls(**(SIZES["mini"] | changes))

    @classmethod
    def small(cls, **changes: Any) -> QEDConfig:
        """Return the model of the `small` recipe: 14M parameters, 6 layers of width 256, 4 heads of 64."""
        return cls(**(SIZES["small"] | changes))

    @classmethod
    def medium(cls, **changes: Any) -> QEDConfig:
        """Return the model of the `medium` recipe: 64M parameters, 12 layers of width 512, 4 heads of 128."""
        return cls(**(SIZES["medium"] | changes))
