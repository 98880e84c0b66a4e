"""Bad input: the error names the argument, what was expected, what came."""

import math
from typing import Any

import pytest
import torch

from qed.ops import erase_write, erase_write_step, value_checks
from qed.testing import Case

IMPLS = ("auto", "reference", "chunkwise")


def good() -> dict[str, Any]:
    return dict(Case(batch=2, tokens=6, heads=3, key_width=4, value_width=5).inputs(torch.float32))


def packed() -> dict[str, Any]:
    return dict(Case(batch=1, tokens=6, state=False).inputs(torch.float32)) | {"cu_seqlens": torch.tensor([0, 2, 6])}


BAD: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("q is no tensor", {"q": [1.0]}, TypeError, "q: expected a tensor, got list"),
    ("q without heads", {"q": torch.zeros(2, 6, 4)}, ValueError, r"q: expected shape \[B, T, H, K\], got \[2, 6, 4\]"),
    ("k would broadcast", {"k": torch.zeros(1, 6, 3, 4)}, ValueError, r"k: expected q's shape .*got \[1, 6, 3, 4\]"),
    ("a of another width", {"a": torch.zeros(2, 6, 3, 1)}, ValueError, r"a: expected q's shape"),
    ("u of another length", {"u": torch.zeros(2, 5, 3, 5)}, ValueError, r"u: expected shape \[2, 6, 3\] \+ \[V\]"),
    ("u without width", {"u": torch.zeros(2, 6, 3, 0)}, ValueError, "K and V of at least 1, got 4 and 0"),
    ("g per batch", {"g": torch.zeros(2, 6, 1, 4)}, ValueError, r"g: expected \[2, 6, 3, 4\] \(per channel\) or"),
    ("g without its last axis", {"g": torch.zeros(2, 6, 3)}, ValueError, r"g: expected .*got \[2, 6, 3\]"),
    ("integers", {"q": torch.zeros(2, 6, 3, 4, dtype=torch.int64)}, TypeError, "q: expected one of .*got torch.int64"),
    ("mixed dtypes", {"k": torch.zeros(2, 6, 3, 4).double()}, TypeError, "k: expected q's dtype torch.float32, got"),
    ("g in bfloat16", {"g": torch.zeros(2, 6, 3, 4).bfloat16()}, TypeError, "g: expected torch.float32 or .*bfloat16"),
    (
        "another device",
        {"a": torch.zeros(2, 6, 3, 4, device="meta")},
        ValueError,
        "a: expected q's device cpu, got meta",
    ),
    (
        "state of one head",
        {"initial_state": torch.zeros(2, 1, 4, 5)},
        ValueError,
        r"initial_state: expected shape \[2, 3",
    ),
    ("state in bfloat16", {"initial_state": torch.zeros(2, 3, 4, 5).bfloat16()}, TypeError, "initial_state: expected"),
    (
        "packing a batch",
        {"cu_seqlens": torch.tensor([0, 6])},
        ValueError,
        "cu_seqlens: packed sequences need batch size 1",
    ),
    ("scale is a tensor", {"scale": torch.ones(1)}, TypeError, "scale: expected a number, got Tensor"),
    ("scale is infinite", {"scale": math.inf}, ValueError, "scale: expected a finite number, got inf"),
    ("unknown form", {"impl": "cuda"}, ValueError, "impl: expected one of 'auto', .*got 'cuda'"),
    ("positive decay", {"g": torch.full((2, 6, 3, 1), 0.5)}, ValueError, "g: expected log-decays ≤ 0 .*maximum of 0.5"),
    (
        "NaN decay",
        {"g": torch.full((2, 6, 3, 1), torch.nan)},
        ValueError,
        "g: expected log-decays ≤ 0 .*maximum of nan",
    ),
    (
        "NaN in the state",
        {"initial_state": torch.full((2, 3, 4, 5), torch.nan)},
        ValueError,
        "initial_state: expected finite values, got 120 NaN or infinite of 120",
    ),
]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("change", "error", "message"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_input_is_named(impl: str, change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        erase_write(**({"impl": impl} | good() | change))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("offsets", [[0, 4, 2, 6], [1, 6], [0, 5], [0, 7], [0, -1, 6]])
def test_offsets_that_make_no_sense_are_refused(impl: str, offsets: list[int]) -> None:
    with pytest.raises(ValueError, match=r"cu_seqlens: expected offsets that start at 0, never decrease and end at T"):
        erase_write(**(packed() | {"cu_seqlens": torch.tensor(offsets), "impl": impl}))


@pytest.mark.parametrize("offsets", [torch.tensor([0.0, 6.0]), torch.tensor([[0, 6]]), torch.tensor([6]), [0, 6]])
def test_offsets_of_the_wrong_kind_are_refused(offsets: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="cu_seqlens: expected a"):
        erase_write(**(packed() | {"cu_seqlens": offsets}))


def test_packed_state_has_one_row_per_sequence() -> None:
    with pytest.raises(ValueError, match=r"initial_state: expected shape \[2, 2, 16, 16\].*got \[1, 2, 16, 16\]"):
        erase_write(**(packed() | {"initial_state": torch.zeros(1, 2, 16, 16)}))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": torch.zeros(2, 1, 3, 4)}, ValueError, r"q: expected shape \[B, H, K\], got \[2, 1, 3, 4\]"),
        ({"state": torch.zeros(2, 3, 5, 4)}, ValueError, r"state: expected shape \[2, 3, 4, 5\]"),
        ({"state": torch.full((2, 3, 4, 5), torch.nan)}, ValueError, "state: expected finite values"),
        ({"g": torch.ones(2, 3, 4)}, ValueError, "g: expected log-decays ≤ 0"),
    ],
)
def test_bad_steps_are_named(impl: str, change: dict[str, Any], error: type[Exception], message: str) -> None:
    inputs = good()
    token = {name: x[:, 0] for name, x in inputs.items() if name != "initial_state"}
    with pytest.raises(error, match=message):
        erase_write_step(**({"state": inputs["initial_state"], "impl": impl} | token | change))


def test_arguments_are_keyword_only_and_known() -> None:
    inputs = good()
    with pytest.raises(TypeError):
        erase_write(*(inputs[name] for name in "qkaug"), 2.0)
    with pytest.raises(TypeError, match="unexpected keyword"):
        erase_write(**inputs, output_final_state=True)


@pytest.mark.parametrize("impl", IMPLS)
def test_value_checks_can_be_turned_off(impl: str) -> None:
    inputs = good() | {"g": torch.full((2, 6, 3, 1), 0.5)}
    with value_checks(False):
        erase_write(**inputs, impl=impl)
    with pytest.raises(ValueError, match="g: expected"):
        erase_write(**inputs, impl=impl)


def test_value_checks_are_off_away_from_the_cpu_unless_asked_for() -> None:
    """On a meta tensor a read of a value raises, so this shows that none happens."""
    inputs = {name: x.to("meta") for name, x in good().items()}
    o, state = erase_write(**inputs, impl="chunkwise")
    assert (o.shape, state.shape) == ((2, 6, 3, 5), (2, 3, 4, 5))
