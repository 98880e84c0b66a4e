"""From raw text to batches: sources of documents, tokenizers, token shards, and a loader that is a pure function."""

from .generated import Generated
from .loader import Loader, ReadAhead
from .shards import TokenShards

__all__ = ["Generated", "Loader", "ReadAhead", "TokenShards"]
