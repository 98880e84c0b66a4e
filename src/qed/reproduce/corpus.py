"""The data of a reproduction, and of a mini run that is given none."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from .. import locks
from ..data.practice import Practice
from ..data.prepare import prepare
from ..files import read_json
from .plan import PLANS, Files, Plan


def make_data(plan: Plan, out: Path, console: Console) -> None:
    """Prepare the training data in `out/data` and the held-out data in `out/validation`; what is there is only checked.

    Args:
        plan: says which documents and which tokenizer.
        out: the folder for both.
        console: where progress is printed.
    """
    if plan.settings:
        return  # their rows are made when they are asked for
    held = plan.held_out
    prepare(
        plan.source,
        tokenizer=plan.tokenizer,
        out=out / "data",
        limit=plan.limit,
        part=f"rest:{held}" if held else "",
        mix=Practice(share=plan.practice) if plan.practice else None,
        console=console,
    )
    prepare(
        plan.validation or plan.source,
        tokenizer=str(out / "data" / "tokenizer.json"),
        out=out / "validation",
        limit=plan.limit and max(1, plan.limit // max(1, held)),
        part=f"held:{held}" if held else "",
        console=console,
    )


def built_in(recipe: str, changes: dict[str, str], out: Path) -> dict[str, str]:
    """Return where a run without data of its own has the built-in corpus, as settings; nothing if it has none.

    Args:
        recipe: the recipe's name; only `mini` has a built-in corpus.
        changes: the settings that were given.
        out: the run's folder.
    """
    if recipe != "mini" or not changes.keys().isdisjoint(("data", "validation")):
        return {}
    return {name: str(out / name) for name in ("data", "validation")}


def make_built_in(out: Path, console: Console) -> None:
    """Prepare the built-in corpus in a run's folder, as `qed reproduce --scale mini` does. A folder that holds a run on
    other data is refused."""
    if (out / "config.json").exists():
        run = read_json(out / "config.json", "what `qed train` wrote").get("config")
        data = run.get("data") if isinstance(run, dict) else None
        if data != str(out / "data"):
            raise ValueError(f"--out: {out} holds a run with another data, {data}; use another folder")
    plan = PLANS["mini"](Files())
    console.print(f"no data given: this run trains on the built-in corpus ({plan.source}), in {out}", soft_wrap=True)
    # Processes that torchrun started wait here for the first one.
    with locks.held(out, "corpus", wait=True):
        make_data(plan, out, console)
