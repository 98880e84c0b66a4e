"""What the property tests draw: every odd length, degenerate key and extreme decay of the recurrence's contract."""

from hypothesis import strategies as st

from qed.testing import Case

LENGTHS = (1, 2, 31, 32, 33, 63, 64, 65, 97)
LOG_DECAYS = (0.0, -1e-3, -1.0, -5.0, -20.0, -100.0)
SCALES = (-1.0, 0.0, 0.5, 1.0, 1.5, 2.0)  # the paper's s


@st.composite
def cases(draw: st.DrawFn, lengths: tuple[int, ...] = LENGTHS) -> Case:
    return Case(
        batch=draw(st.integers(1, 3)),
        tokens=draw(st.sampled_from(lengths)),
        heads=draw(st.integers(1, 3)),
        key_width=draw(st.sampled_from((1, 2, 7, 16, 20))),
        value_width=draw(st.sampled_from((1, 3, 16, 20))),
        keys=draw(st.sampled_from(("random", "few", "identical"))),
        decay=draw(st.sampled_from(("none", "head", "channel"))),
        log_decay=draw(st.sampled_from(LOG_DECAYS)),
        constant_decay=draw(st.booleans()),
        resets=draw(st.integers(0, 3)),
        strength=draw(st.floats(0, 1)) * draw(st.sampled_from(SCALES)),
        state=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


@st.composite
def offsets(draw: st.DrawFn, tokens: int) -> list[int]:
    """Packed offsets over `tokens`, empty sequences included."""
    inner = draw(st.lists(st.integers(0, tokens), max_size=4))
    return [0, *sorted(inner), tokens]
