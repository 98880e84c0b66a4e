"""Checked-in launch settings. No search at run time: the first call compiles four kernels and runs.

A setting depends on the kernel, the width of a number and the widths of keys and values. With the number of states only
the columns of V change that a program has, and each column's sums are the same: but for few long sequences, which are
cut into segments, results do not depend on what else is in a batch.

Not to be tried again with Triton 3.6 on Hopper: `chunk_gradients` with tiles 32 wide on 4 warps is faster, and wrong
on some runs (gradients off by a factor of thirty, or an illegal access). Every setting here passes the tests there.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
import triton

from ..launching import power_of_two

CHUNK = 64
SHARED = {
    80: 163,
    86: 99,
    87: 163,
    89: 99,
    90: 227,
    100: 227,
    103: 227,
    120: 99,
}  # KiB a program may have, by architecture
SLOTS = 132  # multiprocessors of a large GPU: how many programs that carry a state run at once


@dataclass(frozen=True, kw_only=True)
class KnownBad:
    """Architectures (compute capability) and Triton versions, both from … up to but not including …"""

    architectures: tuple[tuple[int, int], tuple[int, int]]
    versions: tuple[tuple[int, int, int], tuple[int, int, int]]
    why: str


KNOWN_BAD = (
    KnownBad(
        architectures=((0, 0), (8, 0)),
        versions=((0, 0, 0), (99, 0, 0)),
        why="the matrix units lack bfloat16 before compute capability 8.0",
    ),
    KnownBad(
        architectures=((0, 0), (99, 0)),
        versions=((0, 0, 0), (3, 6, 0)),
        why="the kernels are written for Triton 3.6 and newer",
    ),
)


def known_bad(architecture: tuple[int, int], version: str) -> str | None:
    """Why the kernels must not run with this pair, if they must not."""
    numbers = (*(int("".join(filter(str.isdigit, part)) or 0) for part in version.split(".")[:3]), 0, 0)[:3]
    for bad in KNOWN_BAD:
        (first, end), (oldest, fixed) = bad.architectures, bad.versions
        if first <= architecture < end and oldest <= numbers < fixed:
            return f"sm_{architecture[0]}{architecture[1]} with Triton {version}: {bad.why}"
    return None


@lru_cache
def refuse_known_bad(device: torch.device) -> None:
    """Raise where this device and the installed Triton are a known-bad pair; the interpreter has no architecture."""
    if device.type != "cuda":
        return
    why = known_bad(torch.cuda.get_device_capability(device), triton.__version__)
    if why is not None:
        raise RuntimeError(f"impl='triton' refuses to run: {why}. Use impl='chunkwise', or another version of Triton.")


@dataclass(frozen=True, kw_only=True)
class Config:
    """BK and BV: columns of keys and values one program works on."""

    BK: int
    BV: int
    num_warps: int
    num_stages: int


def product_tile(width: int) -> int:
    """The smallest tile a matrix product takes that holds `width` columns."""
    return max(16, power_of_two(width))


@lru_cache
def architecture(device: torch.device) -> int:
    """Compute capability as one number; the interpreter takes the settings of the GPU they were measured on."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@lru_cache
def config(kernel: str, bytes_each: int, K: int, V: int, lanes: int = 0, architecture: int = 90) -> Config:
    """The setting of one kernel; `bytes_each` is the size of one input number, `lanes` how many states there are."""
    K, V = product_tile(K), product_tile(V)
    found = _checked_in(kernel, bytes_each == 4, K, V, lanes, SHARED.get(architecture, min(SHARED.values())))
    return replace(found, **_overrides().get(kernel, {}))


def _checked_in(kernel: str, wide: bool, K: int, V: int, lanes: int, shared: int) -> Config:
    if kernel == "chunk_terms":
        return Config(BK=min(K, 32 if wide else 64), BV=0, num_warps=4, num_stages=1)
    if kernel == "chunk_terms, cut":  # more to keep in registers
        return Config(BK=min(K, 16 if wide else 32), BV=0, num_warps=4, num_stages=1)
    if kernel in ("chunk_states", "state_gradients"):
        if wide or K > 128:  # two stages are too much memory
            return Config(BK=K, BV=min(V, 16), num_warps=4, num_stages=1)
        if V >= 128 and 2 * lanes > SLOTS:
            return Config(BK=K, BV=128, num_warps=8, num_stages=2)
        return Config(BK=K, BV=min(V, 64), num_warps=4, num_stages=3 if shared > 200 else 2)
    if kernel == "segment_maps":
        return Config(BK=K, BV=min(V, 16 if wide else 64), num_warps=4, num_stages=1 if wide else 2)
    if kernel == "segment_starts":
        roomy = shared > 210 and not wide
        return Config(BK=K, BV=min(V, 16), num_warps=8 if roomy else 4, num_stages=3 if roomy else 1)
    if kernel == "pair_gradients":
        return Config(BK=0, BV=min(V, 32 if wide else 64), num_warps=4, num_stages=1)
    if kernel in ("chunk_gradients", "chunk_gradients, cut"):  # BV is all of V: the start state is read once
        BK, warps = (32, 8) if wide or V > 128 else (32 if kernel.endswith("cut") else 64, 4)
        return Config(BK=min(K, BK), BV=V, num_warps=warps, num_stages=1)
    if kernel == "decode_step":
        return Config(BK=K, BV=min(V, 32), num_warps=2, num_stages=1)
    raise KeyError(kernel)


@lru_cache
def _overrides() -> dict[str, dict[str, int]]:
    """Settings found on this machine (`qed bench --tune`), from the file that QED_SETTINGS names."""
    name = os.environ.get("QED_SETTINGS")
    if not name:
        return {}
    try:
        found = json.loads(Path(name).read_text())["settings"]
        fields = set(Config.__dataclass_fields__)
        if not all(set(x) <= fields and all(type(n) is int for n in x.values()) for x in found.values()):
            raise TypeError(f"expected whole numbers for {', '.join(sorted(fields))}")
        return dict(found)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RuntimeError(f"QED_SETTINGS: expected a file of `qed bench --tune`, got {name}: {error}") from error
