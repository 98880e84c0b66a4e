"""The sigmoid and SiLU in few instructions, for kernels that have little else to do."""

import triton
import triton.language as tl

from .recurrence.tiles import LOG2_E


@triton.jit
def exp(x):
    """exp(x) with a relative error of |x| · 6e-8 at most; it is 0 below exp(−87)."""
    return tl.exp2(x * LOG2_E)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(−x)). A GPU takes eight instructions for a division, and one for 1 / √."""
    r = tl.rsqrt(1.0 + exp(-x))
    return r * r


@triton.jit
def silu(z):
    """SiLU: z times its sigmoid."""
    return z * sigmoid(z)


@triton.jit
def silu_gradient(z, d):
    """The gradient of z, from that of silu(z)."""
    s = sigmoid(z)
    return d * s * (1.0 + z * (1.0 - s))
