"""A projection back into the residual stream: a matrix like others, known by its class because it starts smaller."""

from torch import nn


class ResidualProjection(nn.Linear):
    pass
