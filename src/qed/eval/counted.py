"""Right and wrong answers of a measured task, kept one by one: a bit each, as text that JSON can hold."""

from __future__ import annotations

import base64
import binascii
import zlib

import numpy as np


def packed_bits(right: np.ndarray) -> str:
    """Whether each answer is right, a flat array of bool, as text."""
    return base64.b64encode(zlib.compress(np.packbits(right.ravel()).tobytes(), 9)).decode()


def unpacked_bits(text: object, count: int) -> np.ndarray:
    """The array that `packed_bits` was given, of so many answers; ValueError where the text is something else."""
    try:
        bits = np.frombuffer(zlib.decompress(base64.b64decode(str(text), validate=True)), np.uint8)
    except (binascii.Error, ValueError, zlib.error) as error:
        raise ValueError(f"expected answers as packed bits, got {text!r:.60} ({error})") from error
    if len(bits) != -(-count // 8):
        raise ValueError(f"expected {count} answers, got {8 * len(bits)}")
    return np.unpackbits(bits, count=count).astype(bool)
