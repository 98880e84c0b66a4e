"""`qed export`: a trained model as a folder that loads anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .console import console_for
from .options import Checkpoint, Import, Tokenizer, results_folder, writable

commands = typer.Typer()


@commands.command("export", epilog="Example: qed export runs/mini --out shared/mini")
def _export(
    checkpoint: Checkpoint,
    out: Annotated[
        Path,
        typer.Option(
            help="The folder to write. What is there and not part of an export stays, so does your README.md."
        ),
    ],
    tokenizer: Tokenizer = None,
    import_: Import = None,
) -> None:
    """Write a model as a folder to send on: weights, tokenizer, model card, and a stub through which transformers finds
    this package. A fresh process loads it as any program would, before it takes its place."""
    from ..report.export import export

    console = console_for()
    place = writable("--out", out, folder=True)
    made = export(checkpoint, place, place=results_folder(checkpoint), tokenizer=tokenizer, imports=import_ or [])

    def say(text: str) -> None:
        console.print(text, soft_wrap=True, highlight=False)

    for problem in made.problems:
        say(f"left out of the model card: {problem}")
    if made.kept_card:
        say("README.md: left as it is, since somebody wrote or edited it")
    if not made.tokenizer:
        say("no tokenizer: the checkpoint has none; --tokenizer names a file")
    without = "" if import_ is None else f" after {', '.join(path.name for path in import_)}"
    say(
        f"checked in a fresh process{without or ' without `import qed`'}: AutoModelForCausalLM gives the same logits "
        f"(largest difference {made.difference:g})" + (", AutoTokenizer the same tokens" if made.tokenizer else "")
    )
    say(f"written: {out}: {', '.join(made.files)}")
