"""The commands up to a trained model: `qed doctor`, `prepare`, `train` and `replay`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from . import completion
from .console import console_for, reported
from .options import Device, Heads, Import, Tokens, Width, assignments, choice, device_for, finite, writable

commands = typer.Typer()


@commands.command("doctor", epilog="Example: qed doctor --dtype float32")
def _doctor(
    device: Device = "auto",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    heads: Heads = 6,
    width: Width = 128,
    tokens: Tokens = 200,
) -> None:
    """Check this installation: its versions, and every form of the op, forward and backward, against the loop."""
    import torch

    from ..doctor import examine

    console = console_for()
    choice("--dtype", dtype, ("bfloat16", "float16", "float32"))
    device = device_for(device)
    sound = examine(console, device=device, dtype=getattr(torch, dtype), heads=heads, width=width, tokens=tokens)
    console.print("sound" if sound else "not sound: do not train with this", style="green" if sound else "red")
    raise typer.Exit(0 if sound else 1)


@commands.command("prepare", epilog="Example: qed prepare corpus.jsonl.xz --tokenizer llama2.model --out data")
def _prepare(
    source: Annotated[
        str, typer.Argument(help="A file or folder of .jsonl, .parquet or .txt (.gz, .xz), hf:NAME, or synthetic:N.")
    ],
    tokenizer: Annotated[str, typer.Option(help="A SentencePiece .model, a tokenizer.json, bpe:N or words:N.")],
    out: Annotated[Path, typer.Option(help="The folder to write; the same command resumes where it stopped.")],
    column: Annotated[str, typer.Option(help="The field or column that holds a document's text.")] = "text",
    licence: Annotated[str, typer.Option(help="The corpus's licence, which is kept in the index.")] = "unknown",
    shard_tokens: Annotated[int, typer.Option(min=1, help="Tokens after which a new file begins.")] = 100_000_000,
    limit: Annotated[
        int | None, typer.Option(min=1, max=sys.maxsize, help="Take only so many documents, from the first.")
    ] = None,
    part: Annotated[
        str, typer.Option(help="held:N takes one document in N, chosen by its hash; rest:N takes the others.")
    ] = "",
    practice: Annotated[
        float,
        typer.Option(
            help="The share of characters in documents that practise the needle tasks, which are mixed in.",
            callback=finite,
        ),
    ] = 0.0,
) -> None:
    """Turn documents into token shards for training."""
    from ..data.practice import Practice
    from ..data.prepare import prepare
    from ..eval.expressing import warn_of_practice

    console = console_for(stderr=True)
    prepare(
        source,
        tokenizer=tokenizer,
        out=writable("--out", out, folder=True),
        column=column,
        licence=licence,
        shard_tokens=shard_tokens,
        limit=limit,
        part=part,
        mix=Practice(share=practice) if practice else None,
        look=lambda tokenizer: warn_of_practice(tokenizer, console) if practice else None,
        console=console,
    )


class TrainCommand(TyperCommand):
    """`qed train`, whose help also lists recipes and fields. They are imported only when the help is asked for."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help of any command, and after it the tables."""
        super().format_help(ctx, formatter)
        from .recipes import print_recipes

        print_recipes(console_for())


@commands.command("train", cls=TrainCommand, epilog="Example: qed train mini --set arm=gdn2 --out runs/mini")
def _train(
    recipe: Annotated[
        str, typer.Argument(help="The recipe's name; they are listed below.", autocompletion=completion.recipes)
    ],
    out: Annotated[Path, typer.Option(help="The run's folder; the same command resumes where it stopped.")],
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="field=value, one of the fields below, such as --set total_tokens=1e6; may be repeated.",
            autocompletion=completion.fields,
        ),
    ] = None,
    device: Device = "auto",
    lines: Annotated[
        bool, typer.Option("--lines", help="Print a line per step instead of a bar, as where there is no terminal.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be trained, and stop.")] = False,
    import_: Import = None,
) -> None:
    """Train a model by a recipe. All but `mini`, which has a built-in corpus, need --set data=FOLDER."""
    from ..eval.expressing import warn_of_corpus
    from ..recipes import build
    from ..report.card import describe
    from ..reproduce.corpus import built_in, make_built_in
    from ..train.loggers import make
    from ..train.loop import Diverged, train
    from .summary import summarise

    console = console_for()
    changes = assignments(set_)
    corpus = built_in(recipe, changes, out)
    config = build(recipe, changes | corpus)
    make(config.loggers)  # so that what cannot be logged is said first
    if dry_run:
        from ..train.plan import plan

        plan(config, console)
        return
    writable("--out", out, folder=True)
    chosen = device_for(device)
    if corpus:
        make_built_in(out, console)
    if os.environ.get("RANK", "0") == "0":
        warn_of_corpus(Path(config.data), console_for(stderr=True))
    with reported(Diverged):
        status = train(config, out, device=chosen, console=console, lines=lines)
    if status == 0 and os.environ.get("RANK", "0") == "0":  # of several processes the first one speaks
        describe(out / "export", out)
        summarise(config, out, console)
    raise typer.Exit(status)


@commands.command("replay", epilog="Example: qed replay runs/mini/diverged-00000120")
def _replay(
    folder: Annotated[Path, typer.Argument(help="The diverged-… folder of a run.")],
    device: Device = "auto",
    import_: Import = None,
) -> None:
    """Run the batch at which a training diverged again, layer by layer."""
    from ..train.replay import replay

    replay(folder, device=device_for(device), console=console_for())
