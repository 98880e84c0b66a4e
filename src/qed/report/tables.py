"""The tables of one training after the other: the paper's own ones, with its numbers beside ours, and some more."""

from __future__ import annotations

from ..analysis import paper
from ..analysis.breakdown import contrasts, splits
from ..analysis.names import NEEDLES, TITLES, length_title, name_of, recall_title, result_title
from ..analysis.results import Result, Run
from ..analysis.selection import (
    arms_of,
    by_arm_and_seed,
    main_task,
    needle_lengths,
    not_comparable,
    past_training,
    recall_names,
    results_of,
    seeds_of,
)
from ..analysis.stats import Interval, clopper_pearson
from ..analysis.strength import compare
from ..analysis.trainings import rate
from ..eval.task import NeedleTask
from ..eval.tasks import of_kind
from ..recipes.paper import ARMS
from .markup import Place, Table, beside
from .suites import suite_tables

PAST_TRAINING = "A length is past the training length if its shortest prompt has more tokens than a row of training."


def all_tables(runs: list[Run]) -> list[Table]:
    """Every table that there are results for."""
    tables = [validation(runs)]
    tables += [retrieval(runs, task) for task in NEEDLES if needle_lengths(runs, task)]
    main = main_task(runs)
    if recall_names(runs) and not needle_lengths(runs, main):
        tables.append(retrieval(runs, main))
    tables.append(contrast_table(runs))
    tables += [table for table in (first_answers(runs), split_table(runs)) if table.rows]
    tables += [strength_sweep(runs)] if any(run.strengths for run in runs) else []
    tables += [eigenvalue_table(runs)] if any(run.eigenvalues for run in runs) else []
    tables += suite_tables(runs)
    return tables + [table for table in (positions_table(runs), transitions(runs)) if table.rows]


def percent(result: Result | None) -> str | None:
    """The per cent that are right, with the exact interval in brackets; None without a result."""
    if result is None:
        return None
    k, n = result.result["correct"], result.result["samples"]
    low, high = clopper_pearson(k, n)
    return f"{100 * k / n:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def brackets(interval: Interval) -> str:
    """An interval in points, in brackets."""
    return f"[{interval.low:+.1f}, {interval.high:+.1f}]"


def validation(runs: list[Run]) -> Table:
    """Table 2: the validation loss at the end of training."""
    arms, known, unlike = arms_of(runs), by_arm_and_seed(runs), not_comparable(runs)
    rows: list[list[str | None]] = []
    why: dict[Place, str] = {}
    marked: dict[Place, str] = {}
    for seed in seeds_of(runs):
        row: list[str | None] = [str(seed)]
        for arm in arms:
            place, run = (len(rows), len(row)), known.get((arm, seed))
            loss = None if run is None else run.validation_loss
            row.append(None if loss is None else f"{loss:.4f}")
            why[place] = "not trained" if run is None else "not finished"
            if run is not None and run.path in unlike:
                marked[place] = unlike[run.path]
        row += [
            f"{paper.VALIDATION_LOSS[seed][arm]:.4f}" if arm in paper.VALIDATION_LOSS.get(seed, {}) else None
            for arm in ARMS
        ]
        rows.append(row)
    return Table(
        name="table2_validation_loss",
        title="Final validation loss (nats)",
        **beside(["seed", *map(name_of, arms)], list(ARMS.values())),
        rows=rows,
        why=why,
        unlike=marked,
    )


def retrieval(runs: list[Run], task: str) -> Table:
    """Table 3 for one needle task. The main task's has the recall tasks too, S-NIAH-1's the paper's numbers."""
    lengths, known, unlike = needle_lengths(runs, task), by_arm_and_seed(runs), not_comparable(runs)
    paper_has_it = task == "niah_single_1"
    recall = recall_names(runs) if task == main_task(runs) else []
    wanted = [f"{task}-{n}" for n in lengths] + recall
    rows: list[list[str | None]] = []
    sources: dict[Place, Result] = {}
    marked: dict[Place, str] = {}
    for seed in seeds_of(runs):
        for arm in arms_of(runs):
            if (arm, seed) not in known:
                continue
            results = known[arm, seed].results
            sources |= {(len(rows), 2 + i): results[name] for i, name in enumerate(wanted) if name in results}
            if reason := unlike.get(known[arm, seed].path):
                marked[len(rows), 1] = reason
            row: list[str | None] = [str(seed), name_of(arm), *(percent(results.get(name)) for name in wanted)]
            if paper_has_it:
                numbers = paper.NIAH_1.get(seed, {}).get(arm)
                row += [None] * 9 if numbers is None else [f"{x:g}" for x in numbers]
            rows.append(row)
    columns = ["seed", "arm", *(length_title(n) for n in lengths)]
    columns += [recall_title(name, results_of(runs, name)) for name in recall]
    theirs = [*(length_title(n) for n in paper.LENGTHS), *(TITLES[x] for x in paper.RECALL)]
    return Table(
        name=f"table3_{task}",
        title=f"{TITLES[task]} accuracy (%) at each length" + (", and recall" if recall else ""),
        **beside(columns, theirs if paper_has_it else []),
        rows=rows,
        sources=sources,
        unlike=marked,
        note="In brackets are exact (Clopper–Pearson) 95 % intervals. They do not cover other training runs.",
    )


def strength_sweep(runs: list[Run]) -> Table:
    """Table 4: accuracy with λ scaled at inference, compared with s = 1."""
    rows: list[list[str | None]] = []
    sources: dict[Place, Result] = {}
    swept = [run for run in runs if run.strengths]
    names = sorted(
        {n for run in swept for x in run.strengths.values() for n, r in x.items() if "correct" in r.result},
        key=_by_length,
    )
    for run in swept:
        comparison = compare(run.strengths)
        for scale, results in run.strengths.items():
            mean = run.mean_strength.get(scale)
            row: list[str | None] = [name_of(run.arm), str(run.seed), f"{scale:g}"]
            row.append(None if mean is None else f"{mean:.3f}")
            for name in names:
                if name not in results:
                    row.append(None)
                    continue
                compared = comparison[str(scale)][name]
                sources[len(rows), len(row)] = results[name]
                p = f" (p {compared['p']:.2g}, Holm {compared['p_holm']:.2g})" if "p" in compared else ""
                row.append(f"{100 * compared['accuracy']:.1f}{p}")
            numbers = paper.STRENGTH.get(run.seed, {}).get(scale) if run.arm == "qed" else None
            row += [None] * 6 if numbers is None else [f"{x:g}" for x in numbers]
            rows.append(row)
    by_name = {name: [x[name] for run in swept for x in run.strengths.values() if name in x] for name in names}
    columns = ["arm", "seed", "s", "mean λ", *(result_title(name, by_name[name]) for name in names)]
    return Table(
        name="table4_strength",
        title="Accuracy (%) with λ scaled by s at inference",
        **beside(columns, ["mean λ", *(length_title(n) for n in paper.STRENGTH_LENGTHS), "FDA"]),
        rows=rows,
        sources=sources,
        note="p is that of McNemar's exact test against s = 1 on the same examples. Holm's is corrected for all "
        "comparisons of a run.",
    )


def _by_length(name: str) -> tuple[str, int, str]:
    """Needle tasks first, each by length; then the recall tasks."""
    task, _, rest = name.partition("-")
    return (task, int(rest), "") if task in NEEDLES else ("~" + task, 0, rest)


def contrast_table(runs: list[Run]) -> Table:
    """The contrasts of Figure 2 for every needle task, seed by seed and across seeds."""
    seeds, known = seeds_of(runs), by_arm_and_seed(runs)
    rows: list[list[str | None]] = []
    why: dict[Place, str] = {}
    tasks = [task for task in NEEDLES if needle_lengths(runs, task)] or [main_task(runs)]
    for task, x in [(name, x) for name in tasks for x in contrasts(runs, name)]:
        row: list[str | None] = [TITLES[task], x.name, f"{name_of(x.first)} − {name_of(x.second)}"]
        for seed in seeds:
            if any((arm, seed) not in known for arm in (x.first, x.second)):
                why[len(rows), len(row)] = "not trained"
            row.append(None if seed not in x.seeds else f"{x.seeds[seed][0]:+.1f} {brackets(x.seeds[seed][1])}")
        why[len(rows), len(row)] = "fewer than two seeds"
        many = x.overall is not None and len(x.seeds) > 1
        row.append(f"{x.overall[0]:+.1f} {brackets(x.overall[1])}" if many and x.overall is not None else None)
        rows.append(row)
    return Table(
        name="figure2_contrasts",
        title="Contrasts in points of accuracy, over all lengths past the training length",
        columns=["task", "contrast", "arms", *(f"seed {seed}" for seed in seeds), "across seeds"],
        rows=rows,
        why=why,
        note="At each seed the interval is Tango's paired 95 % interval on the same examples. Across seeds it is "
        f"Student's 95 % interval over trainings. {PAST_TRAINING}",
    )


def first_answers(runs: list[Run]) -> Table:
    """Accuracy as RULER counts it and by the first answer: the main task by length, every task past training."""
    tasks = [name for name, task in of_kind(NeedleTask).items() if task.first_correct and needle_lengths(runs, name)]
    main = [task for task in tasks if task == main_task(runs)]
    lengths = [(task, n) for task in main for n in needle_lengths(runs, task)]
    rows: list[list[str | None]] = []
    for run in sorted(runs, key=lambda run: (run.seed, arms_of(runs).index(run.arm))):
        cells = [results_of([run], f"{task}-{n}") for task, n in lengths]
        cells += [[run.results[f"{task}-{n}"] for n in past_training([run], task)] for task in tasks]
        if not any(result.first_right is not None for results in cells for result in results):
            continue
        name = [str(run.seed), name_of(run.arm)]
        rows.append([*name, "anywhere (RULER)", *(_rate(results, first=False) for results in cells)])
        rows.append([*name, "first answer", *(_rate(results, first=True) for results in cells)])
    columns = ["seed", "arm", "counted", *(f"{TITLES[task]} {length_title(n)}" for task, n in lengths)]
    columns += [f"{TITLES[task]} past training" for task in tasks]
    return Table(
        name="first_answer",
        title="Needles found (%), as RULER counts them and by the first answer",
        columns=columns,
        rows=rows,
        note="RULER counts an answer that stands anywhere in the generated text, and so it credits later guesses too. "
        "By the first answer, an example is right only if the first number or uuid in that text is the whole answer. "
        f"{PAST_TRAINING} Such lengths are counted together, each prompt once.",
    )


def _rate(results: list[Result], first: bool) -> str | None:
    per_cent = rate(results, first)
    return None if per_cent is None else f"{per_cent:.1f}"


def split_table(runs: list[Run]) -> Table:
    """Every arm's difference from GDN-2, split into what training found and what the correction does."""
    rows: list[list[str | None]] = []
    for split in splits(runs):
        for seed in split.whole:
            row: list[str | None] = [name_of(split.arm), str(seed), TITLES[split.task]]
            row.append(", ".join(length_title(n) for n in split.lengths))
            differences = (split.whole[seed], split.training[seed], split.correction[seed])
            row += [f"{difference:+.2f} {brackets(interval)}" for difference, interval, _ in differences]
            theirs = _papers_split(seed) if split.arm == "qed" and split.task == "niah_single_1" else None
            row += [None] * 3 if theirs is None else [f"{x:+.2f}" for x in theirs]
            rows.append(row)
    names = ["arm − GDN-2", "arm at s = 0 − GDN-2 (training)", "arm at s = 1 − at s = 0 (correction)"]
    columns = ["arm", "seed", "task", "lengths", *names, *names]
    ends = [length_title(n) for n in (paper.STRENGTH_LENGTHS[0], paper.STRENGTH_LENGTHS[-1])]
    return Table(
        name="split",
        title="Points ahead of GDN-2: what training found, and what the correction does",
        columns=columns,
        rows=rows,
        theirs=set(range(7, 10)),
        note="At s = 0, λ is 0 at inference, on weights that were trained with the correction. In brackets are Tango's "
        "paired 95 % intervals on the same examples. The paper's numbers take QED from its Table 4 and GDN-2 from its "
        f"Table 3, at {'–'.join(ends)} of S-NIAH-1.",
    )


def _papers_split(seed: int) -> tuple[float, float, float] | None:
    """The paper's QED − GDN-2, the same at s = 0, and s = 1 − s = 0; None for a seed that it does not have."""
    if seed not in paper.STRENGTH:
        return None
    count = len(paper.STRENGTH_LENGTHS)
    base = sum(paper.NIAH_1[seed]["gdn2"][paper.LENGTHS.index(n)] for n in paper.STRENGTH_LENGTHS) / count
    on, off = (sum(paper.STRENGTH[seed][s][1 : 1 + count]) / count for s in (1.0, 0.0))
    return on - base, off - base, on - off


def eigenvalue_table(runs: list[Run]) -> Table:
    """What `qed eigenvalues` measured, over all layers of each run."""
    rows: list[list[str | None]] = []
    for run in runs:
        if run.eigenvalues is None:
            continue
        measured = run.eigenvalues["all"]
        e = measured["eigenvalue"]
        change = measured.get("change")
        rows.append(
            [
                *(name_of(run.arm), str(run.seed), f"{e['samples']:,}"),
                *(f"{e['quantiles'][q]:.3f}" for q in ("0.0", "0.01", "0.5", "0.99", "1.0")),
                None if change is None else f"{change['quantiles']['1.0']:.2g}",
                f"{measured['rho']['mean']:.3f}",
                None if "correction" not in measured else f"{measured['correction']['mean']:.3f}",
                f"{measured['outside']['mean']:.3f}",
            ]
        )
    columns = ["arm", "seed", "samples", "least e", "1 %", "median", "99 %", "most e", "most change by projecting"]
    columns += ["mean ρ", "correction ÷ a", "read outside the key"]
    theirs = paper.EIGENVALUES
    return Table(
        name="eigenvalues",
        title="Eigenvalues e = 1 − aᵀk over held-out text",
        columns=columns,
        rows=rows,
        absent="does not apply",
        note=f"For {name_of(str(theirs['rule']))} the paper has e in [{theirs['least']}, {theirs['most']}] over "
        f"{theirs['samples']:,} samples, and projecting would change e by less than {theirs['change']}.",
    )


def positions_table(runs: list[Run]) -> Table:
    """The loss by position in the row, of whole rows and of windows that slide over them, and in bits per byte where
    the length of the text is known."""
    found = [(run, result) for run in runs for name, result in run.results.items() if name.startswith("positions-")]
    edges = [(x["from"], x["to"]) for x in found[0][1].result["bins"]] if found else []
    slides = any("max_length" in result.about for _, result in found)
    in_bits = any("bits_per_byte" in result.result for _, result in found)
    rows: list[list[str | None]] = []
    for run, result in found:
        losses = {(x["from"], x["to"]): x["loss"] for x in result.result["bins"]}
        window, bits = result.about.get("max_length"), result.result.get("bits_per_byte")
        seen = "all before it" if window is None else f"at most {window:,} tokens"
        rows.append(
            [name_of(run.arm), str(run.seed), *([seen] if slides else [])]
            + [f"{losses[x]:.4f}" if x in losses else None for x in edges]
            + ([None if bits is None else f"{bits:.4f}"] if in_bits else [])
        )
    columns = ["arm", "seed", *(["a prediction sees"] if slides else []), *(f"{a}–{b}" for a, b in edges)]
    columns += ["bits per byte"] if in_bits else []
    return Table(name="loss_by_position", title="Loss by position in the row (nats)", columns=columns, rows=rows)


def transitions(runs: list[Run]) -> Table:
    """When retrieval at the training length appeared, in tokens trained on."""

    def first(run: Run, share: float) -> str | None:
        tokens = next((row["tokens"] for row in run.metrics if row.get("retrieval", 0.0) >= share), None)
        return None if tokens is None else f"{tokens:,}"

    watched = [run for run in runs if any("retrieval" in row for row in run.metrics)]
    rows: list[list[str | None]] = [
        [name_of(run.arm), str(run.seed), *(first(run, share) for share in (0.1, 0.5, 0.9))] for run in watched
    ]
    return Table(
        name="retrieval_over_training",
        title="Training tokens after which 10, 50 and 90 % of answers at the training length are found",
        columns=["arm", "seed", "10 %", "50 %", "90 %"],
        rows=rows,
        absent="never",
        note="32 prompts are tried whenever a run is validated. An answer is found if all of its tokens are the "
        "likeliest ones.",
    )
