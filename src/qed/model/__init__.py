"""The configuration, the causal language model and its cache, as classes of transformers."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cache import QEDCache
    from .causal_lm import QEDForCausalLM, QEDModel
    from .config import QEDConfig
    from .decoding import stream
    from .sampling import Sampling

_WHERE = {"QEDCache": "cache", "QEDConfig": "config", "QEDForCausalLM": "causal_lm", "QEDModel": "causal_lm"}
_WHERE |= {"Sampling": "sampling", "stream": "decoding"}

__all__ = ["QEDCache", "QEDConfig", "QEDForCausalLM", "QEDModel", "Sampling", "stream"]


def __getattr__(name: str) -> Any:
    """Import what is here one at a time: the configuration must not import the model, which transformers may be in the
    middle of importing."""
    if name not in _WHERE:
        raise AttributeError(f"module 'qed.model' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_WHERE[name]}", __name__), name)
