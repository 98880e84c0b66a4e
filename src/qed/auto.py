"""Registers this model with transformers' Auto classes, and its matrices with PEFT, as soon as they are imported.

Importing transformers' model code takes longer than importing torch, and code that only wants the op never uses it. So
`import qed` imports none of these: it registers the model with those that are already imported, and installs an import
hook that registers it with the others right after something else imports them.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


def _register_config() -> None:
    from transformers.models.auto.configuration_auto import AutoConfig

    from .model.config import QEDConfig

    AutoConfig.register("qed", QEDConfig, exist_ok=True)


def _register_model() -> None:
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        AutoModel,
        AutoModelForCausalLM,
    )

    from .model.causal_lm import QEDForCausalLM, QEDModel
    from .model.config import QEDConfig

    AutoModel.register(QEDConfig, QEDModel, exist_ok=True)
    AutoModelForCausalLM.register(QEDConfig, QEDForCausalLM, exist_ok=True)
    # With label smoothing the Trainer computes the loss itself; this table tells it that labels have to be shifted.
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["qed"] = "QEDForCausalLM"


# What an adapter changes unless its configuration names modules: the matrices of every token mixer that read from the
# residual stream or lead back into it. `in_proj` and `o_proj` are a recurrent layer's, the others those of attention.
ADAPTED = ["in_proj", "q_proj", "k_proj", "v_proj", "o_proj"]


def _register_adapted_modules() -> None:
    from peft.utils import constants

    like_lora = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING["llama"]
    for name, modules in vars(constants).items():
        # PEFT has a table for every method. Those that adapt other parts of a model, such as its norms, are left alone.
        if name.endswith("_TARGET_MODULES_MAPPING") and modules.get("llama") == like_lora:
            modules["qed"] = list(ADAPTED)


REGISTRATIONS: dict[str, Callable[[], None]] = {
    "transformers.models.auto.configuration_auto": _register_config,
    "transformers.models.auto.modeling_auto": _register_model,
    "peft.utils.constants": _register_adapted_modules,
}


class _RegisteringLoader(importlib.abc.Loader):
    """Loads a module with another loader, then registers this model with it."""

    def __init__(self, loader: importlib.abc.Loader, name: str):
        self.loader, self.name = loader, name

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        REGISTRATIONS[self.name]()


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of `REGISTRATIONS` as the other finders do, and wraps their loaders."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in REGISTRATIONS:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _RegisteringLoader(spec.loader, fullname)
                return spec
        return None


def register() -> None:
    """Register this model with all of `REGISTRATIONS`, now or, where they are not imported yet, when they are."""
    for name, register_with in REGISTRATIONS.items():
        if name in sys.modules:
            register_with()
    sys.meta_path.insert(0, _Finder())
