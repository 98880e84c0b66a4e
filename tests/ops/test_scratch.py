"""Buffers that are handed out again, to one user at a time."""

import threading

import torch

from qed.ops import erase_write
from qed.ops.scratch import Scratch
from qed.testing import Case, run

CPU = torch.device("cpu")


def test_the_same_name_is_the_same_memory() -> None:
    scratch = Scratch(CPU, torch.float32)
    first = scratch("x", 4, 8)
    assert scratch("x", 2, 3).data_ptr() == first.data_ptr()
    assert scratch("y", 4, 8).data_ptr() != first.data_ptr()
    assert scratch("x", 9, 9).shape == (9, 9)


def test_threads_do_not_share() -> None:
    """Four threads at once, each with its own problem, all get what they get alone."""
    inputs = [Case(tokens=200, seed=seed).inputs(torch.float32) for seed in range(4)]
    alone = [run(x, impl="chunkwise") for x in inputs]
    together: dict[int, list[bool]] = {}

    def work(i: int) -> None:
        found = [run(inputs[i], impl="chunkwise") for _ in range(10)]
        together[i] = [torch.equal(f[name], alone[i][name]) for f in found for name in f]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(together) == 4
    assert all(all(same) for same in together.values())


def test_results_do_not_live_in_scratch() -> None:
    first = run(Case(seed=1).inputs(torch.float32), impl="chunkwise")
    kept = {name: x.clone() for name, x in first.items()}
    run(Case(seed=2).inputs(torch.float32), impl="chunkwise")
    assert all(torch.equal(x, kept[name]) for name, x in first.items())


def test_inference_mode_first_does_not_break_training_after() -> None:
    found = []

    def work() -> None:  # in a thread of its own, so that the buffers really are born here
        inputs = Case(tokens=40).inputs(torch.float32)
        with torch.inference_mode():
            erase_write(**inputs, impl="chunkwise")
        found.append(run(inputs, impl="chunkwise"))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found
