"""Marks of parameters."""

from typing import Any

import pytest


def slow(*values: Any) -> list[Any]:
    """Parameters whose tests `make test` leaves out and `make test-all` runs."""
    return [pytest.param(x, marks=pytest.mark.slow) for x in values]
