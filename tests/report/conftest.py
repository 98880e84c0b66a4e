"""The runs that pages are made of are those of the analysis's tests; some say more of their prompts and heads."""

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from qed.report.page import write
from tests.analysis.conftest import base, made

__all__ = ["base"]

ODD = "</script><script>alert('x')</script> & \"quotes\""  # what a model may say


@pytest.fixture(scope="package")
def rich(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs whose answers have their needle, question and depth, and whose metrics have λ of every head. Read only."""
    base = made(tmp_path_factory.mktemp("rich") / "runs")
    for path in base.glob("*/eval/niah_single_1-*.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            row |= {
                "depth": float(row["index"]),
                "needle": f"One of the numbers for key-{row['index']} is: {row['gold']}.",
            }
            row |= {"question": f"What is the number for key-{row['index']}? It is"}
            row["prediction"] = row["prediction"] if row["correct"] else f"{ODD} {path.parents[1].name}"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for run in base.iterdir():
        about = json.loads((run / "config.json").read_text())
        about |= {
            "git": "0123456789abcdef changed",
            "code": "c" * 64,
            "environment": {"device": "a device", "torch": "9"},
        }
        about |= {"date": "2026-01-02 03:04 UTC", "command": "qed train mini --set seed=0 <now>"}
        (run / "config.json").write_text(json.dumps(about))
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        if not run.name.startswith("gdn2"):
            rows[-1]["strength_by_head"] = {"0": [0.0, 0.25], "1": [0.125, 0.03]}
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return base


def undrawn(_: object, kinds: Iterable[str]) -> dict[str, bytes]:
    """Files of a figure without anything in them, for tests that look at the page alone."""
    return dict.fromkeys(kinds, b"")


@pytest.fixture(scope="package")
def page(rich: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qed.report.drawing.drawn", undrawn)
        return write(rich, rich.parent / "report")
