"""The commands about trained models: text, measurements, the report, and conversion of weights."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..analysis.paper import EIGENVALUES
from ..eval.harness.suites import MEMBERS, SUITES
from ..eval.task import NeedleTask
from ..eval.tasks import TASKS, of_kind, reading
from . import completion
from .console import console_for
from .options import (
    LARGEST_SEED,
    LARGEST_SIZE,
    Batch,
    Checkpoint,
    Data,
    Device,
    Essays,
    Import,
    Lengths,
    OptionalCheckpoint,
    Prompts,
    Samples,
    Seed,
    Strength,
    Suites,
    Tasks,
    Tokenizer,
    Variant,
    Words,
    checkpoint_folder,
    choice,
    device_for,
    existing,
    factors,
    files,
    finite,
    names,
    numbers,
    results_folder,
    run_data,
    writable,
)

if TYPE_CHECKING:
    from ..eval.options import Options

commands = typer.Typer()

RESUMES = "The same command resumes where it stopped."
EvalOut = Annotated[
    Path | None,
    typer.Option(
        help="The folder for results; by default eval/, and strength/S/ with another --strength than 1, in the run's "
        f"folder, where `qed report` finds them, or in that of a checkpoint without a run. {RESUMES}"
    ),
]
Window = Annotated[int, typer.Option(min=64, max=LARGEST_SIZE, help="Tokens of the context window in variant B.")]
MaxLength = Annotated[
    int | None,
    typer.Option(min=64, max=LARGEST_SIZE, help="The most tokens of a prompt and its answer in variants A."),
]


@commands.command("explain", epilog="Example: qed explain runs/mini")
def _explain(checkpoint: Checkpoint, device: Device = "auto", import_: Import = None) -> None:
    """Say which route every piece of a model takes in training, prefill and decoding, and why not the others."""
    from ..model.base import weights_dtype
    from ..model.explaining import explain_model
    from ..model.loading import load

    chosen = device_for(device)
    model = load(checkpoint, dtype=weights_dtype(chosen), device=chosen)
    console_for().print(str(explain_model(model)), markup=False, highlight=False, soft_wrap=True)


@commands.command("generate", epilog='Example: qed generate runs/mini "Once upon a time" --temperature 0.8')
def _generate(
    checkpoint: Checkpoint,
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, max=LARGEST_SIZE, help="Stop after so many tokens.")] = 128,
    temperature: Annotated[
        float, typer.Option(help="Of sampling; 0 always takes the most likely token.", callback=finite)
    ] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sample among the k most likely tokens; 0 for all.")] = 0,
    top_p: Annotated[
        float,
        typer.Option(help="Sample among the most likely tokens that together have probability p.", callback=finite),
    ] = 1.0,
    strength: Strength = 1.0,
    seed: Seed = 0,
    tokenizer: Annotated[
        Path | None, typer.Option(help="The tokenizer's folder, if the checkpoint's has none.")
    ] = None,
    device: Device = "auto",
    import_: Import = None,
) -> None:
    """Continue a text, and print it while it is generated."""
    from .generate import write

    write(
        checkpoint,
        prompt,
        max_new_tokens=max_new_tokens,
        sampling={"temperature": temperature, "top_k": top_k, "top_p": top_p},
        strength=strength,
        seed=seed,
        tokenizer=tokenizer or checkpoint,
        device=device_for(device),
        console=console_for(stderr=True),
    )


def _checked(
    tasks: list[str],
    lengths: str,
    words: Path | None,
    essays: Path | None,
    data: list[str] | None,
    prompts: Path | None,
    readers: Container[str] | None = None,
) -> dict[str, Any]:
    """Read and check the options that say where examples come from; return them as fields of `eval.options.Options`.
    `readers` are the tasks that may have a file, by default those of our own that do."""
    readers = reading("data") if readers is None else readers
    return {
        "lengths": numbers("--lengths", lengths, 1, LARGEST_SIZE),
        "words": existing("--words", words, folder=True),
        "essays": existing("--essays", essays, folder=False),
        "data": files(data, [name for name in tasks if name in readers]),
        "prompts": None if prompts is None else writable("--prompts", prompts, folder=True),
    }


@commands.command("eval", epilog="Example: qed eval runs/mini --task pairs --lengths 128,256")
def _eval(
    checkpoint: OptionalCheckpoint = None,
    task: Tasks = None,
    suite: Suites = None,
    out: EvalOut = None,
    lengths: Lengths = "1024,2048,4096,8192,16384,32768",
    samples: Samples = None,
    tokenizer: Tokenizer = None,
    words: Words = None,
    essays: Essays = None,
    data: Data = None,
    variant: Variant = "A1",
    context: Window = 2048,
    max_length: MaxLength = None,
    sizing: Annotated[str, typer.Option(help="How haystacks are filled up to a length: linear or binary.")] = "linear",
    seed: Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="The seed by which examples are drawn.")] = 42,
    bos: Annotated[bool, typer.Option(help="Begin prompts with the tokenizer's <s>, if it has one.")] = True,
    strength: Strength = 1.0,
    batch: Batch = 64,
    prompts: Prompts = None,
    prompts_only: Annotated[bool, typer.Option("--prompts-only", help="Write the frozen prompts, and stop.")] = False,
    harness: Annotated[str, typer.Option(help="'lm-eval' runs that harness's own tasks of these names instead.")] = "",
    device: Device = "auto",
    import_: Import = None,
) -> None:
    """Evaluate a checkpoint: retrieval, recall, loss by position, and the suites of lm-eval."""
    from ..eval.options import Options
    from ..eval.run import evaluate

    choice("--harness", harness, ("lm-eval", ""))
    tasks, readers = _asked(task, suite, harness, prompts_only)
    settings: dict[str, Any] = {
        **{"samples": samples, "seed": seed, "sizing": sizing, "variant": variant, "context": context},
        **{"max_length": max_length, "bos": bos, "batch": batch, "strength": strength},
    }
    options = Options(**_checked(tasks, lengths, words, essays, data, prompts, readers), **settings)
    if out is None and checkpoint is not None:
        out = results_folder(checkpoint) / ("eval" if strength == 1 else f"strength/{strength:g}")
    if prompts_only:
        _write_prompts(tasks, options, checkpoint, tokenizer, out)
        return
    if checkpoint is None or out is None:
        raise ValueError("CHECKPOINT: expected a folder that save_pretrained wrote, got none")
    writable("--out", out, folder=True)
    chosen = device_for(device)
    if harness or suite:
        from ..eval.harness.running import run

        run(checkpoint, tasks, options, out=out, device=chosen, console=console_for(), tokenizer=tokenizer)
        return
    _warn(tasks, options, checkpoint, tokenizer)
    evaluate(checkpoint, tasks, options, out=out, tokenizer=tokenizer, device=chosen, console=console_for())


def _asked(
    task: list[str] | None, suite: list[str] | None, harness: str, prompts_only: bool
) -> tuple[list[str], Container[str] | None]:
    """The names of the tasks that are asked for; and of lm-eval's, those that may read a file of --data."""
    if suite:
        if task or prompts_only:
            said = "--task" if task else "--prompts-only"
            raise ValueError(f"--suite: expected no {said} beside it, got both")
        found = [name for x in names("--suite", suite, SUITES) for name in SUITES[x]]
        return found, [name for name in found if MEMBERS[name].reads_file]
    if harness:
        found = names("--task", task, None)
        return found, found
    return names("--task", task, of_kind(NeedleTask) if prompts_only else TASKS), None


def _warn(tasks: list[str], options: Options, checkpoint: Path, tokenizer: str | None) -> None:
    """Warn of tasks that the tokenizer cannot express. What is no checkpoint is refused where it is loaded."""
    from ..eval.expressing import warn
    from ..eval.run import matching_tokenizer

    if checkpoint.is_dir():
        warn(tasks, options, matching_tokenizer(checkpoint, tokenizer), console_for(stderr=True))


def _write_prompts(
    tasks: list[str], options: Options, checkpoint: Path | None, tokenizer: str | None, out: Path | None
) -> None:
    """Write the frozen prompts of every task and length, and print where they are."""
    from ..eval.prompts import check_needles, frozen
    from ..eval.run import matching_tokenizer

    out = out or options.prompts
    if out is None:
        raise ValueError("--out: expected a folder for the prompts, since there is no CHECKPOINT, got none")
    writable("--out", out, folder=True)
    console = console_for()
    encoder = matching_tokenizer(checkpoint, tokenizer)
    check_needles(tasks, options, encoder)
    for name in tasks:
        for length in options.lengths:
            console.print(str(frozen(name, length, options, encoder, out, console)))


@commands.command("strength", epilog="Example: qed strength runs/mini --task pairs --lengths 128 --scales 0,1,2")
def _strength(
    checkpoint: Checkpoint,
    scales: Annotated[
        str, typer.Option(help="Factors s on every λ, separated by commas; 1 must be among them.")
    ] = "-1,0,0.5,1,1.5,2",
    task: Annotated[
        list[str] | None,
        typer.Option(help="As in `qed eval`; niah_single_1 if not given.", autocompletion=completion.tasks),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The folder for results; by default strength/ in the run's folder, where `qed report` finds it, or in "
            f"that of a checkpoint without a run. {RESUMES}"
        ),
    ] = None,
    lengths: Lengths = "4096,8192,16384,32768",
    samples: Samples = None,
    tokenizer: Tokenizer = None,
    words: Words = None,
    essays: Essays = None,
    data: Data = None,
    prompts: Prompts = None,
    variant: Variant = "A1",
    batch: Batch = 64,
    device: Device = "auto",
    import_: Import = None,
) -> None:
    """Scale a trained model's λ by s, and compare with s = 1, example by example."""
    from ..analysis.strength import sweep
    from ..eval.options import Options

    tasks = names("--task", task or ["niah_single_1"], TASKS)
    chosen = factors("--scales", scales)
    checked = _checked(tasks, lengths, words, essays, data, prompts)
    options = Options(**checked, samples=samples, variant=variant, batch=batch)
    place = writable("--out", out or results_folder(checkpoint) / "strength", folder=True)
    device = device_for(device)
    _warn(tasks, options, checkpoint, tokenizer)
    sweep(
        checkpoint,
        chosen,
        tasks,
        options,
        out=place,
        tokenizer=tokenizer,
        device=device,
        console=console_for(),
    )


@commands.command("eigenvalues", epilog="Example: qed eigenvalues runs/mini --tokens 100000")
def _eigenvalues(
    checkpoint: Checkpoint,
    data: Annotated[
        Path | None,
        typer.Option(
            help="A folder that `qed prepare` wrote with the same tokenizer; by default the held-out data of the run, "
            "or what it was trained on if it had none."
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens",
            min=1,
            help="How many samples: tokens times heads times layers; by default "
            f"{EIGENVALUES['samples']:,}, or all that the data have if that is less.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The JSON file to write; by default eigenvalues.json in the run's folder, where `qed report` finds "
            "it, or in that of a checkpoint without a run."
        ),
    ] = None,
    device: Device = "auto",
    import_: Import = None,
) -> None:
    """Measure e = 1 − aᵀk, and what else the transitions do, over real text."""
    from ..analysis.eigenvalues import write_eigenvalues

    file = writable("--out", out or results_folder(checkpoint) / "eigenvalues.json", folder=False)
    data = data or run_data(checkpoint)
    write_eigenvalues(checkpoint, data, samples=tokens, out=file, device=device_for(device), console=console_for())


@commands.command("report", epilog="Example: qed report runs --out report")
def _report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Folders of runs, or of one run, with results in eval/ and so on; or of tracking and recall, packed "
            "or not, beside others."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The folder for report.html, tables and figures.")] = Path("runs/report"),
    plan: Annotated[
        Path | None,
        typer.Option(help="A registered plan: add its tests, of the trainings made with its code and under it."),
    ] = None,
    import_: Import = None,
) -> None:
    """Write the paper's tables and figures, and what can be concluded, from result files."""
    from ..report.arm_page import is_of_arms, write_arms
    from ..report.page import write

    console = console_for()
    place = writable("--out", out, folder=True)
    if any(map(is_of_arms, runs)):
        console.print(f"written: {write_arms(runs, place, console, plan=plan)}")
        return
    console.print(f"written: {write(runs[0], place, console, more=runs[1:], plan=plan)}")


@commands.command("convert", epilog="Example: qed convert theirs.safetensors ours.safetensors --kind gdn2")
def _convert(
    source: Annotated[
        Path,
        typer.Argument(
            help="A safetensors file with one layer or a whole model, or the folder of a model or of a finished run.",
            callback=checkpoint_folder,
        ),
    ],
    target: Annotated[Path, typer.Argument(help="The safetensors file to write, which must not exist.")],
    kind: Annotated[str, typer.Option(help="What the layers are: gdn2, kda, gdn or deltanet.")],
    to: Annotated[str, typer.Option(help="'qed' from flash-linear-attention's names, 'fla' back to them.")] = "qed",
) -> None:
    """Convert layers' weights between flash-linear-attention's form and ours; nothing is rounded."""
    from ..model.conversion import KINDS, convert_file

    choice("--kind", kind, KINDS)
    choice("--to", to, ("qed", "fla"))
    writable("TARGET", target, folder=False)
    file = source / "model.safetensors" if source.is_dir() else source
    count = convert_file(file, target, kind=kind, to=to)
    console_for().print(f"{target}: {count} tensors")
