"""What the model with and without its head have in common: what transformers has to know of them, and how they are
loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ..layers import Mixer, set_impl
from .card import CARD, card, write_card
from .config import QEDConfig
from .files import check_checkpoint, check_config, check_options
from .initialization import initialize
from .matrices import check_adapter_keys, check_quantised, keep_order, listed
from .stub import is_mapped

logger = logging.get_logger(__name__)


def weights_dtype(device: str) -> torch.dtype:
    """Return the dtype of weights for generation and evaluation: bfloat16 on any GPU, float32 elsewhere."""
    return torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32


class QEDPreTrainedModel(PreTrainedModel):
    """The base class of both models: loading, initialisation, λ's scale and routes."""

    config_class = QEDConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ("QEDBlock",)
    _keep_in_fp32_modules_strict = ("A_log", "dt_bias", "theta", "random_direction")
    _supports_sdpa = True

    def __init__(self, config: QEDConfig):
        super().__init__(config)
        self.register_load_state_dict_post_hook(check_adapter_keys)

    def _init_weights(self, module: nn.Module) -> None:
        initialize(module, self.config)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint as transformers does, but only from safetensors in the checkpoint's own folder, and only if
        every tensor is there and has its shape, and a quantisation that is asked for converts something."""
        check_options(kwargs)
        check_config(kwargs.get("config"))
        if pretrained_model_name_or_path is not None:
            check_checkpoint(pretrained_model_name_or_path, kwargs)
        wants_info = kwargs.pop("output_loading_info", False)
        try:
            model, info = super().from_pretrained(
                pretrained_model_name_or_path, *args, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs
            )
        except SafetensorError as error:
            raise ValueError(
                f"{pretrained_model_name_or_path}: expected safetensors, got a damaged file: {error}"
            ) from error
        _refuse_others(f"{pretrained_model_name_or_path}: not this model's checkpoint", info)
        check_quantised(model)
        keep_order(model)
        return (model, info) if wants_info else model

    def save_pretrained(self, save_directory: Any, is_main_process: bool = True, *args: Any, **kwargs: Any) -> None:
        """Save as transformers does, with a model card in README.md unless somebody else wrote one or edited ours.

        Args:
            save_directory: the folder.
            is_main_process: whether this process writes, of several that call this.
            args, kwargs: as in transformers.
        """
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)
        adapter = getattr(self, "_hf_peft_config_loaded", False)  # whose folder is not a model's
        if is_main_process and not adapter and self.can_generate() and is_mapped(type(self), "AutoModelForCausalLM"):
            folder = Path(save_directory)
            if not write_card(folder, card(self.config, self.num_parameters())):
                logger.warning("%s: left as it is, since somebody wrote or edited it", folder / CARD)

    def load_adapter(self, *args: Any, **kwargs: Any) -> Any:
        """Load an adapter of PEFT as transformers does, but only if the model has the modules that it was made for."""
        info = super().load_adapter(*args, ignore_mismatched_sizes=True, **kwargs)
        _refuse_others(f"not an adapter of this model, which has {listed(self)}", vars(info))
        return info

    @classmethod
    def register_for_auto_class(cls, auto_class: str | type = "AutoModel") -> None:
        """As in transformers for a class derived from these, whose code is then saved with it. These need nothing: the
        stub is saved with them anyway."""
        if not is_mapped(cls, auto_class):
            super().register_for_auto_class(auto_class)

    def set_strength_scale(self, scale: float) -> None:
        """Multiply λ by `scale` (the paper's s) at every token, in prefill and decoding. Layers without λ are
        unchanged."""
        for module in self.modules():
            if isinstance(module, Mixer):
                module.strength_scale = float(scale)

    def set_impl(self, impl: str = "auto", **pieces: str) -> None:
        """Choose the routes of all layers: "reference" is plain torch everywhere, on every device. Decoding steps that
        were captured with other routes are not used again.

        Args:
            impl: "auto", or a route of the recurrence; see `qed.layers.set_impl`.
            pieces: a route for single pieces, such as norm="reference".
        """
        set_impl(self, impl, **pieces)

    def end_tokens(self) -> set[int]:
        """Return the tokens that end a text: those of the configuration and of the generation configuration. Each may
        name several."""
        configs = (self.config, getattr(self, "generation_config", None))
        given = [x for x in (getattr(config, "eos_token_id", None) for config in configs) if x is not None]
        return {int(token) for x in given for token in (x if isinstance(x, list | tuple) else [x])}


def _refuse_others(what: str, info: dict[str, Any]) -> None:
    """Raise ValueError that begins with `what` if tensors are missing, are of another model or have another shape."""
    problems = [f"{name}: {list(got)} in the checkpoint, {list(expected)} in the model"
                for name, got, expected in info["mismatched_keys"]]  # fmt: skip
    problems += [f"{name}: not in the checkpoint" for name in sorted(info["missing_keys"])]
    problems += [f"{name}: not in the model" for name in sorted(info["unexpected_keys"])]
    if problems:
        shown = "\n  ".join(problems[:10]) + (f"\n  and {len(problems) - 10} more" if len(problems) > 10 else "")
        raise ValueError(f"{what}:\n  {shown}")
