"""Commands about trained models: text, measurements, the report. Each is a thin door to a function of the library."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .cli_parts import (
    LARGEST_SEED,
    LARGEST_SIZE,
    choice,
    console_for,
    device_for,
    existing,
    factors,
    files,
    finite,
    names,
    numbers,
    writable,
)
from .eval.task import NeedleTask, RecallTask
from .eval.tasks import TASKS, of_kind, reading

Seed = Annotated[int, typer.Option(min=0, max=LARGEST_SEED)]
Strength = Annotated[float, typer.Option(help="Factor s on every λ.", callback=finite)]
Device = Annotated[str, typer.Option(help="'auto' takes a GPU if there is one.")]
Samples = Annotated[
    int | None,
    typer.Option(min=1, max=LARGEST_SIZE, help="Of each task and length; 500 needles and all of others if not given."),
]
Tokenizer = Annotated[str | None, typer.Option(help="A .model or .json file, if not with the checkpoint.")]
Words = Annotated[Path | None, typer.Option(help="Word lists for keys, instead of the wonderwords package.")]
Essays = Annotated[Path | None, typer.Option(help="The other tasks' haystack: .json or .txt, also .xz.")]
Variant = Annotated[str, typer.Option(help=f"Of {', '.join(of_kind(RecallTask))}: A0, A1 or B.")]
Prompts = Annotated[Path | None, typer.Option(help="A folder of frozen prompts to share between runs.")]
Batch = Annotated[int, typer.Option(min=1, max=LARGEST_SIZE, help="Prompts at a time.")]
Lengths = Annotated[str, typer.Option(help="Of needle tasks, in tokens.")]


def generate(
    checkpoint: Annotated[Path, typer.Argument(help="A folder that save_pretrained wrote.")],
    prompt: Annotated[str, typer.Argument(help="The text to go on from.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, max=LARGEST_SIZE)] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.", callback=finite)] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="Only among the so many likeliest; 0 for all.")] = 0,
    top_p: Annotated[
        float, typer.Option(help="Only among the likeliest with so much probability together.", callback=finite)
    ] = 1.0,
    strength: Strength = 1.0,
    seed: Seed = 0,
    tokenizer: Annotated[Path | None, typer.Option(help="Where the tokenizer is, if not with the checkpoint.")] = None,
    device: Device = "auto",
) -> None:
    """Generate text, shown as it comes."""
    from .model.terminal import write

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


def eval_(
    checkpoint: Annotated[Path | None, typer.Argument(help="A folder that save_pretrained wrote.")] = None,
    task: Annotated[list[str] | None, typer.Option(help=f"One or more of {', '.join(TASKS)}.")] = None,
    out: Annotated[Path, typer.Option(help="Where results go; the same command again goes on.")] = Path("runs/eval"),
    lengths: Lengths = "1024,2048,4096,8192,16384,32768",
    samples: Samples = None,
    tokenizer: Tokenizer = None,
    words: Words = None,
    essays: Essays = None,
    data: Annotated[
        list[str] | None, typer.Option(help="TASK=FILE of JSON lines; positions=FOLDER of `qed prepare`.")
    ] = None,
    variant: Variant = "A1",
    context: Annotated[int, typer.Option(min=64, max=LARGEST_SIZE, help="Tokens of variant B's window.")] = 2048,
    max_length: Annotated[
        int | None, typer.Option(min=64, max=LARGEST_SIZE, help="Of variant A's prompts with their answer.")
    ] = None,
    sizing: Annotated[str, typer.Option(help="How haystacks are filled: linear or binary.")] = "linear",
    seed: Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="Of the examples.")] = 42,
    bos: Annotated[bool, typer.Option(help="Begin prompts with the tokenizer's <s>, if it has one.")] = True,
    strength: Strength = 1.0,
    batch: Batch = 64,
    prompts: Prompts = None,
    prompts_only: Annotated[bool, typer.Option("--prompts-only", help="Write the frozen prompts and stop.")] = False,
    harness: Annotated[str, typer.Option(help="'lm-eval' to run its own tasks of these names instead.")] = "",
    device: Device = "auto",
) -> None:
    """Evaluate a checkpoint: retrieval, recall, loss by position."""
    from .eval.options import Options
    from .eval.prompts import check_needles, frozen
    from .eval.run import evaluate, matching_tokenizer

    console = console_for()
    choice("--harness", harness, ("lm-eval", ""))
    tasks = names("--task", task, None if harness else of_kind(NeedleTask) if prompts_only else TASKS)
    options = Options(
        lengths=numbers("--lengths", lengths, 1, LARGEST_SIZE),
        samples=samples,
        seed=seed,
        sizing=sizing,
        words=existing("--words", words, folder=True),
        essays=existing("--essays", essays, folder=False),
        data=files(data, [name for name in tasks if name in reading("data")]),
        variant=variant,
        context=context,
        max_length=max_length,
        bos=bos,
        batch=batch,
        strength=strength,
        prompts=None if prompts is None else writable("--prompts", prompts, folder=True),
    )
    writable("--out", out, folder=True)
    if prompts_only:
        encoder = matching_tokenizer(checkpoint, tokenizer)
        check_needles(tasks, options, encoder)
        for name in tasks:
            for length in options.lengths:
                console.print(str(frozen(name, length, options, encoder, out, console)))
        return
    if checkpoint is None:
        raise ValueError("CHECKPOINT: expected a folder that save_pretrained wrote, got none")
    if harness:
        from .eval.harness import run

        run(checkpoint, tasks, options, out=out, device=device_for(device), console=console)
        return
    evaluate(checkpoint, tasks, options, out=out, tokenizer=tokenizer, device=device_for(device), console=console)


def strength(
    checkpoint: Annotated[Path, typer.Argument(help="A folder that save_pretrained wrote.")],
    scales: Annotated[str, typer.Option(help="Factors s on every λ; 1 among them.")] = "-1,0,0.5,1,1.5,2",
    task: Annotated[list[str] | None, typer.Option(help="As in `qed eval`; niah_single_1 if not given.")] = None,
    out: Annotated[Path, typer.Option(help="Where results go; again goes on.")] = Path("runs/strength"),
    lengths: Lengths = "4096,8192,16384,32768",
    samples: Samples = None,
    tokenizer: Tokenizer = None,
    words: Words = None,
    essays: Essays = None,
    data: Annotated[list[str] | None, typer.Option(help="TASK=FILE of JSON lines.")] = None,
    variant: Variant = "A1",
    prompts: Prompts = None,
    batch: Batch = 64,
    device: Device = "auto",
) -> None:
    """Scale a trained model's λ and compare with s = 1, example by example."""
    from .analysis.strength import sweep
    from .eval.options import Options

    tasks = names("--task", task or ["niah_single_1"], TASKS)
    chosen = factors("--scales", scales)
    options = Options(
        lengths=numbers("--lengths", lengths, 1, LARGEST_SIZE),
        samples=samples,
        words=existing("--words", words, folder=True),
        essays=existing("--essays", essays, folder=False),
        data=files(data, [name for name in tasks if name in reading("data")]),
        variant=variant,
        prompts=None if prompts is None else writable("--prompts", prompts, folder=True),
        batch=batch,
    )
    writable("--out", out, folder=True)
    sweep(
        checkpoint,
        chosen,
        tasks,
        options,
        out=out,
        tokenizer=tokenizer,
        device=device_for(device),
        console=console_for(),
    )


def eigenvalues(
    checkpoint: Annotated[Path, typer.Argument(help="A folder that save_pretrained wrote.")],
    data: Annotated[Path, typer.Option(help="A folder of `qed prepare`, of the same tokenizer.")],
    tokens: Annotated[
        int, typer.Option("--tokens", min=1, help="Samples: tokens times heads times layers.")
    ] = 1_180_000,
    out: Annotated[Path, typer.Option(help="The JSON file to write.")] = Path("eigenvalues.json"),
    device: Device = "auto",
) -> None:
    """Look at e = 1 − aᵀk, and what else the transitions do, over real text."""
    from .analysis.report import write_eigenvalues

    writable("--out", out, folder=False)
    write_eigenvalues(checkpoint, data, samples=tokens, out=out, device=device_for(device), console=console_for())


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, with their results in eval/ and so on.")],
    out: Annotated[Path, typer.Option(help="The folder for report.html, tables and figures.")] = Path("runs/report"),
    plan: Annotated[
        Path | None, typer.Option(help="A registered plan: its tests, from the trainings of its code and of itself.")
    ] = None,
) -> None:
    """Write the paper's tables and figures, and what can be concluded, from result files."""
    from .analysis.report import write

    console = console_for()
    place = writable("--out", out, folder=True)
    console.print(f"written: {write(runs[0], place, console, more=runs[1:], plan=plan)}")
