"""Chunks, lanes and slabs: every token exactly once, in order, and nothing that is not one."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from qed.ops.packing import Schedule, chunk_bound
from tests.strategies import offsets


@given(data=st.data(), tokens=st.integers(1, 200), heads=st.integers(1, 3), chunk=st.sampled_from((1, 4, 32)))
def test_every_token_is_in_one_chunk(data: st.DataObject, tokens: int, heads: int, chunk: int) -> None:
    cuts = data.draw(offsets(tokens))
    x = torch.arange(tokens * heads, dtype=torch.float64).view(1, tokens, heads, 1) + 1
    schedule = Schedule.of(x, torch.tensor(cuts), chunk)
    size = data.draw(st.sampled_from((1, 64, 10**9)))
    out, seen, first = torch.zeros_like(x), [], 0
    every = data.draw(st.sampled_from((1, 2, 4)))
    kept = 0
    for slab in schedule.slabs(size, every):
        assert slab.first_chunk == first
        count = slab.chunks
        assert count <= every or count * heads * chunk <= size
        first += count
        for step in slab.steps[::every]:
            assert step.kept is not None
            assert step.kept.start == kept
            kept = step.kept.stop
        chunks = slab.gather(x, torch.full((count * heads, chunk, 1), torch.nan, dtype=torch.float64))
        seen.append(chunks[chunks != 0])
        slab.scatter(chunks, out)
    assert torch.equal(out, x)
    assert torch.cat(seen).sort().values.tolist() == x.flatten().tolist()
    assert first == schedule.chunks() == sum(-(-(b - a) // chunk) for a, b in pairwise(cuts))
    assert first <= chunk_bound(1, tokens, len(cuts) - 1, chunk, True)
    assert kept == schedule.chunks(every) * heads
    assert kept <= chunk_bound(1, tokens, len(cuts) - 1, every * chunk, True) * heads


def test_lanes_are_the_longest_sequences_first() -> None:
    schedule = Schedule.of(torch.zeros(1, 100, 1, 1), torch.tensor([0, 10, 10, 90, 100]), 10)
    assert schedule.order[0] == 2
    (slab,) = schedule.slabs(10**9, 1)
    assert [step.lanes.stop for step in slab.steps] == [3, 1, 1, 1, 1, 1, 1, 1]


def test_steps_of_a_lane_follow_each_other() -> None:
    """However lanes and steps are cut, a lane's chunks come in order: the state runs from one to the next."""
    x = torch.arange(5 * 70, dtype=torch.float64).view(5, 70, 1, 1)
    for size in (1, 16, 40, 100, 10**9):
        seen: dict[int, list[float]] = {}
        for slab in Schedule.of(x, None, 8).slabs(size, 2):
            first = slab.gather(x, torch.empty(slab.chunks, 8, 1, dtype=torch.float64))[:, 0, 0]
            for step in slab.steps:
                for lane, token in zip(range(step.lanes.start, step.lanes.stop), first[step.chunks], strict=True):
                    seen.setdefault(lane, []).append(float(token) % 70)
        assert seen == {lane: [float(t) for t in range(0, 70, 8)] for lane in range(5)}
