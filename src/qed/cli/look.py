"""`qed look`: a page that shows what a model reads, and what its correction made it forget."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .console import console_for
from .options import Checkpoint, Device, Import, Tokenizer, device_for, writable

commands = typer.Typer()


@commands.command("look", epilog='Example: qed look runs/mini "Remember kinu kuhi. Recall kinu" --out look.html')
def _look(
    checkpoint: Checkpoint,
    text: Annotated[str, typer.Argument(help="The text that the model reads, of at most 1,024 tokens.")],
    out: Annotated[Path, typer.Option(help="The page to write, one HTML file that needs nothing else.")] = Path(
        "look.html"
    ),
    tokenizer: Tokenizer = None,
    import_: Import = None,
    device: Device = "auto",
) -> None:
    """Write a page on which every token of a text shows what it reads and what was erased, in every layer and head."""
    from ..report.look import write_look

    place, console = writable("--out", out, folder=False), console_for()
    write_look(checkpoint, text, place, tokenizer=tokenizer, device=device_for(device), console=console)
    console.print(
        f"written: {place}; open it in a browser: {place.resolve().as_uri()}", soft_wrap=True, highlight=False
    )
