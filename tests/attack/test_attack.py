"""A small part of the standing attack: the first seeds of every fuzzer. `make attack` runs the large one."""

import pytest

from .running import written
from .table import FUZZERS, Fuzzer

CASES = [
    pytest.param(fuzzer, seed, id=f"{fuzzer.name}-{seed}", marks=[pytest.mark.slow] if "kill" in fuzzer.name else [])
    for fuzzer in FUZZERS
    for seed in range(fuzzer.small)
]


@pytest.mark.parametrize(("fuzzer", "seed"), CASES)
@pytest.mark.filterwarnings("default")
def test_attack(fuzzer: Fuzzer, seed: int) -> None:
    fuzzer.case(seed)


def test_the_large_attack_is_large() -> None:
    cases = {unit: sum(x.large * x.each for x in FUZZERS if x.unit == unit) for unit in ("cases", "kills")}
    assert cases["cases"] >= 10_000
    assert cases["kills"] >= 200


def test_the_table_stands_between_its_markers() -> None:
    before = "About.\n\n<!-- table -->\nold\n<!-- end of table -->\n\nMore.\n"
    assert written(before, "new") == "About.\n\n<!-- table -->\nnew\n<!-- end of table -->\n\nMore.\n"
    with pytest.raises(ValueError, match="<!-- table -->"):
        written("no markers", "new")
