"""The README tells the truth: its code runs, its table of rules is the table."""

import re
from pathlib import Path

import pytest
import torch

from qed import RULES, QEDConfig, QEDForCausalLM

README = Path(__file__).parent.parent / "README.md"


def test_the_code_runs() -> None:
    scope: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    assert len(blocks) == 4
    try:
        for block in blocks:
            exec(block, scope)
        arm, ids = QEDForCausalLM(QEDConfig.tiny(rule="query-only")), scope["ids"]
        assert torch.isfinite(arm(ids, labels=ids).loss)
    finally:
        RULES.pop("query-only", None)
    assert scope["o"].shape == (1, 100, 4, 64)
    assert scope["state"].shape == (1, 4, 64, 64)
    assert 4 < float(scope["loss"].detach()) < 7


@pytest.mark.parametrize("name", RULES)
def test_the_table_names_every_rule_with_its_decay(name: str) -> None:
    row = next(line for line in README.read_text().splitlines() if re.match(rf"\| \**`{name}`\** \|", line))
    decay = {"none": "–", "head": "per head", "channel": "per channel"}[RULES[name].decay]
    assert row.split("|")[2].strip() == decay
    if RULES[name].substeps == 1 and RULES[name].direction == "none":
        assert row.split("|")[3].strip() == RULES[name].erase_vector
