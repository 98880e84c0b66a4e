"""One arm and seed in a process of its own: train, evaluate, evaluate with λ = 0, sweep λ, measure eigenvalues.

    python -m qed.reproduce.unit OUT qed-0 cpu
    python -m qed.reproduce.unit OUT s5/query-only-0 cpu my_arms.py

Each stage resumes where it stopped. Finished stages are listed in OUT/runs/NAME/stages.json and never done again.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import torch
from rich.console import Console
from tokenizers import Tokenizer

from ..analysis.eigenvalues import write_eigenvalues
from ..analysis.strength import SCALES, sweep
from ..data import Generated, tokenization
from ..eval.options import Options
from ..eval.prompts import frozen
from ..eval.records import lines
from ..eval.run import evaluate
from ..files import read_json, write_json
from ..locks import LockedError, held
from ..model.causal_lm import QEDForCausalLM
from ..provenance import check_imported, register
from ..recipes.importing import import_file
from ..report.card import describe
from ..train.loop import STOPPED, Watch, train
from .plan import Plan, Unit

WATCHED = 32  # prompts that are tried whenever a run is validated
ELSEWHERE = 76  # exit status of a unit that another process is working on


def options(plan: Plan, out: Path) -> Options:
    """The options of the needle tasks, with their frozen prompts in the folder `out`."""
    return Options(
        lengths=plan.lengths,
        samples=plan.samples,
        words=None if plan.words is None else Path(plan.words),
        essays=None if plan.essays is None else Path(plan.essays),
        data={task: Path(path) for task, path in plan.recall.items()},
        prompts=out / "prompts",
        batch=plan.batch,
    )


def watcher(plan: Plan, out: Path, encoder: Tokenizer) -> Watch:
    """What is tried whenever a run is validated, so that its metrics show when retrieval appears.

    The returned function gives the share of prompts of the first needle task, at the shortest length, whose whole
    answer is the likeliest one token by token.

    Args:
        plan: the reproduction.
        out: its folder, with the frozen prompts.
        encoder: the models' tokenizer.
    """
    path = frozen(plan.needles[0], plan.lengths[0], options(plan, out), encoder, out, Console(quiet=True))
    begin, _ = tokenization.ends(encoder)
    rows, answered = [], []
    for sample in islice(lines(path), WATCHED):
        prompt, whole = (
            encoder.encode(text, add_special_tokens=False).ids
            for text in (sample["prompt"], f"{sample['prompt']} {sample['answer']}")
        )
        rows.append(([] if begin is None else [begin]) + whole)
        answered.append(len(whole) - len(prompt))
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])

    def watch(model: QEDForCausalLM) -> dict[str, float]:
        device, right = model.device, 0
        likeliest = model(ids.to(device), attention_mask=mask.to(device)).logits.argmax(-1).cpu()
        for row, tokens, count in zip(likeliest, rows, answered, strict=True):
            right += row[len(tokens) - 1 - count : len(tokens) - 1].tolist() == tokens[-count:]
        return {"retrieval": right / len(rows)}

    return watch


def stages(plan: Plan, unit: Unit, out: Path, device: str, console: Console) -> dict[str, Callable[[], int | None]]:
    """What each stage of a unit does, by name. A number other than 0 that one returns stops the unit with that status.

    Args:
        plan: the reproduction.
        unit: the training.
        out: the reproduction's folder.
        device: where the model runs.
        console: where progress is printed.
    """
    run = out / "runs" / unit.name
    encoder = tokenization.load(str(out / "data" / "tokenizer.json"))

    def training() -> int:
        watch = watcher(plan, out, encoder)
        return train(plan.config(unit, out), run, device=device, console=console, watch=watch)

    def evaluation() -> None:
        def answer(tasks: list[str], chosen: Options) -> None:
            evaluate(run / "export", tasks, chosen, out=run / "eval", tokenizer=None, device=device, console=console)

        given = options(plan, out)
        answer(list(plan.needles), given)
        if plan.recall:
            answer(list(plan.recall), Options(data=given.data, samples=plan.recall_samples, batch=plan.batch))
        measured = Options(lengths=(plan.positions,), samples=plan.position_rows)
        answer(["positions"], dataclasses.replace(measured, data={"positions": out / "validation"}))
        describe(run / "export", run)  # the model card has what was measured

    def off() -> None:
        given, place = dataclasses.replace(options(plan, out), strength=0.0), run / "strength" / "0"
        evaluate(run / "export", list(plan.needles), given, out=place, tokenizer=None, device=device, console=console)

    def strength() -> None:
        """Scales that the stages `eval` and `off` have evaluated already are not evaluated again."""
        given = options(plan, out)
        sweep(
            run / "export",
            SCALES,
            [plan.needles[0]],
            dataclasses.replace(given, lengths=plan.strength_lengths),
            out=run / "strength",
            trained=run / "eval",
            tokenizer=None,
            device=device,
            console=console,
        )

    def eigenvalues() -> None:
        write_eigenvalues(
            run / "export",
            out / "validation",
            samples=plan.eigenvalue_samples,
            out=run / "eigenvalues.json",
            device=device,
            console=console,
        )

    known = {"train": training, "eval": evaluation, "off": off, "strength": strength, "eigenvalues": eigenvalues}
    return {name: known[name] for name in plan.stages(unit)}


def stages_of_setting(
    plan: Plan, unit: Unit, out: Path, device: str, console: Console
) -> dict[str, Callable[[], int | None]]:
    """What the stages of a unit do that is trained on rows which are made, by name: it is asked what it was trained on.

    Args:
        plan, unit, out, device, console: as in `stages`.
    """
    run, config = out / "runs" / unit.name, plan.config(unit, out)

    def evaluation() -> None:
        task = Generated(config.data).kind.task
        asked = Options(lengths=plan.lengths or (config.sequence,), samples=plan.samples, batch=plan.batch)
        evaluate(run / "export", [task], asked, out=run / "eval", tokenizer=None, device=device, console=console)
        describe(run / "export", run)

    return {"train": lambda: train(config, run, device=device, console=console), "eval": evaluation}


def finished(out: Path, unit: Unit) -> dict[str, float]:
    """The finished stages of a unit, in order, with the seconds that each took."""
    path = out / "runs" / unit.name / "stages.json"
    return dict(read_json(path)) if path.exists() else {}


def main(out: Path, name: str, device: str, imports: list[str]) -> int:
    """Do a unit's stages unless another process is doing them, and return the exit status.

    Args:
        out: the reproduction's folder.
        name: of the unit, such as "qed-0".
        device: where the model runs.
        imports: the files that `--import` of `qed reproduce` named.
    """
    for file in imports:
        import_file(Path(file))
    console = Console(width=120, markup=False, emoji=False)
    try:
        with held(out / "runs" / name, "unit"):
            return work_through(out, Unit.parse(name), device, console)
    except LockedError as error:
        console.print(str(error), markup=False, soft_wrap=True)  # one line of the log
        return ELSEWHERE


def work_through(out: Path, unit: Unit, device: str, console: Console) -> int:
    """Do the stages of a unit that are not finished, and return the exit status.

    Args:
        out: the reproduction's folder, with its plan.
        unit: the training.
        device: where the model runs.
        console: where progress is printed.
    """
    plan = Plan.from_json((out / "plan.json").read_text())
    check_imported(plan.imported, out)  # the file may have been edited since the plan was written
    register(plan.registered)
    made = stages_of_setting if plan.settings else stages
    for stage, work in made(plan, unit, out, device, console).items():
        done = finished(out, unit)
        if stage in done:
            continue
        console.rule(stage)
        start = time.perf_counter()
        status = work()
        if status:
            return status
        write_json(out / "runs" / unit.name / "stages.json", done | {stage: time.perf_counter() - start})
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:]))
    except KeyboardInterrupt:
        sys.exit(STOPPED)
