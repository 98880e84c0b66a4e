"""Settings: they compile and fit, and known-bad pairs of architecture and Triton are refused by name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qed.kernels.recurrence import memory, settings
from qed.kernels.recurrence.memory import Segments
from qed.kernels.recurrence.settings import CHUNK, config
from qed.routes import known_bad


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "3.9.0", "3.10.0+git1"])
def test_supported_pairs(version: str) -> None:
    assert known_bad((9, 0), version) is None


def test_known_bad_pairs_are_named() -> None:
    assert "sm_90 with Triton 3.5.1" in str(known_bad((9, 0), "3.5.1"))
    assert "sm_75 with Triton 3.6.0" in str(known_bad((7, 5), "3.6.0"))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("width", [1, 16, 60, 64, 128, 200, 256])
def test_tiles_fit_products_and_cover_the_state(width: int, size: int) -> None:
    """Matrix units take no fewer than 16 columns; a state's rows are all in one program."""
    for kernel in ("chunk_terms", "chunk_states", "state_gradients", "pair_gradients", "chunk_gradients"):
        setting = config(kernel, size, width, width, lanes=192)
        assert all(tile == 0 or (tile >= 16 and tile & (tile - 1) == 0) for tile in (setting.BK, setting.BV))
        if kernel in ("chunk_states", "state_gradients"):
            assert width <= setting.BK
    assert CHUNK % 16 == 0


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "width"), [(90, 128), (90, 256), (80, 128), (89, 128), (100, 128), (120, 128)])
def test_kernels_compile_without_a_gpu(arch: int, width: int) -> None:
    """And fit the shared memory of each GPU. In a process of its own: here Triton may be the interpreter."""
    script = Path(__file__).parents[3] / "benchmarks" / "registers.py"
    without = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    unasked = "error:TRITON_DEFAULT_FP_FUSION"  # what Triton says of a kernel that does not ask for fused multiply-add
    all_of_it = (arch, width) == (90, 128)
    command = [sys.executable, "-W", unasked, str(script), "--arch", str(arch), "--width", str(width)]
    command += [] if all_of_it else ["--shipped"]
    done = subprocess.run(command, env=without, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for kernel in ("chunk_terms, cut", "chunk_states", "state_gradients", "pair_gradients", "chunk_gradients, cut"):
        assert kernel in done.stdout
    for kernel in ("forward_kernel", "backward_kernel", "operands_kernel", "norm_kernel", "product_kernel"):
        assert kernel in done.stdout
    for kernel in ("decode_step", "mixer_kernel", "vector_kernel", *(["chunk_table"] if all_of_it else [])):
        assert kernel in done.stdout
    assert ("chunk_states, maps" in done.stdout) == ("segment_starts" in done.stdout) == (width <= 128)


@pytest.mark.parametrize("number", [1, 24, 66, 67, 192])
def test_settings_follow_the_number_of_multiprocessors(number: int) -> None:
    """A program has more columns of V only where there are enough states for a GPU of this size either way."""
    for multiprocessors in (48, 82, 132, 148):
        setting = config("chunk_states", 2, 128, 128, number, 90, multiprocessors)
        assert (128 if 2 * number > multiprocessors else 64) == setting.BV


def test_sequences_are_cut_by_the_number_of_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sequence with six heads gets as many segments as fill the GPU."""
    q = torch.empty(1, 2**17, 6, 128, device="meta")
    for multiprocessors, segments in ((20, 1), (24, 4), (48, 8), (108, 18), (132, 22)):
        monkeypatch.setattr(memory, "multiprocessors", lambda _, n=multiprocessors: n)
        found = Segments.of(q, None)
        assert found.each == segments
        assert found.lanes <= max(multiprocessors, 6)


@pytest.mark.parametrize("architecture", [75, 80, 89, 100, 120, 130])
def test_where_nothing_was_measured_the_default_is_in_use(architecture: int) -> None:
    """With no more stages than a smaller shared memory holds."""
    assert "not measured on this GPU" in settings.origin(architecture)
    shared = settings.ARCHITECTURES.get(architecture, settings.UNTESTED).shared
    stages = config("chunk_states", 2, 128, 128, 1, architecture).num_stages
    assert stages == (3 if shared == 227 else 2)


def test_hopper_was_measured() -> None:
    assert "not measured" not in settings.origin(90)


def block_of_keys() -> int:
    return settings.config("chunk_terms", 2, 128, 128).BK


def test_found_settings_are_used(tmp_path: Path) -> None:
    usual, file = block_of_keys(), tmp_path / "settings.json"
    file.write_text('{"settings": {"chunk_terms": {"BK": 16}}}')
    try:
        settings.use_settings(file)
        assert block_of_keys() == 16 != usual
        assert settings.origin(90) == "chosen with use_settings"
    finally:
        settings.use_settings(None)
    assert block_of_keys() == usual


def test_settings_for_another_gpu_are_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "TUNED", tmp_path)
    (tmp_path / "sm_100.json").write_text('{"settings": {"chunk_terms": {"num_warps": 8}}}')
    settings.use_settings(None)
    assert "not measured" not in settings.origin(100)
    assert settings.config("chunk_terms", 2, 128, 128, architecture=100).num_warps == 8
    assert settings.config("chunk_terms", 2, 128, 128, architecture=90).num_warps == 4


def test_a_width_has_settings_of_its_own() -> None:
    """For 16-bit numbers, and with a state to carry only where there are programs enough for the GPU."""
    rows = {"chunk_terms @ 64x64": {"BK": 32, "maxnreg": 168}, "chunk_states @ 256x256": {"BV": 64, "num_warps": 8}}
    usual = [config("chunk_terms", 4, 64, 64), config("chunk_terms", 2, 128, 128), config("chunk_states", 2, 256, 256)]
    try:
        settings.use_settings(rows)
        assert config("chunk_terms", 2, 60, 64).options == {"num_warps": 4, "num_stages": 1, "maxnreg": 168}
        found = [config("chunk_terms", 4, 64, 64), config("chunk_terms", 2, 128, 128)]
        assert [*found, config("chunk_states", 2, 256, 256, lanes=16)] == usual
        assert config("chunk_states", 2, 256, 256, lanes=17).BV == 64
    finally:
        settings.use_settings(None)


@pytest.mark.parametrize("text", ["", "{}", '{"settings": {"chunk_terms": {"BK": "16"}}}', '{"settings": [1]}'])
def test_a_bad_settings_file_is_named(text: str, tmp_path: Path) -> None:
    usual, file = block_of_keys(), tmp_path / "settings.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=f"expected a file of `qed bench --tune`, got {file}"):
        settings.use_settings(file)
    assert block_of_keys() == usual
