"""The command line. Every command is a thin door to a function of the library."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from . import __version__
from .cli_bench import bench
from .cli_parts import choice, device_for, files, numbers, reported

app = typer.Typer(
    name="qed",
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
    heads: Annotated[int, typer.Option(min=1)] = 6,
    width: Annotated[int, typer.Option(min=1, help="Of keys and of values.")] = 128,
    tokens: Annotated[int, typer.Option(min=1)] = 200,
) -> None:
    """Check this installation: versions, and every form of the op, forward and backward, against the loop."""
    import torch

    from .doctor import examine

    console = Console()
    choice(console, "--dtype", dtype, ("bfloat16", "float16", "float32"))
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
    limit: Annotated[int | None, typer.Option(min=1, help="Documents to take, from the first.")] = None,
    part: Annotated[str, typer.Option(help="held:N for one document in N, by its hash; rest:N for the others.")] = "",
    practice: Annotated[
        float, typer.Option(help="Share of characters to be documents that practise the needle tasks, mixed in.")
    ] = 0.0,
) -> None:
    """Turn documents into token shards for training."""
    from .data.prepare import prepare as run
    from .eval.practice import Practice

    console = Console(stderr=True)
    with reported(console, ValueError, OSError):
        run(
            source,
            tokenizer=tokenizer,
            out=out,
            column=column,
            licence=licence,
            shard_tokens=shard_tokens,
            limit=limit,
            part=part,
            mix=Practice(share=practice) if practice else None,
            console=console,
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

    console = Console()
    with reported(console, ValueError, OSError, Diverged):
        pairs = [item.partition("=") for item in set_ or []]
        if any(not found for _, found, _ in pairs):
            raise ValueError(f"--set: expected field=value, got {next(n for n, f, _ in pairs if not f)}")
        config = build(recipe, {name: value for name, _, value in pairs})
        if dry_run:
            from .train.plan import plan

            plan(config, console)
            return
        status = run(config, out, device=device_for(device), console=console)
    raise typer.Exit(status)


@app.command()
def replay(
    folder: Annotated[Path, typer.Argument(help="A run's diverged-… folder.")],
    device: Annotated[str, typer.Option(help="'auto' takes a GPU if there is one.")] = "auto",
) -> None:
    """Run the batch that broke a training run once more, layer by layer."""
    from .train.replay import replay as run

    console = Console()
    with reported(console, ValueError):
        run(folder, device=device_for(device), console=console)


@app.command()
def generate(
    checkpoint: Annotated[Path, typer.Argument(help="A folder that save_pretrained wrote.")],
    prompt: Annotated[str, typer.Argument(help="The text to go on from.")],
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Only among the so many likeliest; 0 for all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Only among the likeliest with so much probability together.")] = 1.0,
    strength: Annotated[float, typer.Option(help="Factor s on every λ.")] = 1.0,
    seed: Annotated[int, typer.Option()] = 0,
    tokenizer: Annotated[Path | None, typer.Option(help="Where the tokenizer is, if not with the checkpoint.")] = None,
    device: Annotated[str, typer.Option(help="'auto' takes a GPU if there is one.")] = "auto",
) -> None:
    """Generate text, shown as it comes."""
    from .model.terminal import write

    console = Console(stderr=True)
    with reported(console, OSError, ValueError):
        write(
            checkpoint,
            prompt,
            max_new_tokens=max_new_tokens,
            sampling={"temperature": temperature, "top_k": top_k, "top_p": top_p},
            strength=strength,
            seed=seed,
            tokenizer=tokenizer or checkpoint,
            device=device_for(device),
            console=console,
        )


@app.command("eval")
def eval_(
    checkpoint: Annotated[Path | None, typer.Argument(help="A folder that save_pretrained wrote.")] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(
            help="niah_single_1, _2, _3, niah_multikey_1, pairs, fda, swde, squad_completion, mqar or positions"
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where results go; the same command again goes on.")] = Path("runs/eval"),
    lengths: Annotated[str, typer.Option(help="Of needle tasks, in tokens.")] = "1024,2048,4096,8192,16384,32768",
    samples: Annotated[
        int | None, typer.Option(min=1, help="Of each task and length; 500 needles and all of others if not given.")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="A .model or .json file, if not with the checkpoint.")] = None,
    words: Annotated[Path | None, typer.Option(help="Word lists for keys, instead of the wonderwords package.")] = None,
    essays: Annotated[Path | None, typer.Option(help="The other tasks' haystack: .json or .txt, also .xz.")] = None,
    data: Annotated[
        list[str] | None, typer.Option(help="TASK=FILE of JSON lines; positions=FOLDER of `qed prepare`.")
    ] = None,
    variant: Annotated[str, typer.Option(help="Of fda, swde and squad_completion: A0, A1 or B.")] = "A1",
    context: Annotated[int, typer.Option(min=64, help="Tokens of variant B's window.")] = 2048,
    max_length: Annotated[int | None, typer.Option(min=64, help="Of variant A's prompts with their answer.")] = None,
    sizing: Annotated[str, typer.Option(help="How haystacks are filled: linear or binary.")] = "linear",
    seed: Annotated[int, typer.Option(help="Of the examples.")] = 42,
    bos: Annotated[bool, typer.Option(help="Begin prompts with the tokenizer's <s>, if it has one.")] = True,
    strength: Annotated[float, typer.Option(help="Factor s on every λ.")] = 1.0,
    batch: Annotated[int, typer.Option(min=1, help="Prompts at a time.")] = 64,
    prompts: Annotated[Path | None, typer.Option(help="A folder of frozen prompts to share between runs.")] = None,
    prompts_only: Annotated[bool, typer.Option("--prompts-only", help="Write the frozen prompts and stop.")] = False,
    harness: Annotated[str, typer.Option(help="'lm-eval' to run its own tasks of these names instead.")] = "",
    device: Annotated[str, typer.Option(help="'auto' takes a GPU if there is one.")] = "auto",
) -> None:
    """Evaluate a checkpoint: retrieval, recall, loss by position."""
    from .eval.run import NEEDLES, TASKS, Options, evaluate, frozen, matching_tokenizer

    console = Console()
    tasks = [name for item in task or [] for name in item.split(",")]
    choice(console, "--harness", harness, ("lm-eval", ""))
    with reported(console, ValueError, OSError, ImportError):
        if not tasks:
            raise ValueError(f"--task: expected one or more of {', '.join(TASKS)}, got none")
        if not harness:
            for name in tasks:
                choice(console, "--task", name, TASKS)
        options = Options(
            lengths=numbers("--lengths", lengths),
            samples=samples,
            seed=seed,
            sizing=sizing,
            words=words,
            essays=essays,
            data=files(data),
            variant=variant,
            context=context,
            max_length=max_length,
            bos=bos,
            batch=batch,
            strength=strength,
            prompts=prompts,
        )
        if prompts_only:
            encoder = matching_tokenizer(checkpoint, tokenizer)
            for name in tasks:
                choice(console, "--task", name, NEEDLES)
                for length in options.lengths:
                    console.print(str(frozen(name, length, options, encoder, out, console)), markup=False)
            return
        if checkpoint is None:
            raise ValueError("CHECKPOINT: expected a folder that save_pretrained wrote, got none")
        if harness:
            from .eval.harness import run

            run(checkpoint, tasks, options, out=out, device=device_for(device), console=console)
            return
        evaluate(checkpoint, tasks, options, out=out, tokenizer=tokenizer, device=device_for(device), console=console)


@app.command()
def strength(
    checkpoint: Annotated[Path, typer.Argument(help="A folder that save_pretrained wrote.")],
    scales: Annotated[str, typer.Option(help="Factors s on every λ; 1 among them.")] = "-1,0,0.5,1,1.5,2",
    task: Annotated[list[str] | None, typer.Option(help="As in `qed eval`; niah_single_1 if not given.")] = None,
    out: Annotated[Path, typer.Option(help="Where results go; again goes on.")] = Path("runs/strength"),
    lengths: Annotated[str, typer.Option(help="Of needle tasks, in tokens.")] = "4096,8192,16384,32768",
    samples: Annotated[int | None, typer.Option(min=1, help="Of each task and length.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="A .model or .json file, if not with the checkpoint.")] = None,
    words: Annotated[Path | None, typer.Option(help="Word lists for keys, instead of the wonderwords package.")] = None,
    essays: Annotated[Path | None, typer.Option(help="The other tasks' haystack: .json or .txt, also .xz.")] = None,
    data: Annotated[list[str] | None, typer.Option(help="TASK=FILE of JSON lines.")] = None,
    variant: Annotated[str, typer.Option(help="Of fda, swde and squad_completion: A0, A1 or B.")] = "A1",
    prompts: Annotated[Path | None, typer.Option(help="A folder of frozen prompts to share between runs.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Prompts at a time.")] = 64,
    device: Annotated[str, typer.Option(help="'auto' takes a GPU if there is one.")] = "auto",
) -> None:
    """Scale a trained model's λ and compare with s = 1, example by example."""
    from .analysis.strength import sweep
    from .eval.run import TASKS, Options

    console = Console()
    tasks = [name for item in task or ["niah_single_1"] for name in item.split(",")]
    with reported(console, ValueError, OSError, ImportError):
        for name in tasks:
            choice(console, "--task", name, TASKS)
        options = Options(
            lengths=numbers("--lengths", lengths),
            samples=samples,
            words=words,
            essays=essays,
            data=files(data),
            variant=variant,
            prompts=prompts,
            batch=batch,
        )
        factors = tuple(float(x) for x in scales.split(","))
        sweep(
            checkpoint,
            factors,
            tasks,
            options,
            out=out,
            tokenizer=tokenizer,
            device=device_for(device),
            console=console,
        )


@app.command()
def eigenvalues(
    checkpoint: Annotated[Path, typer.Argument(help="A folder that save_pretrained wrote.")],
    data: Annotated[Path, typer.Option(help="A folder of `qed prepare`, of the same tokenizer.")],
    tokens: Annotated[
        int, typer.Option("--tokens", min=1, help="Samples: tokens times heads times layers.")
    ] = 1_180_000,
    out: Annotated[Path, typer.Option(help="The JSON file to write.")] = Path("eigenvalues.json"),
    device: Annotated[str, typer.Option(help="'auto' takes a GPU if there is one.")] = "auto",
) -> None:
    """Look at e = 1 − aᵀk, and what else the transitions do, over real text."""
    from .analysis.report import write_eigenvalues

    console = Console()
    with reported(console, ValueError, OSError, ImportError):
        write_eigenvalues(checkpoint, data, samples=tokens, out=out, device=device_for(device), console=console)


@app.command()
def report(
    runs: Annotated[Path, typer.Argument(help="A folder of runs, with their results in eval/ and so on.")],
    out: Annotated[Path, typer.Option(help="The folder for report.html, tables and figures.")] = Path("runs/report"),
) -> None:
    """Write the paper's tables and figures, and what can be concluded, from result files."""
    from .analysis.report import write

    console = Console()
    with reported(console, ValueError, OSError, ImportError):
        path = write(runs, out)
        console.print(f"written: {path}", markup=False)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="A safetensors file with one layer or a whole model.")],
    target: Annotated[Path, typer.Argument(help="The safetensors file to write; must not exist.")],
    kind: Annotated[str, typer.Option(help="What the layers are: gdn2, kda, gdn or deltanet.")],
    to: Annotated[str, typer.Option(help="'qed' from flash-linear-attention's names, 'fla' back to them.")] = "qed",
) -> None:
    """Convert layers' weights between flash-linear-attention's form and ours; nothing is rounded."""
    from .model.conversion import convert_file

    console = Console()
    choice(console, "--to", to, ("qed", "fla"))
    with reported(console, ValueError, FileExistsError):
        count = convert_file(source, target, kind=kind, to=to)
    console.print(f"{target}: {count} tensors")


@app.command()
def reproduce(
    scale: Annotated[str, typer.Option(help="mini (two cores), small (one large GPU) or paper (days).")] = "mini",
    arms: Annotated[str, typer.Option(help="Rules, or RULE@λ_max, by commas; all: the paper's five.")] = "",
    seeds: Annotated[str, typer.Option(help="Parted by commas, instead of the scale's own.")] = "",
    out: Annotated[Path | None, typer.Option(help="Everything goes there; the same command again goes on.")] = None,
    corpus: Annotated[str | None, typer.Option(help="Source for small and paper, as in `qed prepare`.")] = None,
    validation: Annotated[str | None, typer.Option(help="A held-out source, instead of a part of the corpus.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="As in `qed prepare`.")] = None,
    words: Annotated[Path | None, typer.Option(help="Word lists for keys, instead of the wonderwords package.")] = None,
    essays: Annotated[
        Path | None, typer.Option(help="S-NIAH-2's and -3's haystack; without it they are left out.")
    ] = None,
    data: Annotated[list[str] | None, typer.Option(help="TASK=FILE of fda, swde and squad_completion.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Trainings at a time.")] = None,
    only: Annotated[str, typer.Option(help="Names such as qed-0, parted by commas: just these trainings now.")] = "",
    minutes: Annotated[float | None, typer.Option(min=0, help="Stop after so many, ready to go on.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="All stages of all arms with a few steps each.")] = False,
    status: Annotated[bool, typer.Option("--status", help="Say what is done, and stop.")] = False,
    collect: Annotated[Path | None, typer.Option(help="Copy the results there, packed, and stop.")] = None,
    device: Annotated[str, typer.Option(help="'auto' takes a GPU if there is one.")] = "auto",
) -> None:
    """Run the main job: train the paper's arms, measure them, write the report."""
    import dataclasses

    from .recipes.paper import ARMS
    from .reproduce.plan import PLANS, Files, rehearsed

    console = Console()
    choice(console, "--scale", scale, PLANS)
    with reported(console, ValueError, OSError, RuntimeError, ImportError):
        try:
            from .reproduce import collecting, run
        except ImportError as error:
            raise ImportError(f"the report needs pip install 'qed-attention[analysis]': {error}") from error
        given = Files(
            corpus=corpus,
            validation=validation,
            tokenizer=tokenizer,
            words=None if words is None else str(words),
            essays=None if essays is None else str(essays),
            recall={task: str(path) for task, path in files(data).items()},
        )
        plan = PLANS[scale](given)
        chosen = ARMS if arms == "all" else tuple(arms.split(","))
        plan = dataclasses.replace(plan, arms=chosen if arms else plan.arms)
        plan = dataclasses.replace(plan, seeds=numbers("--seeds", seeds) if seeds else plan.seeds)
        folder = out or Path("runs") / (f"{scale}-dry-run" if dry_run else scale)
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"--out: expected a folder, got the file {folder}")
        chosen_plan = rehearsed(plan) if dry_run else plan
        if status:
            run.show_state(chosen_plan, folder, console)
            return
        if collect is not None:
            console.print(f"{collecting.collect(folder, collect)} files in {collect}", markup=False)
            return
        if scale == "paper":
            run.say_hours(plan, folder, device_for(device), console)
        result = run.reproduce(
            chosen_plan,
            folder,
            device=device_for(device),
            jobs=jobs or plan.jobs,
            only=only.split(",") if only else [],
            minutes=minutes,
            console=console,
        )
    raise typer.Exit(result)


if __name__ == "__main__":
    app()
