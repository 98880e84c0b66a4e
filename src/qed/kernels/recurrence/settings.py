"""Launch settings of the recurrence's kernels. Nothing is searched at run time: the first call compiles and runs.

A setting depends on the kernel, the size of a number, the widths of keys and values, and the GPU. The number of states
changes only how many columns of V a program has, and each column's sums stay the same. So results do not depend on what
else is in a batch, except for few long sequences, which are cut into segments.

The settings below were measured on Hopper at heads of 128. Other GPUs get the same ones, with fewer stages where their
shared memory is small; this is the untested default, and `qed doctor` says where it is in use.

What a GPU does better with at some width is in a file of its own, `tuned/sm_<architecture>.json`, as `qed bench --tune`
writes it: changes by kernel and width, such as

    {"settings": {"chunk_terms @ 64x64": {"BK": 32, "num_warps": 4}}}

A width is that of the tiles, a power of two, so heads of 60 get the settings of 64. Such a row counts for 16-bit
numbers, which it was measured with, and for a kernel that carries a state only where its programs are enough for the
GPU. A row without a width (`chunk_terms`) counts for all.

One setting must not be tried again with Triton 3.6 on Hopper: `chunk_gradients` with tiles 32 wide on 4 warps is
faster, but wrong in some runs (gradients off by a factor of thirty, or an illegal access). Every setting here passes
the tests there.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, wraps
from pathlib import Path
from typing import TypeVar

import torch

from ..launching import power_of_two

CHUNK = 64


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What is known of GPUs with one compute capability."""

    shared: int  # KiB of shared memory that a program may have
    measured: bool = False  # whether the settings were measured there


HOPPER = 90
ARCHITECTURES = {
    80: Architecture(shared=163),
    86: Architecture(shared=99),
    87: Architecture(shared=163),
    89: Architecture(shared=99),
    HOPPER: Architecture(shared=227, measured=True),
    100: Architecture(shared=227),
    103: Architecture(shared=227),
    120: Architecture(shared=99),
}
UNTESTED = Architecture(shared=99)  # the default for every other one
TUNED = Path(__file__).parent / "tuned"  # one file for each architecture, such as sm_100.json
Settings = dict[str, dict[str, int]]  # changes by kernel, or by kernel and width (`at_width`)
CARRY_A_STATE = ("chunk_states", "state_gradients")
Function = TypeVar("Function", bound=Callable[..., object])
_in_use: Settings | None = None  # what `use_settings` was given
_depending: list[Callable[[], None]] = []  # what forgets results that depend on that
MULTIPROCESSORS = 132  # of the GPU that the settings were measured on


def kept_by_settings(function: Function) -> Function:
    """Return `function` with its results kept until other settings are chosen."""
    kept = lru_cache(maxsize=1024)(function)
    _depending.append(kept.cache_clear)
    return wraps(function)(kept)  # type: ignore[return-value]


@dataclass(frozen=True, kw_only=True)
class Config:
    """A launch setting. BK and BV are the columns of keys and of values that one program works on; `maxnreg` is the
    most registers that a thread may have, or 0 for as many as the compiler takes."""

    BK: int
    BV: int
    num_warps: int
    num_stages: int
    maxnreg: int = 0

    @property
    def options(self) -> dict[str, int]:
        """What Triton is told at a launch."""
        limit = {"maxnreg": self.maxnreg} if self.maxnreg else {}
        return {"num_warps": self.num_warps, "num_stages": self.num_stages} | limit


def at_width(kernel: str, K: int, V: int) -> str:
    """Return the name of a kernel's settings at a width.

    Args:
        kernel: its name.
        K, V: widths of keys and values.
    """
    return f"{kernel} @ {product_tile(K)}x{product_tile(V)}"


def product_tile(width: int) -> int:
    """Return the width of the smallest tile of a matrix product that holds `width` columns."""
    return max(16, power_of_two(width))


@lru_cache
def architecture(device: torch.device) -> int:
    """Return the compute capability as one number, such as 90. Triton's interpreter gets that of the GPU that the
    settings were measured on."""
    if device.type != "cuda":
        return HOPPER
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors a device has: so many programs that carry a state run at once. Triton's
    interpreter gets as many as the GPU has that the settings were measured on."""
    if device.type != "cuda":
        return MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@kept_by_settings
def config(
    kernel: str,
    bytes_each: int,
    K: int,
    V: int,
    lanes: int = 0,
    architecture: int = HOPPER,
    multiprocessors: int = MULTIPROCESSORS,
) -> Config:
    """Return the setting of one kernel.

    Args:
        kernel: its name, with ", cut" behind it for chunks that are cut.
        bytes_each: size of one input number.
        K, V: widths of keys and values.
        lanes: how many states there are.
        architecture: compute capability as one number.
        multiprocessors: how many multiprocessors the GPU has.
    """
    K, V = product_tile(K), product_tile(V)
    shared = ARCHITECTURES.get(architecture, UNTESTED).shared
    setting = _checked_in(kernel, bytes_each == 4, K, V, 2 * lanes > multiprocessors, shared)
    changes = replacements(architecture)
    setting = replace(setting, **changes.get(kernel, {}))
    if bytes_each == 4:
        return setting
    tuned = replace(setting, **changes.get(at_width(kernel, K, V), {}))
    enough = kernel not in CARRY_A_STATE or 2 * lanes * -(-V // tuned.BV) > multiprocessors
    return tuned if enough else setting


def origin(architecture: int) -> str:
    """Return in words where the settings for GPUs of this compute capability come from."""
    if _in_use is not None:
        return "chosen with use_settings"
    if (TUNED / f"sm_{architecture}.json").exists():
        return f"tuned for this GPU (tuned/sm_{architecture}.json)"
    if ARCHITECTURES.get(architecture, UNTESTED).measured:
        return f"measured on GPUs with compute capability sm_{architecture}"
    return (
        f"not measured on this GPU (sm_{architecture}); those in use are the untested default, "
        "and `qed bench --tune` searches for better ones"
    )


def _checked_in(kernel: str, wide: bool, K: int, V: int, many: bool, shared: int) -> Config:
    if kernel == "chunk_terms":
        return Config(BK=min(K, 32 if wide else 64), BV=0, num_warps=4, num_stages=1)
    if kernel == "chunk_terms, cut":  # it needs more registers
        return Config(BK=min(K, 16 if wide else 32), BV=0, num_warps=4, num_stages=1)
    if kernel in ("chunk_states", "state_gradients"):
        if wide or K > 128:  # two stages would need too much memory
            return Config(BK=K, BV=min(V, 16), num_warps=4, num_stages=1)
        if V >= 128 and many:
            return Config(BK=K, BV=128, num_warps=8, num_stages=2)
        return Config(BK=K, BV=min(V, 64), num_warps=4, num_stages=3 if shared > 200 else 2)
    if kernel == "segment_maps":
        return Config(BK=K, BV=min(V, 16 if wide else 64), num_warps=4, num_stages=1 if wide else 2)
    if kernel == "segment_starts":
        roomy = shared > 210 and not wide
        return Config(BK=K, BV=min(V, 16), num_warps=8 if roomy else 4, num_stages=3 if roomy else 1)
    if kernel == "pair_gradients":
        return Config(BK=0, BV=min(V, 32 if wide else 64), num_warps=4, num_stages=1)
    if kernel in ("chunk_gradients", "chunk_gradients, cut"):  # BV is all of V, so that the start state is read once
        BK, warps = (32, 8) if wide or V > 128 else (32 if kernel.endswith("cut") else 64, 4)
        if wide and V > 128 and shared < 200:
            BK = 16  # which takes 120 KiB, and 32 columns 176
        return Config(BK=min(K, BK), BV=V, num_warps=warps, num_stages=1)
    if kernel == "decode_step":
        return Config(BK=K, BV=min(V, 32), num_warps=2, num_stages=1)
    raise KeyError(kernel)


def use_settings(settings: Path | Settings | None) -> None:
    """Launch kernels with other settings, such as those tuned on this machine, from now on and in this process.

    Args:
        settings: a file that `qed bench --tune` wrote, its settings by kernel, or None for those of the package.
    """
    global _in_use
    _in_use = read_settings(settings) if isinstance(settings, Path) else settings
    for forget in _depending:
        forget()


def read_settings(file: Path) -> Settings:
    """Return the settings by kernel of a file that `qed bench --tune` wrote."""
    try:
        settings = json.loads(file.read_text())["settings"]
        names = set(Config.__dataclass_fields__)
        if not all(set(x) <= names and all(type(n) is int for n in x.values()) for x in settings.values()):
            raise TypeError(f"expected whole numbers for {', '.join(sorted(names))}")
        return dict(settings)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"settings: expected a file of `qed bench --tune`, got {file}: {error}") from error


def replacements(architecture: int) -> Settings:
    """Return the settings in use instead of those written here: what `use_settings` was given, or else the package's
    own file for this architecture."""
    if _in_use is not None:
        return _in_use
    file = TUNED / f"sm_{architecture}.json"
    return read_settings(file) if file.exists() else {}
