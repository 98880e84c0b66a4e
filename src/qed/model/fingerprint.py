"""Everything that a captured step depends on, as one value: as long as it stays the same, the step may be replayed.

A CUDA graph keeps addresses of tensors, and the values that Python numbers had when it was captured. Weights that
change in place are read again by every replay. Every other change has to be noticed: another tensor in a weight's
place, another module, another λ_max, an adapter switched on. `SETTINGS` says which attributes the modules of this
package use; of any other module, such as an adapter, everything counts.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from ..layers import GatedRMSNorm, Mixer, QEDBlock, RMSNorm, ShortConvolution, SwiGLU
from ..layers.routes import BLOCK
from ..routes import AUTO, REFERENCE

if TYPE_CHECKING:
    from .causal_lm import QEDForCausalLM

SETTINGS: dict[type[nn.Module], Any] = {
    Mixer: attrgetter(
        *("impl", "row", "num_heads", "head_dim", "value_head_dim"),
        *("lambda_max", "erase_max", "read_scale", "strength_scale"),
    ),
    RMSNorm: attrgetter("impl", "eps"),
    GatedRMSNorm: attrgetter("impl", "eps", "activation"),
    nn.Embedding: attrgetter("padding_idx", "max_norm", "norm_type"),
    **dict.fromkeys((QEDBlock, ShortConvolution, SwiGLU), attrgetter("impl")),
    **dict.fromkeys((nn.Linear, nn.ModuleList)),
}
_OF_EVERY_MODULE = frozenset(nn.Module().__dict__) - {"training"}
_GLOBAL_HOOKS = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)


def fingerprint(model: QEDForCausalLM) -> tuple[Any, ...] | str:
    """Return what a captured step of a model depends on; or, where no captured step would be right, why not."""
    blocks, device = list(model.model.layers), model.device.type
    mixers = [block._modules.get("mixer") for block in blocks]  # torch's `__getattr__` would be slow
    if any(_GLOBAL_HOOKS):
        return "there are hooks of all modules, which a replay would not call"
    if not all(isinstance(mixer, Mixer) for mixer in mixers):
        return "the state of a softmax layer grows"
    if model.config.num_hidden_layers != len(blocks):
        return f"the configuration asks for {model.config.num_hidden_layers} of the {len(blocks)} layers"
    if any(getattr(mixer, "context", None) is not None for mixer in mixers):
        return "sequences are spread over processes"
    if any(impl != AUTO and BLOCK.wanted(impl) == REFERENCE for impl in {getattr(x, "impl", AUTO) for x in blocks}):
        return "plain torch was asked for"
    # A step does not call these classes but their parts: only their hooks, weights and parts matter.
    shells = {type(model), type(model.model)}
    values: list[Any] = [torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)]
    left: list[Any] = [model]
    tensors: list[Tensor | None] = []
    for module in left:  # the list grows meanwhile
        own, kind = module.__dict__, type(module)
        if own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own:
            return f"a {kind.__name__} has hooks or a forward of its own, which a replay would not call"
        values.append(kind)
        settings = None if kind in shells else SETTINGS.get(kind, _everything)
        if settings is _everything and kind.__module__.startswith("bitsandbytes."):
            return f"a matrix is quantised to a {kind.__name__}, which may wait for the device: it looks for outliers"
        if settings is not None:
            values.append(settings(module))
        tensors += own["_parameters"].values()
        tensors += own["_buffers"].values()
        if own["_modules"]:
            left += [x for x in own["_modules"].values() if x is not None]
    plain = nn.Parameter
    values += [(x.data_ptr(), x.dtype, x.shape, x.stride()) if type(x) is plain else _tensor(x) for x in tensors]
    return tuple(values)


def _tensor(x: Tensor | None) -> Any:
    """Return where a tensor is and how it is read."""
    if x is None:
        return None
    if type(x) is nn.Parameter or type(x) is Tensor:
        return x.data_ptr(), x.dtype, x.shape, x.stride()
    if hasattr(x, "__tensor_flatten__"):  # quantised, or spread over processes: it is made of other tensors
        return type(x), *(_tensor(getattr(x, name)) for name in x.__tensor_flatten__()[0])
    return id(x)


def _everything(module: nn.Module) -> tuple[Any, ...]:
    return tuple((name, _frozen(x)) for name, x in module.__dict__.items() if name not in _OF_EVERY_MODULE)


def _frozen(x: Any) -> Any:
    """Return a value that does not change with x, and equals another only if both say the same."""
    if x is None or isinstance(x, bool | int | float | complex | str | bytes | torch.dtype | torch.device):
        return type(x), x
    if isinstance(x, dict):
        return tuple((_frozen(key), _frozen(value)) for key, value in x.items())
    if isinstance(x, list | tuple):
        return tuple(map(_frozen, x))
    if isinstance(x, set | frozenset):
        return frozenset(map(_frozen, x))
    return _tensor(x) if isinstance(x, Tensor) else id(x)
