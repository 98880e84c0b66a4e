"""Runs of three arms and two seeds, made of result files alone."""

import json
from pathlib import Path
from typing import Any

import pytest

LENGTHS = (512, 1024, 2048, 4096)


def evaluated(folder: Path, name: str, right: list[int], *, tokens: int | None = None, **about: Any) -> None:
    """A finished result of 100 examples; `right` has the indices of those that are correct."""
    folder.mkdir(parents=True, exist_ok=True)
    task, _, rest = name.partition("-")
    fixed = {"task": task, "tokenizer": "t", "prompts": f"{name}.jsonl", "strength": 1.0, "bos": True}
    fixed |= {"length": int(rest), "sizing": "linear"} if rest.isdigit() else {"variant": rest}
    result = {"samples": 100, "correct": len(right), "accuracy": len(right) / 100, "tokens": {"median": 9}}
    (folder / f"{name}.json").write_text(json.dumps({"about": fixed | about, "result": result}))
    size = tokens or (int(rest) if rest.isdigit() else 9)
    rows = [
        {"index": i, "correct": int(i in set(right)), "gold": str(i), "tokens": size}
        | {"prediction": f"{i}." if i in set(right) else "nothing"}
        for i in range(100)
    ]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def trained(base: Path, arm: str, seed: int, shares: tuple[float, ...], fda: int = 10) -> Path:
    """A run of 3 steps with rows of 512."""
    folder = base / f"{arm}-{seed}"
    folder.mkdir(parents=True)
    config = {"model": {"rule": arm}, "seed": seed, "sequence": 512, "total_tokens": 3000, "batch_tokens": 1000}
    (folder / "config.json").write_text(json.dumps({"config": config}))
    rows = [
        {"step": i, "tokens": 1000 * (i + 1), "loss": 3.0, "strength": {"0": 0.03 + 0.01 * i} if arm != "gdn2" else {}}
        | ({"validation_loss": 2.5 + seed / 100, "retrieval": 0.6} if i == 2 else {"retrieval": 0.0})
        for i in range(3)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for length, share in zip(LENGTHS, shares, strict=True):
        evaluated(folder / "eval", f"niah_single_1-{length}", list(range(int(100 * share))))
    evaluated(folder / "eval", "fda-A1", list(range(fda)))
    bins = [
        {"from": 0, "to": 64, "loss": 3.0, "standard_error": 0.1},
        {"from": 64, "to": 512, "loss": 2.0, "standard_error": 0.1},
    ]
    positions = {"about": {"task": "positions", "tokenizer": "t"}, "result": {"bins": bins, "loss": 2.1}}
    (folder / "eval" / "positions-512.json").write_text(json.dumps(positions))
    return folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return made(tmp_path / "runs")


def made(base: Path) -> Path:
    """The runs, in a folder that is made for them."""
    for seed in (0, 1):
        trained(base, "gdn2", seed, (1.0, 0.8, 0.5, 0.1))
        run = trained(base, "qed", seed, (1.0, 0.95, 0.8, 0.4), fda=30)
        trained(base, "qed-rand", seed, (1.0, 0.8, 0.5, 0.12 if seed else 0.1))
        for scale in (-1.0, 0.0, 1.0, 2.0):
            evaluated(
                run / "strength" / f"{scale:g}", "niah_single_1-2048", list(range(60 + int(10 * scale))), strength=scale
            )
    summary = {"samples": 1000, "mean": 0.5, "quantiles": {str(q): q for q in (0.0, 0.01, 0.5, 0.99, 1.0)}}
    names = ("eigenvalue", "rho", "outside", "correction", "change")
    found = {
        "all": dict.fromkeys(names, summary),
        "eigenvalue_histogram": {"edges": [-1, 0, 1, 2], "counts": {"0": [0, 90, 10]}},
    }
    (base / "qed-0" / "eigenvalues.json").write_text(json.dumps(found))
    return base
