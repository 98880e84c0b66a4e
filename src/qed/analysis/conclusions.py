"""What runs can and cannot conclude, worked out from their intervals."""

from __future__ import annotations

from typing import Any

from ..recipes.paper import ARMS
from . import paper
from .breakdown import splits
from .results import Run, discordant
from .stats import clopper_pearson, paired_difference
from .tables import (
    TITLES,
    arms_of,
    by_arm_and_seed,
    contrasts,
    length_title,
    main_task,
    name_of,
    needle_lengths,
    past_training,
    recall_names,
    recall_title,
    results_of,
    seeds_of,
)

LEARNED = 0.9  # of needles at the training length


def conclusions(runs: list[Run]) -> list[str]:
    return [*_what_there_is(runs), *learned(runs), *_contrasts(runs), *_splits(runs), *_claims(runs), *_limits(runs)]


def _what_there_is(runs: list[Run]) -> list[str]:
    arms, seeds, known = arms_of(runs), seeds_of(runs), by_arm_and_seed(runs)
    absent = [f"{name_of(a)} seed {s}" for a in arms for s in seeds if (a, s) not in known]
    unfinished = [f"{name_of(run.arm)} seed {run.seed}" for run in runs if not run.complete]
    text = f"There are {len(runs)} trainings: {len(arms)} arms, {len(seeds)} seed{'s' if len(seeds) != 1 else ''}."
    missing_arms = [name for arm, name in ARMS.items() if arm not in arms]
    if missing_arms:
        text += f" Not trained here: {', '.join(missing_arms)}."
    if absent:
        text += f" Missing: {', '.join(absent)}."
    if unfinished:
        text += f" Not finished: {', '.join(unfinished)}."
    return [text]


def at_training_length(run: Run, task: str) -> dict[str, Any] | None:
    """The result of the longest prompts none of which has more tokens than a row of training."""
    found = [run.results[f"{task}-{n}"] for n in needle_lengths([run], task)]
    fitting = [x for x in found if x.tokens[-1] <= run.train_length]
    return fitting[-1].result if fitting else None


def learned(runs: list[Run]) -> list[str]:
    """Whether there is retrieval to compare."""
    poor, unknown, task = [], [], main_task(runs)
    for run in runs:
        name, found = f"{name_of(run.arm)} seed {run.seed}", at_training_length(run, task)
        if found is None:
            unknown.append(name)
        elif found["accuracy"] < LEARNED:
            low, high = clopper_pearson(found["correct"], found["samples"])
            poor.append(f"{name} ({100 * low:.0f} to {100 * high:.0f} %)")
    texts = []
    if poor:
        texts.append(
            f"Retrieval has not been learned at the training length by {', '.join(poor)}: "
            "what they do past it says nothing about the mechanism."
        )
    elif not unknown:
        texts.append(f"Every run is right in at least {100 * LEARNED:.0f} % of {TITLES[task]} at its training length.")
    if unknown:
        texts.append(f"No {TITLES[task]} result at or below the training length: {', '.join(unknown)}.")
    return texts


def _contrasts(runs: list[Run]) -> list[str]:
    texts = []
    for x in contrasts(runs, main_task(runs)):
        pair = f"{name_of(x.first)} against {name_of(x.second)}"
        if not x.seeds:
            texts.append(f"The {x.name} ({pair}) cannot be judged: results are missing.")
            continue
        signs = {seed: (low > 0) - (high < 0) for seed, (_, (low, high), _) in x.seeds.items()}
        shown = ", ".join(f"{d:+.1f} points at seed {seed}" for seed, (d, _, _) in x.seeds.items())
        if len(set(signs.values())) == 1 and 0 not in signs.values():
            direction = "better" if 1 in signs.values() else "worse"
            verdict = f"is {direction} on these examples at every seed trained"
            if len(signs) == 1:
                verdict += ", which is one: nothing is said about another training"
            elif x.overall is not None and x.overall[1].low <= 0 <= x.overall[1].high:
                low, high = x.overall[1]
                verdict += f"; over trainings the interval, {low:+.1f} to {high:+.1f}, still holds zero"
        elif {1, -1} <= set(signs.values()):
            verdict = "reverses between seeds: undecided"
        else:
            verdict = "is not decided: at some seed the interval holds zero"
        texts.append(f"The {x.name} ({pair}: {shown}) {verdict}.")
    return texts


def _splits(runs: list[Run]) -> list[str]:
    """Where a difference from GDN-2 comes from."""
    texts = []
    for x in (x for x in splits(runs) if x.task == main_task(runs)):
        shown = "; ".join(
            f"{x.whole[seed][0]:+.2f} points at seed {seed}, of which {x.training[seed][0]:+.2f} are there with λ set "
            f"to 0 at inference, and {x.correction[seed][0]:+.2f} come with the correction"
            for seed in x.whole
        )
        where = ", ".join(length_title(n) for n in x.lengths)
        texts.append(f"{name_of(x.arm)} less GDN-2 on {TITLES[x.task]} at {where}: {shown}.")
    return texts


def _claims(runs: list[Run]) -> list[str]:
    """The paper's claims, one by one: holds, does not hold, or open."""
    known, seeds, task, texts = by_arm_and_seed(runs), seeds_of(runs), main_task(runs), []
    asked = "S-NIAH-1" if task == "niah_single_1" else f"S-NIAH-1 (here: {TITLES[task]})"

    def judged(claim: str, outcomes: list[bool | None]) -> str:
        if not outcomes:
            return f"Paper: {claim}. Open here: no results to judge it by."
        if all(x is None for x in outcomes):
            return f"Paper: {claim}. Open here: every comparison is missing or undecided."
        if any(x is False for x in outcomes):
            right = sum(x is True for x in outcomes)
            return f"Paper: {claim}. Does not hold here: {right} of {len(outcomes)} comparisons agree."
        if any(x is None for x in outcomes):
            return f"Paper: {claim}. Open here: some comparisons are missing or undecided."
        return f"Paper: {claim}. Holds here in all {len(outcomes)} comparisons."

    losses = {seed: [known[a, seed].validation_loss for a in arms_of(runs) if (a, seed) in known] for seed in seeds}
    whole = {seed: [x for x in xs if x is not None] for seed, xs in losses.items()}
    spreads = [max(xs) - min(xs) for xs in whole.values() if len(xs) > 1]
    if spreads:
        texts.append(
            f"Paper: arms of a seed differ by up to 0.0013 nats of validation loss. Here by up to {max(spreads):.4f}."
        )
    else:
        texts.append("Paper: QED does not change the validation loss. Open here: fewer than two arms have one.")
    for other, words in (("gdn2", "GDN-2"), ("qed-rand", "QED-rand")):
        outcomes: list[bool | None] = []
        for seed in seeds:
            if ("qed", seed) not in known or (other, seed) not in known:
                outcomes.append(None)
                continue
            one, two = known["qed", seed], known[other, seed]
            for name in (f"{task}-{n}" for n in past_training([one, two], task)):
                there = name in one.results and name in two.results
                outcomes.append(
                    one.results[name].result["accuracy"] > two.results[name].result["accuracy"] if there else None
                )
        texts.append(
            judged(f"QED is above {words} on {asked} at every length past the training length, at every seed", outcomes)
        )
    for name in (x for x in recall_names(runs) if x.startswith("fda")):
        outcomes = []
        for seed in seeds:
            if ("qed", seed) in known and ("gdn2", seed) in known:
                here, there_ = known["qed", seed].results.get(name), known["gdn2", seed].results.get(name)
                if here is None or there_ is None:
                    outcomes.append(None)
                    continue
                difference, (low, high) = paired_difference(*discordant(here, there_))
                outcomes.append(None if low <= 0 <= high else difference > 0)
        title = recall_title(name, results_of(runs, name))
        texts.append(judged(f"QED raises FDA above GDN-2 at every seed (here: {title})", outcomes))
    ranges = [
        run.eigenvalues["all"]["eigenvalue"]["quantiles"]
        for run in runs
        if run.arm == "qed-nogate-noproj" and run.eigenvalues
    ]
    for least, most in ((-0.25, 1.25), (paper.EIGENVALUES["least"], paper.EIGENVALUES["most"])):
        claim = f"without projection, eigenvalues stay within [{least}, {most}]"
        texts.append(judged(claim.replace("-", "−"), [x["0.0"] >= least and x["1.0"] <= most for x in ranges]))
    return texts


def _limits(runs: list[Run]) -> list[str]:
    seeds = seeds_of(runs)
    tokens = {run.config["total_tokens"] for run in runs}
    text = f"All of this is of models trained on {', '.join(f'{x:,}' for x in sorted(tokens))} tokens"
    text += (
        ", where the paper's had 15,000,000,000: agreement is no proof at its scale, and disagreement no refutation."
    )
    few = f" With {len(seeds)} seed{'s' if len(seeds) != 1 else ''}, what varies between trainings is hardly measured."
    return [text + (few if len(seeds) < 5 else "")]
