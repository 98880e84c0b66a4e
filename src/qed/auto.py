"""Tell transformers' Auto classes about this model when they are first imported: `import qed` need not import them.

Importing transformers' model code takes longer than importing torch, and who only wants the op never uses it.
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
    # By this table the Trainer knows that labels are to be shifted, where it takes the loss itself (label smoothing).
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["qed"] = "QEDForCausalLM"


AFTER: dict[str, Callable[[], None]] = {
    "transformers.models.auto.configuration_auto": _register_config,
    "transformers.models.auto.modeling_auto": _register_model,
}


class _Then(importlib.abc.Loader):
    """Loads as another loader does, then runs what waits for the module."""

    def __init__(self, loader: importlib.abc.Loader, name: str):
        self.loader, self.name = loader, name

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        AFTER[self.name]()


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in AFTER:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Then(spec.loader, fullname)
                return spec
        return None


def register() -> None:
    """Now for what is imported already, and later for the rest."""
    for name, then in AFTER.items():
        if name in sys.modules:
            then()
    sys.meta_path.insert(0, _Finder())
