"""Which trainings count under a plan. One of another code, plan or prompts is named, with the reason, and left out."""

import json
from pathlib import Path
from typing import Any

import pytest

from qed.analysis.results import runs
from qed.analysis.units import counting, read_registration, several
from qed.provenance import plan_sha256

from .synthetic import CODE, PLAN, plan_file, unit

FEW: dict[str, Any] = {"samples": 3, "lengths": (4096,), "tasks": ("niah_single_1",)}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    for seed in range(4):
        unit(tmp_path / "runs", "qed", seed, **FEW)
    return tmp_path / "runs"


def changed(path: Path, part: str, **fields: Any) -> None:
    found = json.loads(path.read_text())
    (found[part] if part else found).update(fields)
    path.write_text(json.dumps(found))


def left_out(base: Path) -> list[str]:
    kept, others = counting(runs(base), read_registration(plan_file(base.parent / "PLAN.md")))
    assert len(kept) + len(others) == 4
    return others


def test_all_of_the_plan_count(base: Path) -> None:
    assert left_out(base) == []


def test_another_code(base: Path) -> None:
    for path in (base / "qed-1").rglob("*.json"):
        changed(path, "" if path.name == "config.json" else "provenance", code="d" * 64)
    assert left_out(base) == ["qed-1: its code is dddddddddddd, and the plan's is cccccccccccc"]


def test_another_plan_and_none(base: Path) -> None:
    for path in (base / "qed-1").rglob("*.json"):
        changed(path, "" if path.name == "config.json" else "provenance", plan="e" * 64)
    for path in (base / "qed-2").rglob("*.json"):
        text = json.loads(path.read_text())
        (text if path.name == "config.json" else text["provenance"]).pop("plan")
        path.write_text(json.dumps(text))
    assert left_out(base) == [
        f"qed-1: its plan is eeeeeeeeeeee, and the plan's is {PLAN[:12]}",
        f"qed-2: its plan is none, and the plan's is {PLAN[:12]}",
    ]


@pytest.mark.parametrize("file", ["eval/niah_single_1-4096.json", "strength/0/niah_single_1-4096.json"])
def test_results_of_several_codes(base: Path, file: str) -> None:
    changed(base / "qed-3" / file, "provenance", code="d" * 64)
    assert left_out(base) == [
        f"qed-3: its results are of several codes: cccccccccccc in config.json, dddddddddddd in {file}"
    ]
    assert several(runs(base)) == ["These results are of several codes: cccccccccccc, dddddddddddd."]


@pytest.mark.parametrize(("place", "said"), [("eval", ""), ("strength/0", " at s = 0")])
def test_other_prompts(base: Path, place: str, said: str) -> None:
    changed(base / "qed-0" / place / "niah_single_1-4096.json", "about", prompts="others.jsonl")
    usual = "niah_single_1-4096-abc.jsonl"
    assert left_out(base) == [
        f"qed-0: its niah_single_1-4096{said} is of prompts others.jsonl, where 3 others have {usual}"
    ]


def test_no_prompts_are_most_units(base: Path) -> None:
    """Two against two: who is right cannot be told, and the tables refuse both."""
    for seed in (0, 1):
        changed(base / f"qed-{seed}" / "eval" / "niah_single_1-4096.json", "about", prompts="others.jsonl")
    assert left_out(base) == []


def test_a_unit_of_another_code_does_not_decide_the_prompts(base: Path) -> None:
    for seed in (0, 1):
        changed(base / f"qed-{seed}" / "config.json", "", code="d" * 64)
        changed(base / f"qed-{seed}" / "eval" / "niah_single_1-4096.json", "about", prompts="others.jsonl")
    assert [x.split(":")[0] for x in left_out(base)] == ["qed-0", "qed-1"]


def test_a_plan_names_its_code(tmp_path: Path) -> None:
    path = plan_file(tmp_path / "PLAN.md")
    assert read_registration(path) == (plan_sha256(path), CODE) == (PLAN, CODE)
    whole = path.read_text()
    path.write_text(whole + "    " + "a" * 64 + "\n")  # an addition changes neither
    assert read_registration(path) == (PLAN, CODE)
    for text in (
        whole.replace(CODE, "CODE_SHA256"),
        whole.replace("Code:", "Kode:"),
        whole.replace(f"    {CODE}", CODE),
    ):
        path.write_text(text)
        with pytest.raises(
            ValueError, match=r"--plan: expected the sha256 of the code, 64 hexadecimal digits .*PLAN.md"
        ):
            read_registration(path)


def test_the_committed_plan_is_read() -> None:
    found = read_registration(Path(__file__).parents[2] / "results" / "PLAN.md")
    assert len(found.code) == len(found.plan) == 64
