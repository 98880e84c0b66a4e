"""What the runs say, in sentences: seed by seed from their intervals, and over trainings from the tests."""

from __future__ import annotations

from math import isfinite
from typing import NamedTuple

from ..analysis import paper
from ..analysis.breakdown import Contrast, contrasts, splits
from ..analysis.names import TITLES, length_title, name_of, recall_title
from ..analysis.registered import MECHANISM, Answer, Outcome
from ..analysis.results import Run, discordant
from ..analysis.selection import (
    arms_of,
    by_arm_and_seed,
    longest_within_training,
    main_task,
    past_training,
    recall_names,
    results_of,
    seeds_of,
)
from ..analysis.stats import clopper_pearson, paired_difference
from ..analysis.trainings import ENDPOINTS, Study
from ..recipes.paper import ARMS
from .training_tables import heading, title_of

LEARNED = 0.9  # share of needles at the training length
NOT_LEARNED = "Retrieval has not been learned at the training length"


def signed(value: float, digits: int) -> str:
    """A number with its sign, in the characters that sentences have for it: + and −."""
    return f"{value:+.{digits}f}".replace("-", "−")


# The answer to whether QED retrieves more than GDN-2, in a word or two.
IN_A_WORD = {"yes": "Yes", "contrary": "No, the contrary", "equivalent": "No difference", "undecided": "Undecided"}


class Verdict(NamedTuple):
    """What the trainings say about the paper's main claim, in one line."""

    answer: str  # as the test gave it
    word: str
    said: str


def verdict(outcomes: list[Outcome], runs: list[Run]) -> Verdict:
    """The answer of the last look there is to whether QED retrieves more than GDN-2 past the training length. That of a
    look which counts only if no more seeds come is said to be so far."""
    for outcome in (x for x in outcomes if x.looks):
        look, study = outcome.looks[-1]
        for x in outcome.answers(look, study):
            if (x.test.endpoint, x.test.name) == ("R1", MECHANISM[0]) and x.estimate is not None:
                word = IN_A_WORD.get(x.verdict.split(",")[0], x.verdict) + (" so far" if look.open else "")
                kind = f"registered, {look.name}" if outcome.experiment.registered else "exploratory"
                return Verdict(x.verdict, word, _verdict(x, study, kind, runs))
    said = (
        "QED and GDN-2 were not both trained and evaluated past the training length, so that they cannot be compared."
    )
    return Verdict("", "Not tested", said)


def _verdict(x: Answer, study: Study, kind: str, runs: list[Run]) -> str:
    assert x.estimate is not None
    low, high = x.estimate.interval()
    value, task = x.estimate.value, TITLES[study.main]
    counts = " and ".join(f"{len(study.groups('R1')[arm])} of {name_of(arm)}" for arm in MECHANISM[1])
    more = f"{abs(value):.1f} points {'more' if value > 0 else 'less'}"
    text = f"Past the training length QED finds {more} than GDN-2 on {task}"
    if not isfinite(low):
        text += f", over trainings: {counts}. So few trainings say nothing about others."
    else:
        text += (
            f" (95 % interval over trainings {signed(low, 1)} to {signed(high, 1)}; {counts}; p = {x.p_holm:.2g} after "
        )
        text += f"Holm's correction; {kind})."
    if any(said.startswith(NOT_LEARNED) for said in learned(runs)):
        text += " Some trainings have not learned to retrieve even at the training length."
    return text


def answers(outcomes: list[Outcome], left_out: list[str]) -> list[str]:
    """The answers to the first family of tests, and which trainings did not count."""
    said = []
    for outcome in outcomes:
        if not outcome.looks:
            said.append(f"{outcome.experiment.name or 'Trainings'}: no seed is complete, so that no test can be made.")
        for look, study in outcome.looks:
            for x in outcome.answers(look, study):
                if x.estimate is not None and x.family == next(iter(outcome.experiment.families)):
                    endpoint = ENDPOINTS[x.test.endpoint]
                    said.append(
                        f"{heading(outcome)}{look.name}, level {look.level:g}. {title_of(x.test.endpoint, study)}, "
                        f"{x.test.name}: {endpoint.shown_estimate(x.estimate)} {endpoint.unit}, p {x.p:.2g}, after "
                        f"Holm's correction {x.p_holm:.2g}. The answer is {x.verdict}."
                    )
        for why in dict.fromkeys(why for why in outcome.status.values() if why != "counts"):
            units = ", ".join(unit for unit, status in outcome.status.items() if status == why)
            said.append(f"{heading(outcome)}not in these tests: {units} ({why}).")
    return said + [f"Left out of this page: {name_and_reason}." for name_and_reason in left_out]


def conclusions(runs: list[Run]) -> list[str]:
    """What can and cannot be concluded, seed by seed."""
    return [
        *_what_there_is(runs),
        *learned(runs),
        *(_contrast(contrast) for contrast in contrasts(runs, main_task(runs))),
        *_splits(runs),
        _loss_claim(runs),
        *(_every_length_claim(runs, other) for other in ("gdn2", "qed-rand")),
        *_recall_claims(runs),
        *_eigenvalue_claims(runs),
        _limits(runs),
    ]


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


def learned(runs: list[Run]) -> list[str]:
    """Whether every run retrieves at its training length, without which there is nothing to compare past it."""
    poor, unknown, task = [], [], main_task(runs)
    for run in runs:
        name, result = f"{name_of(run.arm)} seed {run.seed}", longest_within_training(run, task)
        if result is None:
            unknown.append(name)
        elif result.result["accuracy"] < LEARNED:
            low, high = clopper_pearson(result.result["correct"], result.result["samples"])
            poor.append(f"{name} ({100 * low:.0f} to {100 * high:.0f} %)")
    texts = []
    if poor:
        texts.append(f"{NOT_LEARNED} by {', '.join(poor)}: what they do past it says nothing about the mechanism.")
    elif not unknown:
        texts.append(f"Every run is right in at least {100 * LEARNED:.0f} % of {TITLES[task]} at its training length.")
    if unknown:
        texts.append(f"There is no {TITLES[task]} result at or below the training length for {', '.join(unknown)}.")
    return texts


def _contrast(x: Contrast) -> str:
    pair = f"{name_of(x.first)} against {name_of(x.second)}"
    if not x.seeds:
        return f"The {x.name} ({pair}) cannot be judged: results are missing."
    signs = {seed: (low > 0) - (high < 0) for seed, (_, (low, high), _) in x.seeds.items()}
    shown = ", ".join(f"{signed(d, 1)} points at seed {seed}" for seed, (d, _, _) in x.seeds.items())
    if len(set(signs.values())) == 1 and 0 not in signs.values():
        direction = "better" if 1 in signs.values() else "worse"
        verdict = f"is {direction} on these examples at every seed trained"
        if len(signs) == 1:
            verdict += ", which is one: this says nothing about another training"
        elif x.overall is not None and x.overall[1].low <= 0 <= x.overall[1].high:
            low, high = x.overall[1]
            verdict += f"; over trainings the interval, {signed(low, 1)} to {signed(high, 1)}, still contains zero"
    elif {1, -1} <= set(signs.values()):
        verdict = "reverses between seeds, so that it is undecided"
    else:
        verdict = "is not decided: at some seed the interval contains zero"
    return f"The {x.name} ({pair}: {shown}) {verdict}."


def _splits(runs: list[Run]) -> list[str]:
    """Where a difference from GDN-2 comes from."""
    texts = []
    for split in (x for x in splits(runs) if x.task == main_task(runs)):
        shown = "; ".join(
            f"{signed(split.whole[seed][0], 2)} points at seed {seed}, of which {signed(split.training[seed][0], 2)} "
            f"remain with λ set to 0 at inference, and {signed(split.correction[seed][0], 2)} come from the correction"
            for seed in split.whole
        )
        where = ", ".join(length_title(n) for n in split.lengths)
        texts.append(f"{name_of(split.arm)} − GDN-2 on {TITLES[split.task]} at {where}: {shown}.")
    return texts


def _judged(claim: str, agreements: list[bool | None]) -> str:
    """A claim of the paper: holds, does not hold, or open, from comparisons that agree, disagree or do not tell."""
    if not agreements:
        return f"Paper: {claim}. Open here: there are no results to judge it by."
    if all(x is None for x in agreements):
        return f"Paper: {claim}. Open here: every comparison is missing or undecided."
    if any(x is False for x in agreements):
        told = [x for x in agreements if x is not None]
        right = sum(told)
        return f"Paper: {claim}. Does not hold here: {right} of {len(told)} comparisons agree."
    if any(x is None for x in agreements):
        return f"Paper: {claim}. Open here: some comparisons are missing or undecided."
    return f"Paper: {claim}. Holds here in all {len(agreements)} comparisons."


def _loss_claim(runs: list[Run]) -> str:
    known, spreads = by_arm_and_seed(runs), []
    for seed in seeds_of(runs):
        losses = [known[arm, seed].validation_loss for arm in arms_of(runs) if (arm, seed) in known]
        finished = [loss for loss in losses if loss is not None]
        spreads += [max(finished) - min(finished)] if len(finished) > 1 else []
    if not spreads:
        return "Paper: QED does not change the validation loss. Open here: fewer than two arms have one."
    return (
        "Paper: arms of a seed differ by up to 0.0013 nats of validation loss. "
        f"Here they differ by up to {max(spreads):.4f}."
    )


def _every_length_claim(runs: list[Run], other: str) -> str:
    known, task = by_arm_and_seed(runs), main_task(runs)
    agreements: list[bool | None] = []
    for seed in seeds_of(runs):
        if ("qed", seed) not in known or (other, seed) not in known:
            agreements.append(None)
            continue
        one, two = known["qed", seed], known[other, seed]
        for name in (f"{task}-{n}" for n in past_training([one, two], task)):
            both = name in one.results and name in two.results
            agreements.append(
                one.results[name].result["accuracy"] > two.results[name].result["accuracy"] if both else None
            )
    asked = "S-NIAH-1" if task == "niah_single_1" else f"S-NIAH-1 (here: {TITLES[task]})"
    claim = f"QED is above {name_of(other)} on {asked} at every length past the training length, at every seed"
    return _judged(claim, agreements)


def _recall_claims(runs: list[Run]) -> list[str]:
    known, texts = by_arm_and_seed(runs), []
    for name in (x for x in recall_names(runs) if x.startswith("fda")):
        agreements: list[bool | None] = []
        for seed in (x for x in seeds_of(runs) if ("qed", x) in known and ("gdn2", x) in known):
            one, two = (known[arm, seed].results.get(name) for arm in ("qed", "gdn2"))
            if one is None or two is None:
                agreements.append(None)
                continue
            difference, (low, high) = paired_difference(*discordant(one, two))
            agreements.append(None if low <= 0 <= high else difference > 0)
        title = recall_title(name, results_of(runs, name))
        texts.append(_judged(f"QED raises FDA above GDN-2 at every seed (here: {title})", agreements))
    return texts


def _eigenvalue_claims(runs: list[Run]) -> list[str]:
    ranges = [
        run.eigenvalues["all"]["eigenvalue"]["quantiles"]
        for run in runs
        if run.arm == paper.EIGENVALUES["rule"] and run.eigenvalues
    ]
    texts = []
    for least, most in ((-0.25, 1.25), (paper.EIGENVALUES["least"], paper.EIGENVALUES["most"])):
        claim = f"without projection, eigenvalues stay within [{least}, {most}]".replace("-", "−")
        texts.append(_judged(claim, [x["0.0"] >= least and x["1.0"] <= most for x in ranges]))
    return texts


def _limits(runs: list[Run]) -> str:
    seeds = seeds_of(runs)
    tokens = {run.config["total_tokens"] for run in runs}
    text = f"All of this is about models trained on {', '.join(f'{x:,}' for x in sorted(tokens))} tokens"
    text += (
        ", where the paper's had 15,000,000,000: agreement is no proof at its scale, and disagreement no refutation."
    )
    few = f" With {len(seeds)} seed{'s' if len(seeds) != 1 else ''}, what varies between trainings is hardly measured."
    return text + (few if len(seeds) < 5 else "")
