"""The initial values of the parameters that only this package has, filled in when a layer is made.

| what | value |
|---|---|
| short convolution | uniform in ± 1/√taps |
| A_log | log of uniform in [1, 16], one per head |
| dt_bias | softplus⁻¹ of log-uniform in [1e-3, 0.1] |
| θ | −2, so that λ begins at 0.12 of its bound |
| random direction of QED-rand | a unit vector per head |

Matrices begin as torch's `nn.Linear` does; `qed.model.initialization` gives those of a whole model other values.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

THETA = -2.0


@torch.no_grad()
def fill_convolution(weight: Tensor) -> None:
    """Fill the taps [channels, width] of a short convolution."""
    bound = weight.shape[1] ** -0.5
    weight.uniform_(-bound, bound)


@torch.no_grad()
def fill_log_rate(A_log: Tensor) -> None:
    """Fill the logarithm of the rate of decay [heads]."""
    A_log.uniform_(1.0, 16.0).log_()


@torch.no_grad()
def fill_time_step(dt_bias: Tensor) -> None:
    """Fill the bias from which the time step of the decay is made by softplus."""
    dt = torch.empty_like(dt_bias).uniform_(math.log(1e-3), math.log(0.1)).exp_()
    dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # softplus⁻¹


@torch.no_grad()
def fill_directions(directions: Tensor) -> None:
    """Fill a random unit vector for each head [heads, head_dim]."""
    directions.normal_()
    directions /= directions.norm(dim=-1, keepdim=True)


def filled(x: Tensor, fill: Callable[[Tensor], None]) -> Tensor:
    """Fill a new tensor and return it. The random numbers of a seed stay those that they were: a model, which draws its
    values after its layers are made, has the same ones with and without this."""
    with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
        fill(x)
    return x
