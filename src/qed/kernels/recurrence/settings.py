"""Launch settings of the recurrence's kernels. Nothing is searched at run time: the first call compiles and runs.

A setting depends on the kernel, the size of a number and the widths of keys and values. The number of states changes
only how many columns of V a program has, and each column's sums stay the same. So results do not depend on what else is
in a batch, except for few long sequences, which are cut into segments.

One setting must not be tried again with Triton 3.6 on Hopper: `chunk_gradients` with tiles 32 wide on 4 warps is
faster, but wrong in some runs (gradients off by a factor of thirty, or an illegal access). Every setting here passes
the tests there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch

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
}  # KiB of shared memory that a program may have, by architecture
# Settings for other GPUs: one file for each architecture, such as sm_100.json, as `qed bench --tune` writes it.
TUNED = Path(__file__).parent / "tuned"
Settings = dict[str, dict[str, int]]  # changes by kernel
_in_use: Settings | None = None  # what `use_settings` was given
SLOTS = 132  # multiprocessors of a large GPU: how many programs that carry a state run at once


@dataclass(frozen=True, kw_only=True)
class Config:
    """A launch setting. BK and BV are the columns of keys and of values that one program works on."""

    BK: int
    BV: int
    num_warps: int
    num_stages: int


def product_tile(width: int) -> int:
    """Return the width of the smallest tile of a matrix product that holds `width` columns."""
    return max(16, power_of_two(width))


@lru_cache
def architecture(device: torch.device) -> int:
    """Return the compute capability as one number, such as 90. Triton's interpreter gets 90 too, the architecture that
    the settings were measured on."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@lru_cache
def config(kernel: str, bytes_each: int, K: int, V: int, lanes: int = 0, architecture: int = 90) -> Config:
    """Return the setting of one kernel.

    Args:
        kernel: its name, with ", cut" behind it for chunks that are cut.
        bytes_each: size of one input number.
        K, V: widths of keys and values.
        lanes: how many states there are.
        architecture: compute capability as one number.
    """
    K, V = product_tile(K), product_tile(V)
    setting = _checked_in(kernel, bytes_each == 4, K, V, lanes, SHARED.get(architecture, min(SHARED.values())))
    return replace(setting, **_replacements(architecture).get(kernel, {}))


def _checked_in(kernel: str, wide: bool, K: int, V: int, lanes: int, shared: int) -> Config:
    if kernel == "chunk_terms":
        return Config(BK=min(K, 32 if wide else 64), BV=0, num_warps=4, num_stages=1)
    if kernel == "chunk_terms, cut":  # it needs more registers
        return Config(BK=min(K, 16 if wide else 32), BV=0, num_warps=4, num_stages=1)
    if kernel in ("chunk_states", "state_gradients"):
        if wide or K > 128:  # two stages would need too much memory
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
    if kernel in ("chunk_gradients", "chunk_gradients, cut"):  # BV is all of V, so that the start state is read once
        BK, warps = (32, 8) if wide or V > 128 else (32 if kernel.endswith("cut") else 64, 4)
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
    config.cache_clear()


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


def _replacements(architecture: int) -> Settings:
    """Return the settings in use instead of those written here: what `use_settings` was given, or else the package's
    own file for this architecture."""
    if _in_use is not None:
        return _in_use
    file = TUNED / f"sm_{architecture}.json"
    return read_settings(file) if file.exists() else {}
