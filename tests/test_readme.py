"""The README stays a beginning, and the table of rules is the table."""

import re

import pytest

from qed import RULES

from .documents import ROOT

README = ROOT / "README.md"
TABLE = (ROOT / "docs" / "reference" / "rules.md").read_text().splitlines()


def test_it_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 150


def test_its_arm_is_the_one_of_the_tutorial() -> None:
    """Both say how to add one; what is pasted from either is the same."""
    block = next(x for x in README.read_text().split("```python\n") if "RULES[" in x).partition("```")[0]
    assert block in (ROOT / "docs" / "tutorials" / "extend.md").read_text()


@pytest.mark.parametrize("name", RULES)
def test_the_table_names_every_rule_with_its_decay(name: str) -> None:
    row = next(line for line in TABLE if re.match(rf"\| \**`{name}`\** \|", line))
    decay = {"none": "–", "head": "per head", "channel": "per channel"}[RULES[name].decay]
    assert row.split("|")[2].strip() == decay
    if RULES[name].substeps == 1 and RULES[name].direction == "none":
        assert row.split("|")[3].strip() == RULES[name].erase_vector
