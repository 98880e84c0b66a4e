"""The initial values of all parameters, in one place. This also works for a model that was made on the meta device.

| what | value |
|---|---|
| matrices, embeddings | normal, `initializer_range` |
| projections back into the residual stream (o_proj, down_proj) | normal, `initializer_range` / √(2 · layers) |
| norms | 1; biases 0 |
| θ | `theta_init` |
| short convolution, A_log, dt_bias, random directions | as every layer has them (`layers/initialization.py`) |

With `initializer="xavier"` every matrix of a token mixer, o_proj too, is uniform in ± gain · √(6 / (inputs + outputs))
with gain 2^−2.5 instead, as in NVIDIA's release of GDN-2. That release has one matrix for each projection of x where
`in_proj` is one matrix for all, so `outputs` is the number of rows of each projection by itself. Softmax layers, SwiGLU
and embeddings stay as above.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..layers import Mixer, RMSNorm, ShortConvolution
from ..layers.initialization import fill_convolution, fill_directions, fill_log_rate, fill_time_step
from ..layers.projections import is_into_residual
from .config import QEDConfig

XAVIER_GAIN = 2**-2.5


@torch.no_grad()
def initialize(module: nn.Module, config: QEDConfig) -> None:
    """Give the module's own parameters their initial values, unless a checkpoint has filled them. Its children are left
    out, except for a mixer's matrices with "xavier": only the mixer knows which rows belong to which projection."""
    deviation = config.initializer_range
    if is_into_residual(module):
        deviation /= math.sqrt(2 * config.num_hidden_layers)
    if isinstance(module, nn.Linear | nn.Embedding):
        if not _filled(module.weight):
            module.weight.normal_(0.0, deviation)
        if isinstance(module, nn.Linear) and module.bias is not None and not _filled(module.bias):
            module.bias.zero_()
    elif isinstance(module, RMSNorm) and not _filled(module.weight):
        module.weight.fill_(1.0)
    elif isinstance(module, ShortConvolution) and not _filled(module.weight):
        fill_convolution(module.weight)
    elif isinstance(module, Mixer):
        _initialize_mixer(module, config)


def _initialize_mixer(module: Mixer, config: QEDConfig) -> None:
    if config.initializer == "xavier":
        _initialize_projections(module)
    if module.row.decay != "none":
        if not _filled(module.A_log):
            fill_log_rate(module.A_log)
        if not _filled(module.dt_bias):
            fill_time_step(module.dt_bias)
    if module.row.strength and not _filled(module.theta):
        module.theta.fill_(config.theta_init)
    if module.row.direction == "head" and not _filled(module.random_direction):
        fill_directions(module.random_direction)


def _initialize_projections(module: Mixer) -> None:
    """Initialise every projection by itself, with Xavier's uniform distribution."""
    together = [width for width in module.in_proj_parts().values() if width]
    parts = [] if _filled(module.in_proj.weight) else list(module.in_proj.weight.split(together))
    whole = (layer.weight for layer in (module.f_proj, module.g_proj, module.o_proj) if layer is not None)
    for weight in (*parts, *(x for x in whole if not _filled(x))):
        nn.init.xavier_uniform_(weight, gain=XAVIER_GAIN)


def _filled(x: Tensor) -> bool:
    """Return whether a parameter was read from a checkpoint: transformers marks those that were."""
    return bool(getattr(x, "_is_hf_initialized", False))
