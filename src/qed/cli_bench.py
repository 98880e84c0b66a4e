"""`qed bench`: every command is a thin door to a module that measures."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from .cli_parts import (
    LARGEST_SIZE,
    LARGEST_WIDTH,
    choice,
    console_for,
    device_for,
    existing,
    numbers,
    reported,
    writable,
)

Out = Annotated[Path | None, typer.Option(help="Where the numbers go, as JSON.")]
bench = typer.Typer(help="Measure speed, behind a gate on correctness.", invoke_without_command=True)


@bench.callback()
def bench_main(
    context: typer.Context,
    tune: Annotated[
        bool, typer.Option("--tune", help="Search launch settings for this machine's GPU: some ten minutes.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Where --tune writes what it found.")] = Path("runs/settings.json"),
) -> None:
    if context.invoked_subcommand is not None:
        return
    if not tune:
        typer.echo(context.get_help())
        raise typer.Exit
    from .bench import GateError, Shape
    from .tune import tune as search

    writable("--out", out, folder=False)
    with reported(GateError):
        search(console_for(), out=out, device=device_for("auto"), shape=Shape())


def _peer(against: str, module: str) -> bool:
    """Whether flash-linear-attention is to be timed too; what is needed of it is imported before anything runs."""
    choice("--against", against, ("fla", ""))
    if against:
        import_module(module)
    return bool(against)


def _target(out: Path | None) -> Path | None:
    return None if out is None else writable("--out", out, folder=False)


@bench.command()
def ops(
    out: Out = None,
    against: Annotated[str, typer.Option(help="'fla' to time flash-linear-attention's GDN-2 in the same run.")] = "",
    device: Annotated[str, typer.Option(help="'auto' takes a GPU if there is one.")] = "auto",
    impl: Annotated[str, typer.Option(help="The form to time.")] = "auto",
    batch: Annotated[int, typer.Option(min=1, max=LARGEST_SIZE)] = 32,
    tokens: Annotated[int, typer.Option(min=1, max=LARGEST_SIZE)] = 2048,
    heads: Annotated[int, typer.Option(min=1, max=LARGEST_WIDTH)] = 6,
    width: Annotated[int, typer.Option(min=1, max=LARGEST_WIDTH, help="Of keys and of values.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, max=LARGEST_SIZE, help="Calls of each candidate that count.")] = 20,
) -> None:
    """Time the op, forward and backward, and on a GPU also prefill, decoding and the first call."""
    from .bench import GateError, Shape
    from .bench import ops as measure

    fla = _peer(against, "fla.ops.gdn2")
    shape = Shape(batch=batch, tokens=tokens, heads=heads, width=width)
    with reported(GateError):
        measure(
            console_for(),
            out=_target(out),
            device=device_for(device),
            shape=shape,
            impl=impl,
            fla=fla,
            rounds=rounds,
        )


@bench.command()
def model(
    out: Out = None,
    against: Annotated[str, typer.Option(help="'fla' to time flash-linear-attention's GDN-2 model too.")] = "",
    size: Annotated[str, typer.Option(help="paper (340M), small, mini or tiny.")] = "paper",
    device: Annotated[str, typer.Option(help="'auto' takes a GPU if there is one.")] = "auto",
    rounds: Annotated[int, typer.Option(min=1, max=LARGEST_SIZE, help="Prefills of each candidate that count.")] = 5,
) -> None:
    """Time prefill and generation of the whole model."""
    from .bench import GateError
    from .bench_model import measure
    from .model.config import SIZES, QEDConfig

    fla = _peer(against, "fla.layers.gdn2")
    choice("--size", size, SIZES)
    with reported(GateError):
        measure(
            console_for(),
            out=_target(out),
            device=device_for(device),
            config=QEDConfig(**SIZES[size]),
            fla=fla,
            rounds=rounds,
        )


@bench.command(name="train")
def bench_train(
    out: Out = None,
    against: Annotated[str, typer.Option(help="'fla' to time flash-linear-attention's GDN-2 model too.")] = "",
    size: Annotated[str, typer.Option(help="paper (340M), small, mini or tiny.")] = "paper",
    batch: Annotated[int, typer.Option(min=1, max=LARGEST_SIZE)] = 16,
    tokens: Annotated[int, typer.Option(min=1, max=LARGEST_SIZE)] = 2048,
    device: Annotated[str, typer.Option(help="'auto' takes a GPU if there is one.")] = "auto",
    rounds: Annotated[int, typer.Option(min=1, max=LARGEST_SIZE, help="Steps of each candidate that count.")] = 10,
    compiled: Annotated[bool, typer.Option("--compile/--no-compile")] = True,
) -> None:
    """Time one training step: QED, GDN-2, a Transformer, and fla's GDN-2 if asked; on a GPU also how idle it is."""
    from .bench import GateError
    from .bench_train import measure
    from .model.config import SIZES

    fla = _peer(against, "fla.layers.gdn2")
    choice("--size", size, SIZES)
    with reported(GateError):
        measure(
            console_for(),
            out=_target(out),
            device=device_for(device),
            size=SIZES[size],
            fla=fla,
            rounds=rounds,
            batch=batch,
            tokens=tokens,
            compiled=compiled,
        )


@bench.command("eval")
def bench_eval(
    tokenizer: Annotated[str, typer.Option(help="A SentencePiece .model or a tokenizer.json.")],
    out: Out = None,
    against: Annotated[str, typer.Option(help="'fla' to time flash-linear-attention's GDN-2 model too.")] = "",
    size: Annotated[str, typer.Option(help="paper (340M), small, mini or tiny.")] = "paper",
    lengths: Annotated[str, typer.Option(help="In tokens.")] = "1024,2048,4096,8192,16384,32768",
    samples: Annotated[int, typer.Option(min=1, max=LARGEST_SIZE, help="Of each length.")] = 500,
    words: Annotated[Path | None, typer.Option(help="Word lists for keys, instead of the wonderwords package.")] = None,
    batch: Annotated[int, typer.Option(min=1, max=LARGEST_SIZE, help="Prompts at a time.")] = 64,
    device: Annotated[str, typer.Option(help="'auto' takes a GPU if there is one.")] = "auto",
) -> None:
    """Time S-NIAH-1 on a model with random weights."""
    from .bench_eval import measure
    from .eval.options import Options
    from .model.config import SIZES

    fla = _peer(against, "fla.layers.gdn2")
    choice("--size", size, SIZES)
    options = Options(
        lengths=numbers("--lengths", lengths, 1, LARGEST_SIZE),
        samples=samples,
        words=existing("--words", words, folder=True),
        batch=batch,
    )
    measure(
        console_for(),
        out=_target(out),
        device=device_for(device),
        size=SIZES[size],
        tokenizer=tokenizer,
        options=options,
        fla=fla,
    )
