"""Batches are a pure function of seed and step, whole whatever number of processes share them."""

from pathlib import Path
from threading import Event

import numpy as np
import pytest
import torch
from rich.console import Console

from qed.data import Loader, ReadAhead, TokenShards
from qed.data.loader import permuted
from qed.data.prepare import prepare


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> TokenShards:
    folder = tmp_path_factory.mktemp("corpus")
    options = {"tokenizer": "bpe:300", "shard_tokens": 5000, "console": Console(quiet=True)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qed.data.prepare.BLOCK", 5000)
        prepare("synthetic:150", out=folder, **options)
    return TokenShards(folder)


@pytest.mark.parametrize("count", [1, 2, 3, 10, 64, 1000])
def test_an_epoch_is_a_permutation(count: int) -> None:
    order = [permuted(i, count, "0/0") for i in range(count)]
    assert sorted(order) == list(range(count))
    if count > 9:
        assert order != sorted(order)
        assert order != [permuted(i, count, "0/1") for i in range(count)]


def test_reading_across_shards(shards: TokenShards) -> None:
    assert len(shards.parts) > 2
    whole = np.concatenate([np.asarray(part) for part in shards.parts])
    for start, count in ((0, 10), (len(shards.parts[0]) - 3, 9), (10, 12000), (len(shards) - 1, 1), (5, 0)):
        assert np.array_equal(shards.read(start, count), whole[start : start + count])
    with pytest.raises(IndexError):
        shards.read(len(shards) - 3, 4)


def test_an_epoch_reads_every_window_once(shards: TokenShards) -> None:
    loader = Loader(shards, tokens=50, batch=1)
    seen = [loader.step(i)[0] for i in range(loader.windows)]
    starts = sorted(loader.window(i) for i in range(loader.windows))
    assert starts == list(range(loader.windows))
    assert all(torch.equal(x, torch.from_numpy(shards.read(loader.window(i) * 50, 51))) for i, x in enumerate(seen))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_processes_share_one_batch(world: int, shards: TokenShards) -> None:
    whole = Loader(shards, tokens=30, batch=8, seed=3)
    parts = [Loader(shards, tokens=30, batch=8, seed=3, rank=rank, world=world) for rank in range(world)]
    for step in (0, 7, 1000):
        assert torch.equal(torch.cat([part.step(step) for part in parts]), whole.step(step))


def test_seeds_and_epochs_differ(shards: TokenShards) -> None:
    one, other = (Loader(shards, tokens=30, batch=8, seed=seed) for seed in (0, 1))
    assert not torch.equal(one.step(0), other.step(0))
    assert [one.window(i) for i in range(20)] != [one.window(i + one.windows) for i in range(20)]


def test_the_next_batch_is_read_before_it_is_asked_for(shards: TokenShards, monkeypatch: pytest.MonkeyPatch) -> None:
    loader, read = Loader(shards, tokens=30, batch=8), {step: Event() for step in range(12)}
    plain = loader.step

    def step(number: int) -> torch.Tensor:
        read[number].set()
        return plain(number)

    monkeypatch.setattr(loader, "step", step)
    ahead = ReadAhead(loader, "cpu")
    for number in (0, 1, 2, 9, 10, 4):
        assert torch.equal(ahead.step(number), plain(number))
        assert read[number + 1].wait(10)
    assert not read[7].is_set()


def test_what_cannot_be_loaded(shards: TokenShards, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="batch: expected a multiple of 3 processes, got 8"):
        Loader(shards, tokens=30, batch=8, world=3)
    with pytest.raises(ValueError, match="corpus: expected more than 10000000 tokens for one window"):
        Loader(shards, tokens=10_000_000, batch=1)
    with pytest.raises(ValueError, match="expected what `qed prepare` finished"):
        TokenShards(tmp_path)
