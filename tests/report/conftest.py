"""The runs that pages are made of are those of the analysis's tests."""

from tests.analysis.conftest import base

__all__ = ["base"]
