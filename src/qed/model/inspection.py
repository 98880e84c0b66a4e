"""The inputs of the recurrent layers, for analysis."""

from __future__ import annotations

import torch
from torch import Tensor

from ..layers import Mixer
from .causal_lm import QEDForCausalLM


@torch.no_grad()
def mixer_inputs(model: QEDForCausalLM, ids: Tensor) -> dict[int, tuple[Mixer, Tensor]]:
    """Return every recurrent layer by its number, with its inputs [B, T, hidden] for tokens `ids` [B, T]."""
    inputs: dict[int, Tensor] = {}
    mixers = {i: block.mixer for i, block in enumerate(model.model.layers) if isinstance(block.mixer, Mixer)}
    hooks = [
        mixer.register_forward_pre_hook(lambda _, args, i=i: inputs.__setitem__(i, args[0]))
        for i, mixer in mixers.items()
    ]
    try:
        with torch.compiler.set_stance("force_eager"):  # compiled blocks would not see the hooks
            model.model(ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return {i: (mixer, inputs[i]) for i, mixer in mixers.items()}
