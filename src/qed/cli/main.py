"""The program `qed` and all of its commands."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import __version__
from . import bench, evaluation, export, look, reproduction, training
from .console import Commands

app = typer.Typer(
    name="qed",
    cls=Commands,
    help="Query-derived erase directions for linear attention.",
    epilog="Example: qed reproduce",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


app.add_typer(training.commands)
app.add_typer(evaluation.commands)
app.add_typer(export.commands)
app.add_typer(look.commands)
app.add_typer(reproduction.commands)
app.add_typer(bench.commands, name="bench")
