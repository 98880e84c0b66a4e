"""What `qed train --help` lists: the recipes, their own parameters, and the fields that --set changes."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from ..model.config import QEDConfig
from ..recipes import RECIPES
from ..rules import RULES
from ..train.config import TrainConfig
from ..train.fields import documented
from ..train.optimizers import OPTIMIZERS

HIDDEN = {"name", "model", "optimizer_settings"}  # not fields of --set


def print_recipes(console: Console) -> None:
    """Print tables of the recipes and of the fields of --set, with their defaults."""
    rows = [(name, inspect.getdoc(recipe) or "") for name, recipe in RECIPES.items()]
    _print("Recipes", [(name, text.partition("\n")[0]) for name, text in rows], console)
    fields = {**_parameters(), **_fields()}
    model = ", ".join(field.name for field in dataclasses.fields(QEDConfig) if field.name in QEDConfig.__annotations__)
    fields["model.FIELD"] = f"a field of the model's configuration: {model}."
    for name, row in OPTIMIZERS.items():
        settings = ", ".join(field.name for field in dataclasses.fields(row.settings))
        fields |= {"optimizer.SETTING": f"a setting of {name}: {settings}."} if settings else {}
    _print("Fields of --set, with defaults that a recipe may change", fields.items(), console)


def _parameters() -> dict[str, str]:
    """The parameters of recipes that are no fields of a run, with what they mean and whose they are."""
    texts, owners = {"arm": f"the rule that is trained: {', '.join(RULES)}."}, dict[str, list[str]]()
    for name, recipe in RECIPES.items():
        for key, parameter in inspect.signature(recipe).parameters.items():
            if key not in documented(TrainConfig):
                texts.setdefault(key, documented(recipe, "Args:").get(key, ""))
                owners.setdefault(f"{key}={parameter.default}", []).append(name)
    return {
        field: f"{texts[field.partition('=')[0]]} A parameter of {', '.join(names)}." for field, names in owners.items()
    }


def _fields() -> dict[str, str]:
    """The fields of a run that --set changes, in the form in which it takes them, with what they mean."""
    texts = documented(TrainConfig)
    fields = [field for field in dataclasses.fields(TrainConfig) if field.name not in HIDDEN]
    return {f"{field.name}{_default(field.default)}": texts[field.name] for field in fields}


def _default(value: object) -> str:
    if value is dataclasses.MISSING or value is None:
        return ""
    return f"={value if isinstance(value, str) else json.dumps(value)}"


def _print(title: str, rows: Iterable[tuple[str, str]], console: Console) -> None:
    table = Table.grid("", "", padding=(0, 2, 0, 0))
    for name, text in rows:
        table.add_row(f" {name}", text)
    console.print(f" {title}:", style="bold", highlight=False)
    console.print(table)
    console.print()
