"""What the model computes, in plain torch: layers with states in and out, usable in any model.

`functions.py` has the definitions, `routes.py` says when something faster is used instead.
"""

from .attention import Attention, AttentionState
from .block import QEDBlock
from .convolution import ShortConvolution, short_convolution
from .mixer import Mixer, MixerState
from .mlp import SwiGLU
from .norm import GatedRMSNorm, RMSNorm
from .rewind import RewindState
from .routes import set_impl
from .sequences import Sequences

__all__ = [
    "Attention",
    "AttentionState",
    "GatedRMSNorm",
    "Mixer",
    "MixerState",
    "QEDBlock",
    "RMSNorm",
    "RewindState",
    "Sequences",
    "ShortConvolution",
    "SwiGLU",
    "set_impl",
    "short_convolution",
]
