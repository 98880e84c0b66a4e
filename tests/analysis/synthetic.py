"""Folders like those of `qed reproduce` at the registered scales, with answers drawn from a logistic in the length."""

import hashlib
import json
import lzma
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

CODE = "c" * 64
REGISTERED = f"# Registered plan\n\nCode: all experiments run the package whose sha256 is\n\n    {CODE}"
PLAN = hashlib.sha256(REGISTERED.encode()).hexdigest()
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
TASKS = ("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1")
HALF = {"niah_single_1": 13.5, "niah_single_2": 12.3, "niah_single_3": 10.8, "niah_multikey_1": 11.5}  # octaves
RECIPES = {"medium": (12, 4), "paper_short": (24, 6)}  # layers and heads


def plan_file(path: Path) -> Path:
    path.write_text(f"{REGISTERED}\n\n## Additions\n\nAnother day: nothing.\n")
    return path


def answers(task: str, length: int, half: float, samples: int, random: np.random.Generator) -> list[dict[str, Any]]:
    """The questions are the same in all trainings; a needle far from the end is found less often."""
    asked, rows = np.random.default_rng(length + 31 * TASKS.index(task)), []
    for i in range(samples):
        depth, gold = float(asked.uniform(0, 100)), str(asked.integers(10**6, 10**7))
        tokens = length - 150 - int(asked.integers(0, 60))
        chance = 1 / (1 + math.exp(2.5 * (math.log2(tokens) - half) + 0.02 * (50 - depth)))
        right = bool(random.uniform() < chance)
        said = (
            f"{gold}."
            if right
            else f"{random.integers(10**6, 10**7)}. The special magic number is something else. " * 2
        )
        if not right and random.uniform() < 0.05:  # a later guess, which RULER credits
            said, right = f"1234567. The number is {gold}.", True
        row = {
            "index": i,
            "prediction": said[:160],
            "gold": gold,
            "correct": int(right),
            "tokens": tokens,
            "depth": depth,
        }
        rows.append(row | {"distance": round(tokens * (1 - depth / 100))})
    return rows


def evaluated(
    folder: Path,
    task: str,
    length: int,
    rows: list[dict[str, Any]],
    scale: float,
    provenance: dict[str, str],
    packed: bool,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    right, tokens = sum(row["correct"] for row in rows), sorted(row["tokens"] for row in rows)
    about = {"task": task, "length": length, "tokenizer": "t", "strength": scale, "bos": True, "sizing": "linear"}
    about |= {"prompts": f"{task}-{length}-abc.jsonl"}
    result = {"samples": len(rows), "correct": right, "accuracy": right / len(rows)}
    result |= {"tokens": {"least": tokens[0], "median": tokens[len(tokens) // 2], "most": tokens[-1]}}
    whole = {"about": about, "provenance": provenance, "result": result}
    (folder / f"{task}-{length}.json").write_text(json.dumps(whole, indent=2))
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path = folder / f"{task}-{length}.jsonl"
    if packed:
        path.with_name(path.name + ".xz").write_bytes(lzma.compress(lines, preset=1))
    else:
        path.write_bytes(lines)


def unit(
    base: Path,
    arm: str,
    seed: int,
    *,
    recipe: str = "medium",
    shift: float = 0.0,
    spread: float = 0.15,
    samples: int = 40,
    lengths: Iterable[int] = LENGTHS,
    tasks: Iterable[str] = TASKS,
    code: str | None = CODE,
    plan: str | None = PLAN,
    scales: Iterable[float] | None = None,
    steps: int = 12,
    packed: bool = False,
) -> Path:
    """One training; `shift` octaves further than GDN-2's, and `spread` between trainings of an arm."""
    folder = base / f"{arm}-{seed}"
    folder.mkdir(parents=True)
    provenance = {name: x for name, x in (("code", code), ("plan", plan)) if x is not None}
    rule, _, bound = arm.partition("@")
    layers, heads = RECIPES[recipe]
    config: dict[str, Any] = {"name": f"{recipe}-{rule}-{seed}", "seed": seed, "sequence": 2048, "batch_tokens": 32768}
    config |= {"model": {"rule": rule} | ({"lambda_max": float(bound)} if bound else {}), "total_tokens": 32768 * steps}
    config |= {"theta_learning_rate": 21.2 if recipe == "medium" else 79.5}
    (folder / "config.json").write_text(json.dumps({"config": config} | provenance))
    random = np.random.default_rng([seed, *map(ord, arm)])
    has_strength = rule != "gdn2"
    rows = [{"step": i, "tokens": 32768 * (i + 1), "loss": 4.0 - i / steps} for i in range(steps)]
    rows[-1] |= {"validation_loss": 3.6 + float(random.normal(0, 0.004))}
    if has_strength:
        by_head = {str(layer): random.uniform(0.0, 0.12, heads).tolist() for layer in range(layers)}
        rows[-1] |= {"strength": {k: sum(x) / heads for k, x in by_head.items()}, "strength_by_head": by_head}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    moved = shift + float(random.normal(0, spread))
    chosen = (0.0,) if scales is None and arm == "qed" else tuple(scales or ())
    for task in tasks:
        for length in lengths:
            for scale in (1.0, *chosen):
                place = folder / "eval" if scale == 1 else folder / "strength" / f"{scale:g}"
                draw = np.random.default_rng([seed, length, TASKS.index(task), *map(ord, arm)])
                found = answers(task, length, HALF[task] + moved + 0.02 * (scale - 1), samples, draw)
                evaluated(place, task, length, found, scale, provenance, packed)
    return folder
