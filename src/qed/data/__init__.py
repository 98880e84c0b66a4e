"""From raw text to batches: sources of documents, tokenizers, token shards, and a loader that is a pure function."""

from .loader import Loader, ReadAhead
from .shards import TokenShards

__all__ = ["Loader", "ReadAhead", "TokenShards"]
