"""Layers in plain torch, states in and out: usable in any model."""

from .attention import Attention, AttentionState
from .convolution import ShortConvolution, short_convolution
from .linear import ResidualProjection
from .mixer import Mixer, MixerState
from .mlp import SwiGLU
from .norm import GatedRMSNorm, RMSNorm
from .sequences import Sequences

__all__ = [
    "Attention",
    "AttentionState",
    "GatedRMSNorm",
    "Mixer",
    "MixerState",
    "RMSNorm",
    "ResidualProjection",
    "Sequences",
    "ShortConvolution",
    "SwiGLU",
    "short_convolution",
]
