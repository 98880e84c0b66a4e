"""The command line. Every command is a thin door to a function of the library."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from . import __version__, cli_eval
from .cli_bench import bench
from .cli_parts import (
    LARGEST_SEED,
    LARGEST_SIZE,
    LARGEST_WIDTH,
    Commands,
    assignments,
    choice,
    console_for,
    device_for,
    existing,
    files,
    finite,
    names,
    numbers,
    reported,
    writable,
)
from .eval.task import NeedleTask, RecallTask
from .eval.tasks import of_kind

app = typer.Typer(
    name="qed",
    cls=Commands,
    help="Query-derived erase directions for linear attention.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


app.add_typer(bench, name="bench")


@app.command()
def doctor(
    device: Annotated[str, typer.Option(help="Where to check; 'auto' takes a GPU if there is one.")] = "auto",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    heads: Annotated[int, typer.Option(min=1, max=LARGEST_WIDTH)] = 6,
    width: Annotated[int, typer.Option(min=1, max=LARGEST_WIDTH, help="Of keys and of values.")] = 128,
    tokens: Annotated[int, typer.Option(min=1, max=LARGEST_SIZE)] = 200,
) -> None:
    """Check this installation: versions, and every form of the op, forward and backward, against the loop."""
    import torch

    from .doctor import examine

    console = console_for()
    choice("--dtype", dtype, ("bfloat16", "float16", "float32"))
    device = device_for(device)
    sound = examine(console, device=device, dtype=getattr(torch, dtype), heads=heads, width=width, tokens=tokens)
    console.print("sound" if sound else "not sound: do not train with this", style="green" if sound else "red")
    raise typer.Exit(0 if sound else 1)


@app.command()
def prepare(
    source: Annotated[
        str, typer.Argument(help="A file or folder of .jsonl, .parquet or .txt (.gz, .xz), hf:NAME, or synthetic:N.")
    ],
    tokenizer: Annotated[str, typer.Option(help="A SentencePiece .model, a tokenizer.json, bpe:N or words:N.")],
    out: Annotated[Path, typer.Option(help="The folder to write; run again to go on.")],
    column: Annotated[str, typer.Option(help="Where a document's text is.")] = "text",
    licence: Annotated[str, typer.Option(help="Kept in the index.")] = "unknown",
    shard_tokens: Annotated[int, typer.Option(min=1, help="Tokens after which a new file begins.")] = 100_000_000,
    limit: Annotated[
        int | None, typer.Option(min=1, max=sys.maxsize, help="Documents to take, from the first.")
    ] = None,
    part: Annotated[str, typer.Option(help="held:N for one document in N, by its hash; rest:N for the others.")] = "",
    practice: Annotated[
        float,
        typer.Option(
            help="Share of characters to be documents that practise the needle tasks, mixed in.", callback=finite
        ),
    ] = 0.0,
) -> None:
    """Turn documents into token shards for training."""
    from .data.practice import Practice
    from .data.prepare import prepare as run

    run(
        source,
        tokenizer=tokenizer,
        out=writable("--out", out, folder=True),
        column=column,
        licence=licence,
        shard_tokens=shard_tokens,
        limit=limit,
        part=part,
        mix=Practice(share=practice) if practice else None,
        console=console_for(stderr=True),
    )


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="paper_340m, small, mini or lambda_max_sweep.")],
    out: Annotated[Path, typer.Option(help="The run's folder; the same command again goes on.")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="field=value of the recipe or its configuration.")
    ] = None,
    device: Annotated[str, typer.Option(help="'auto' takes a GPU if there is one.")] = "auto",
    dry_run: Annotated[bool, typer.Option(help="Say what would be trained, and stop.")] = False,
) -> None:
    """Train a model."""
    from .recipes import build
    from .train.loop import Diverged
    from .train.loop import train as run

    console = console_for()
    config = build(recipe, assignments(set_))
    if dry_run:
        from .train.plan import plan

        plan(config, console)
        return
    writable("--out", out, folder=True)
    with reported(Diverged):
        status = run(config, out, device=device_for(device), console=console)
    raise typer.Exit(status)


@app.command()
def replay(
    folder: Annotated[Path, typer.Argument(help="A run's diverged-… folder.")],
    device: Annotated[str, typer.Option(help="'auto' takes a GPU if there is one.")] = "auto",
) -> None:
    """Run the batch that broke a training run once more, layer by layer."""
    from .train.replay import replay as run

    run(folder, device=device_for(device), console=console_for())


app.command()(cli_eval.generate)
app.command("eval")(cli_eval.eval_)
app.command()(cli_eval.strength)
app.command()(cli_eval.eigenvalues)
app.command()(cli_eval.report)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="A safetensors file with one layer or a whole model.")],
    target: Annotated[Path, typer.Argument(help="The safetensors file to write; must not exist.")],
    kind: Annotated[str, typer.Option(help="What the layers are: gdn2, kda, gdn or deltanet.")],
    to: Annotated[str, typer.Option(help="'qed' from flash-linear-attention's names, 'fla' back to them.")] = "qed",
) -> None:
    """Convert layers' weights between flash-linear-attention's form and ours; nothing is rounded."""
    from .model.conversion import KINDS, convert_file

    choice("--kind", kind, KINDS)
    choice("--to", to, ("qed", "fla"))
    writable("TARGET", target, folder=False)
    count = convert_file(source, target, kind=kind, to=to)
    console_for().print(f"{target}: {count} tensors")


@app.command()
def reproduce(
    scale: Annotated[
        str, typer.Option(help="mini (two cores), small, medium, paper-short (one large GPU) or paper (days).")
    ] = "mini",
    arms: Annotated[
        str, typer.Option(help="Rules, RULE@λ_max or RULE+thetaFACTOR, separated by commas; all: the paper's five.")
    ] = "",
    seeds: Annotated[str, typer.Option(help="Parted by commas, instead of the scale's own.")] = "",
    out: Annotated[Path | None, typer.Option(help="Everything goes there; the same command again goes on.")] = None,
    corpus: Annotated[str | None, typer.Option(help="Source for small and paper, as in `qed prepare`.")] = None,
    validation: Annotated[str | None, typer.Option(help="A held-out source, instead of a part of the corpus.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="As in `qed prepare`.")] = None,
    words: Annotated[Path | None, typer.Option(help="Word lists for keys, instead of the wonderwords package.")] = None,
    essays: Annotated[
        Path | None, typer.Option(help="S-NIAH-2's and -3's haystack; without it they are left out.")
    ] = None,
    data: Annotated[list[str] | None, typer.Option(help=f"TASK=FILE of {', '.join(of_kind(RecallTask))}.")] = None,
    needles: Annotated[
        str,
        typer.Option(
            help=f"Some of {', '.join(of_kind(NeedleTask))}, separated by commas, instead of the scale's own tasks."
        ),
    ] = "",
    practice: Annotated[
        float | None, typer.Option(help="Share of the corpus to be practice documents, instead of the scale's own.")
    ] = None,
    plan_file: Annotated[
        Path | None, typer.Option("--plan", help="A registered plan; every result carries its sha256.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, max=1024, help="Trainings at a time.")] = None,
    only: Annotated[str, typer.Option(help="Names such as qed-0, parted by commas: just these trainings now.")] = "",
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Stop after so many, ready to go on.", callback=finite)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="All stages of all arms with a few steps each.")] = False,
    status: Annotated[bool, typer.Option("--status", help="Say what is done, and stop.")] = False,
    collect: Annotated[Path | None, typer.Option(help="Copy the results there, packed, and stop.")] = None,
    device: Annotated[str, typer.Option(help="'auto' takes a GPU if there is one.")] = "auto",
) -> None:
    """Run the main job: train the paper's arms, measure them, write the report."""
    import dataclasses

    from .provenance import plan_sha256
    from .recipes.paper import ARMS
    from .reproduce import collecting, run
    from .reproduce.plan import PLANS, Files, rehearsed

    console = console_for()
    choice("--scale", scale, PLANS)
    given = Files(
        corpus=corpus,
        validation=validation,
        tokenizer=tokenizer,
        words=None if existing("--words", words, folder=True) is None else str(words),
        essays=None if existing("--essays", essays, folder=False) is None else str(essays),
        recall={task: str(path) for task, path in files(data, of_kind(RecallTask)).items()},
    )
    plan = PLANS[scale](given)
    chosen = ARMS if arms == "all" else tuple(names("--arms", [arms], None)) if arms else plan.arms
    plan = dataclasses.replace(plan, arms=chosen)
    plan = dataclasses.replace(plan, seeds=numbers("--seeds", seeds, 0, LARGEST_SEED) if seeds else plan.seeds)
    if scale == "mini" and (needles or practice is not None):
        raise ValueError(f"{'--needles' if needles else '--practice'}: expected a scale with S-NIAH, got mini")
    if needles:
        plan = dataclasses.replace(plan, needles=tuple(names("--needles", [needles], None)))
    if practice is not None:
        plan = dataclasses.replace(plan, practice=practice)
    if plan_file is not None:
        plan = dataclasses.replace(plan, registered=plan_sha256(plan_file))
    folder = writable("--out", out or Path("runs") / (f"{scale}-dry-run" if dry_run else scale), folder=True)
    chosen_plan = rehearsed(plan) if dry_run else plan
    if status:
        run.show_state(chosen_plan, folder, console)
        return
    if collect is not None:
        found = collecting.collect(folder, writable("--collect", collect, folder=True))
        console.print(f"{found} files in {collect}")
        return
    device = device_for(device)
    if scale == "paper":
        run.say_hours(plan, folder, device, console)
    result = run.reproduce(
        chosen_plan,
        folder,
        device=device,
        jobs=jobs or plan.jobs,
        only=only.split(",") if only else [],
        minutes=minutes,
        console=console,
    )
    raise typer.Exit(result)


if __name__ == "__main__":
    app()
