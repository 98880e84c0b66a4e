"""What every recipe says in the same words: whose run it is, and how its tokens come in steps."""

from __future__ import annotations

from typing import Any


def run_of(recipe: str, model: dict[str, Any], data: str, arm: str, seed: int, validation: str) -> dict[str, Any]:
    """Return the fields that name a run: its name, the model with the arm's rule, its data and its seed.

    Args:
        recipe: what the run's name begins with.
        model: fields of the model's configuration other than the rule.
        data: a folder that `qed prepare` wrote, or the name of rows that are made.
        arm: the rule.
        seed: of the weights and of the order of the data.
        validation: held-out tokens, like `data`; without them the run is not validated.
    """
    named = {"name": f"{recipe}-{arm}-{seed}", "model": model | {"rule": arm}, "data": data}
    return named | {"validation": validation or None, "seed": seed}


def steps_of(rows: int, sequence: int, tokens: int, decay_start: int) -> dict[str, Any]:
    """Return the fields of a run whose steps are small enough for a GPU to take all rows of one at once.

    Args:
        rows: rows of a step.
        sequence: tokens of a row.
        tokens: tokens of the whole run.
        decay_start: tokens after which the learning rate falls.
    """
    batch = rows * sequence
    sizes = {"sequence": sequence, "batch_tokens": batch, "micro_tokens": batch}
    return sizes | {"total_tokens": tokens, "decay_start_tokens": decay_start}
