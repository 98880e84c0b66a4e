"""The memory in which kernels leave results for each other."""

from itertools import pairwise

import pytest
import torch

from qed.kernels.recurrence.memory import Layout, Segments, saved_like, scratch_like


@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "K", "V"), [(70, 4, 5), (200, 60, 7), (1024, 64, 64), (2000, 12, 1)])
def test_parts_fill_the_memory_and_are_aligned(tokens: int, K: int, V: int, dtype: torch.dtype, save: bool) -> None:
    """Nothing overlaps or is left over, and every part begins at a multiple of 16 bytes, which Triton looks at."""
    q, u = torch.empty(1, tokens, 3, K, dtype=dtype), torch.empty(1, tokens, 3, V, dtype=dtype)
    chunks, segments = -(-tokens // 64), Segments.of(q, None)
    layout = Layout.of(q, u, chunks, segments, save)
    memory = layout.empty(q)
    parts = layout.parts(*memory)
    known = [x for x in parts if x is not None]
    assert len(known) == 7 + 2 * save + (segments.each > 1)
    for whole in memory:
        inside = sorted((x for x in known if x.dtype == whole.dtype), key=torch.Tensor.data_ptr)
        if dtype != torch.float32:
            assert sum(x.numel() for x in inside) == whole.numel()
            assert inside[0].data_ptr() == whole.data_ptr()
        for x, y in pairwise(inside):
            assert x.data_ptr() + x.nbytes <= y.data_ptr()
    assert all(x.data_ptr() % 16 == 0 for x in known)
    assert sum(x.numel() for x in known) == sum(x.numel() for x in memory)
    assert parts.a_tilde.numel() == parts.q_tilde.numel() == parts.k_bar.numel() == chunks * 3 * 64 * K
    assert parts.P.numel() == parts.T.numel() == chunks * 3 * 64 * 64
    if save:
        assert [x.shape for x in saved_like(q, u, None)] == [x.shape for x in memory]
        dP, dA, d_ends = scratch_like(parts)
        assert dP.numel() == dA.numel() == parts.P.numel()
        assert parts.starts is not None
        assert d_ends.numel() == parts.starts.numel() == chunks * 3 * V * K
        assert all(x.data_ptr() % 16 == 0 for x in (dP, dA, d_ends))
