"""`qed bench`: the commands that measure speed."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..eval.harness.suites import SUITES
from .console import console_for, reported
from .options import (
    LARGEST_SIZE,
    LARGEST_WIDTH,
    Batch,
    Data,
    Device,
    Essays,
    Heads,
    Lengths,
    Rows,
    Tokens,
    Width,
    Words,
    choice,
    device_for,
    existing,
    files,
    numbers,
    writable,
)

if TYPE_CHECKING:
    from ..bench.measuring import Bench

commands = typer.Typer(
    help="Measure speed; what is not correct is not timed.",
    epilog="Example: qed bench --tune --width 64 --heads 16 --out runs/settings.json",
    invoke_without_command=True,
)

Out = Annotated[Path | None, typer.Option(help="The JSON file for the numbers.")]
Against = Annotated[str, typer.Option(help="'fla' times flash-linear-attention's GDN-2 in the same run.")]
Size = Annotated[str, typer.Option(help="The model: paper (340M), medium, small, mini or tiny.")]
Rounds = Annotated[int, typer.Option(min=1, max=LARGEST_SIZE, help="How often each candidate is timed.")]

Compiled = Annotated[
    bool, typer.Option("--compile/--no-compile", help="Compile and capture the step, as `qed train` does.")
]


def _bench(out: Path | None, device: str, against: str = "", module: str = "") -> Bench:
    """Check the options that all benchmarks have; what `against` needs is imported before anything runs."""
    from ..bench.measuring import Bench

    choice("--against", against, ("fla", ""))
    if against:
        import_module(module)
    target = None if out is None else writable("--out", out, folder=False)
    return Bench(console=console_for(), device=device_for(device), out=target, fla=bool(against))


@commands.callback()
def _main(
    context: typer.Context,
    tune: Annotated[
        bool, typer.Option("--tune", help="Search launch settings for this GPU and width, in a few minutes.")
    ] = False,
    out: Annotated[
        Path, typer.Option(help="The file for the settings that --tune finds; those for other widths stay in it.")
    ] = Path("runs/settings.json"),
    batch: Rows = 32,
    tokens: Tokens = 2048,
    heads: Heads = 6,
    width: Width = 128,
) -> None:
    if context.invoked_subcommand is not None:
        return
    if not tune:
        typer.echo(context.get_help())
        raise typer.Exit
    from ..bench import tune as tuning
    from ..bench.measuring import GateError
    from ..bench.ops import Shape

    with reported(GateError):
        tuning.tune(_bench(out, "auto"), Shape(batch=batch, tokens=tokens, heads=heads, width=width))


@commands.command("ops", epilog="Example: qed bench ops --against fla --out ops.json")
def _ops(
    out: Out = None,
    against: Against = "",
    device: Device = "auto",
    impl: Annotated[str, typer.Option(help="The form of the op to time.")] = "auto",
    batch: Rows = 32,
    tokens: Tokens = 2048,
    heads: Heads = 6,
    width: Width = 128,
    rounds: Rounds = 20,
) -> None:
    """Time the op, forward and backward, and on a GPU also prefill, decoding and the first call."""
    from ..bench import ops
    from ..bench.measuring import GateError

    shape = ops.Shape(batch=batch, tokens=tokens, heads=heads, width=width)
    with reported(GateError):
        ops.measure(_bench(out, device, against, "fla.ops.gdn2"), shape=shape, impl=impl, rounds=rounds)


@commands.command("model", epilog="Example: qed bench model --size small")
def _model(
    out: Out = None, against: Against = "", size: Size = "paper", device: Device = "auto", rounds: Rounds = 5
) -> None:
    """Time prefill, the first token and generation of the whole model."""
    from ..bench import model
    from ..bench.measuring import GateError
    from ..model.config import SIZES, QEDConfig

    choice("--size", size, SIZES)
    bench = _bench(out, device, against, "fla.layers.gdn2")
    with reported(GateError):
        model.measure(bench, config=QEDConfig(**SIZES[size]), rounds=rounds)


@commands.command("train", epilog="Example: qed bench train --size small --batch 4")
def _train(
    out: Out = None,
    against: Against = "",
    size: Size = "paper",
    batch: Rows = 16,
    tokens: Tokens = 2048,
    device: Device = "auto",
    rounds: Rounds = 10,
    compiled: Compiled = True,
) -> None:
    """Time a training step of QED, GDN-2, a Transformer and, if asked, fla's GDN-2; on a GPU also how idle it is."""
    from ..bench import train
    from ..bench.measuring import GateError
    from ..model.config import SIZES

    choice("--size", size, SIZES)
    bench = _bench(out, device, against, "fla.layers.gdn2")
    with reported(GateError):
        train.measure(bench, size=SIZES[size], batch=batch, tokens=tokens, rounds=rounds, compiled=compiled)


@commands.command("growth", epilog="Example: qed bench growth --size small --lengths 512,2048 --out growth.json")
def _growth(
    out: Out = None,
    against: Against = "",
    size: Size = "paper",
    lengths: Annotated[
        str, typer.Option(help="Lengths in tokens, separated by commas, each a divisor of the longest.")
    ] = "2048,8192,32768,131072",
    device: Device = "auto",
    rounds: Rounds = 3,
    compiled: Compiled = True,
) -> None:
    """Time training, prefill and decoding against the length of a text, beside a Transformer.

    A table and a figure are written beside the numbers. A run that was interrupted goes on with its file.
    """
    from ..bench import growth
    from ..bench.measuring import GateError
    from ..model.config import SIZES

    choice("--size", size, SIZES)
    wanted = growth.Growth(
        size=SIZES[size],
        lengths=numbers("--lengths", lengths, 16, LARGEST_SIZE),
        rounds=rounds,
        compiled=compiled,
    )
    bench = _bench(out, device, against, "fla.layers.gdn2")
    with reported(GateError):
        growth.measure(bench, wanted)


@commands.command("serve", epilog="Example: qed bench serve --size small --out serve.json")
def _serve(
    out: Out = None,
    size: Size = "small",
    requests: Annotated[
        int, typer.Option(min=1, max=LARGEST_WIDTH, help="Requests that vLLM has at the same time.")
    ] = 32,
    device: Device = "auto",
    rounds: Rounds = 5,
) -> None:
    """Time vLLM with one request and with many, beside `stream` of one sequence, in one run."""
    import_module("vllm")
    from ..bench import serve
    from ..bench.measuring import GateError
    from ..model.config import SIZES

    choice("--size", size, SIZES)
    with reported(GateError):
        serve.measure(_bench(out, device), size=SIZES[size], requests=requests, rounds=rounds)


@commands.command("eval", epilog="Example: qed bench eval --tokenizer llama2.model --size small --samples 50")
def _eval(
    tokenizer: Annotated[str, typer.Option(help="A SentencePiece .model or a tokenizer.json.")],
    out: Out = None,
    against: Against = "",
    size: Size = "paper",
    lengths: Lengths = "1024,2048,4096,8192,16384,32768",
    samples: Annotated[int, typer.Option(min=1, max=LARGEST_SIZE, help="Prompts of each length.")] = 500,
    words: Words = None,
    suite: Annotated[
        str, typer.Option(help=f"Time one of lm-eval's suites beside its own `hf` model: {', '.join(SUITES)}.")
    ] = "",
    data: Data = None,
    essays: Essays = None,
    batch: Batch = 64,
    device: Device = "auto",
) -> None:
    """Time S-NIAH-1, or a suite of lm-eval, on a model with random weights."""
    from ..bench import eval as evaluation
    from ..bench import suites
    from ..bench.measuring import GateError
    from ..eval.options import Options
    from ..model.config import SIZES

    choice("--size", size, SIZES)
    choice("--suite", suite, ("", *SUITES))
    options = Options(
        lengths=numbers("--lengths", lengths, 1, LARGEST_SIZE),
        samples=samples,
        words=existing("--words", words, folder=True),
        essays=existing("--essays", essays, folder=False),
        data=files(data, [name for name, x in SUITES.get(suite, {}).items() if x.reads_file]),
        batch=batch,
    )
    bench = _bench(out, device, against, "fla.layers.gdn2")
    if suite:
        with reported(GateError):
            suites.measure(bench, size=SIZES[size], tokenizer=tokenizer, suite=suite, options=options)
        return
    evaluation.measure(bench, size=SIZES[size], tokenizer=tokenizer, options=options)
