"""The paper's tables from our results; its own figures in columns of their own."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape

from ..eval.task import NeedleTask, RecallTask
from ..eval.tasks import TASKS, of_kind
from . import paper
from .results import Result, Run, comparable, discordant, same_examples
from .stats import Interval, across_seeds, clopper_pearson, mcnemar, paired_difference
from .strength import compare

MISSING = "missing"
NEEDLES, RECALL = tuple(of_kind(NeedleTask)), of_kind(RecallTask)
TITLES = {name: task.title for name, task in TASKS.items()}
PAST_TRAINING = "past the training length: even the shortest prompt has more tokens than a row of training"


@dataclass(kw_only=True)
class Table:
    name: str  # of its files
    title: str
    columns: list[str]
    rows: list[list[str | None]]
    note: str = ""
    theirs: set[int] = field(default_factory=set)  # columns that are the paper's

    def cells(self) -> list[list[str]]:
        return [[MISSING if x is None else x for x in row] for row in self.rows]

    def csv(self) -> str:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([f"paper: {x}" if i in self.theirs else x for i, x in enumerate(self.columns)])
        writer.writerows(self.cells())
        return text.getvalue()

    def markdown(self) -> str:
        head = [f"paper: {x}" if i in self.theirs else x for i, x in enumerate(self.columns)]
        lines = [f"**{self.title}**", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        lines += ["| " + " | ".join(row) + " |" for row in self.cells()]
        return "\n".join([*lines, *(["", self.note] if self.note else [])]) + "\n"

    def html(self) -> str:
        def cell(tag: str, i: int, text: str) -> str:
            kinds = [k for k, is_so in (("paper", i in self.theirs), ("missing", text == MISSING)) if is_so]
            return f"<{tag}{' class=' + chr(34) + ' '.join(kinds) + chr(34) if kinds else ''}>{escape(text)}</{tag}>"

        head = "".join(cell("th", i, ("paper: " if i in self.theirs else "") + x) for i, x in enumerate(self.columns))
        body = "".join(
            "<tr>" + "".join(cell("td", i, x) for i, x in enumerate(row)) + "</tr>\n" for row in self.cells()
        )
        note = f"<p class='note'>{escape(self.note)}</p>" if self.note else ""
        return f"<h3>{escape(self.title)}</h3><div class='wide'><table><tr>{head}</tr>\n{body}</table></div>{note}"


def by_arm_and_seed(runs: list[Run]) -> dict[tuple[str, int], Run]:
    return {(run.arm, run.seed): run for run in runs}


def arms_of(runs: list[Run]) -> list[str]:
    present = {run.arm for run in runs}
    return [x for x in paper.ARMS if x in present] + sorted(present - paper.ARMS.keys())


def seeds_of(runs: list[Run]) -> list[int]:
    return sorted({run.seed for run in runs})


def name_of(arm: str) -> str:
    return paper.ARMS.get(arm, arm)


def needle_lengths(runs: list[Run], task: str) -> list[int]:
    found = {int(name.rsplit("-", 1)[1]) for run in runs for name in run.results if name.startswith(f"{task}-")}
    return sorted(found)


def past_training(runs: list[Run], task: str) -> list[int]:
    """Nominal lengths at which every prompt is longer than the training length of every run that was asked."""
    found = {n: [run for run in runs if f"{task}-{n}" in run.results] for n in needle_lengths(runs, task)}
    return [n for n, some in found.items() if all(run.is_past_training(run.results[f"{task}-{n}"]) for run in some)]


def distinct(results: Iterable[tuple[Result, ...]]) -> list[tuple[Result, ...]]:
    """Each set of examples once: S-NIAH-2 and -3 are sized in steps of 500 words, and two lengths may share theirs."""
    found: dict[frozenset[tuple[int, int, str]], tuple[Result, ...]] = {}
    for some in results:
        found.setdefault(some[0].examples, some)
    return list(found.values())


def main_task(runs: list[Run]) -> str:
    """The needle task that is judged: the paper's, unless the runs only have the one for tiny models."""
    return "pairs" if needle_lengths(runs, "pairs") and not needle_lengths(runs, "niah_single_1") else "niah_single_1"


def recall_names(runs: list[Run]) -> list[str]:
    """Results of recall tasks: their variant is in the name, so that no column mixes two."""
    names = {name for run in runs for name in run.results if name.split("-")[0] in RECALL}
    return sorted(names)


def all_comparable(runs: list[Run]) -> None:
    """Every column of every table is of one set of examples."""
    names = sorted({name for run in runs for name in run.results})
    for name in names:
        found = [run.results[name] for run in runs if name in run.results]
        comparable(found)
        for other in found[1:]:
            if "correct" in other.result:
                same_examples(found[0], other)


def percent(result: Result | None) -> str | None:
    if result is None:
        return None
    k, n = result.result["correct"], result.result["samples"]
    low, high = clopper_pearson(k, n)
    return f"{100 * k / n:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def validation(runs: list[Run]) -> Table:
    """Table 2."""
    arms, known = arms_of(runs), by_arm_and_seed(runs)
    rows: list[list[str | None]] = []
    for seed in seeds_of(runs):
        row: list[str | None] = [str(seed)]
        for arm in arms:
            loss = known[arm, seed].validation_loss if (arm, seed) in known else None
            row.append(None if loss is None else f"{loss:.4f}")
        row += [
            f"{paper.VALIDATION_LOSS[seed][arm]:.4f}" if arm in paper.VALIDATION_LOSS.get(seed, {}) else None
            for arm in paper.ARMS
        ]
        rows.append(row)
    columns = ["seed", *map(name_of, arms), *paper.ARMS.values()]
    theirs = set(range(1 + len(arms), len(columns)))
    return Table(
        name="table2_validation_loss", title="Final validation loss (nats)", columns=columns, rows=rows, theirs=theirs
    )


def retrieval(runs: list[Run], task: str) -> Table:
    """Table 3, for one needle task; the main one with the recall tasks, S-NIAH-1 with the paper's figures."""
    lengths, known = needle_lengths(runs, task), by_arm_and_seed(runs)
    paper_has_it = task == "niah_single_1"
    recall = recall_names(runs) if task == main_task(runs) else []
    wanted = [f"{task}-{n}" for n in lengths] + recall
    rows: list[list[str | None]] = []
    for seed in seeds_of(runs):
        for arm in arms_of(runs):
            if (arm, seed) not in known:
                continue
            results = known[arm, seed].results
            row: list[str | None] = [str(seed), name_of(arm), *(percent(results.get(name)) for name in wanted)]
            if paper_has_it:
                figures = paper.NIAH_1.get(seed, {}).get(arm)
                row += [None] * 9 if figures is None else [f"{x:g}" for x in figures]
            rows.append(row)
    columns = ["seed", "arm", *(length_title(n) for n in lengths)]
    columns += [recall_title(name, results_of(runs, name)) for name in recall]
    theirs: set[int] = set()
    if paper_has_it:
        theirs = set(range(len(columns), len(columns) + 9))
        columns += [*(length_title(n) for n in paper.LENGTHS), *(TITLES[x] for x in paper.RECALL)]
    return Table(
        name=f"table3_{task}",
        title=f"{TITLES[task]} accuracy (%) at each length" + (", and recall" if recall else ""),
        columns=columns,
        rows=rows,
        theirs=theirs,
        note="In brackets: exact (Clopper–Pearson) 95 % intervals; they do not cover other training runs.",
    )


def strength_sweep(runs: list[Run]) -> Table:
    """Table 4."""
    rows: list[list[str | None]] = []
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
                found = comparison[str(scale)][name]
                p = f" (p {found['p']:.2g}, Holm {found['p_holm']:.2g})" if "p" in found else ""
                row.append(f"{100 * found['accuracy']:.1f}{p}")
            figures = paper.STRENGTH.get(run.seed, {}).get(scale) if run.arm == "qed" else None
            row += [None] * 6 if figures is None else [f"{x:g}" for x in figures]
            rows.append(row)
    of = {name: [x[name] for run in swept for x in run.strengths.values() if name in x] for name in names}
    columns = ["arm", "seed", "s", "mean λ", *(_title(name, of[name]) for name in names)]
    theirs = set(range(len(columns), len(columns) + 6))
    columns += ["mean λ", *(length_title(n) for n in paper.STRENGTH_LENGTHS), "FDA"]
    note = "p: exact McNemar against s = 1 on the same examples; Holm over a run's comparisons."
    return Table(
        name="table4_strength",
        title="Strength at inference: accuracy (%)",
        columns=columns,
        rows=rows,
        theirs=theirs,
        note=note,
    )


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """A difference between two arms in points, by seed, on all examples past the training length."""

    name: str
    first: str
    second: str
    seeds: dict[int, tuple[float, Interval, float]]  # difference, paired interval, McNemar's p
    overall: tuple[float, Interval] | None


def points(pairs: list[tuple[Result, Result]]) -> tuple[float, Interval, float]:
    """By how many points the first of each pair is ahead, over all examples: Tango's interval and McNemar's p."""
    b, c, n = (sum(x) for x in zip(*(discordant(*pair) for pair in pairs), strict=True))
    difference, interval = paired_difference(b, c, n)
    return 100 * difference, Interval(100 * interval.low, 100 * interval.high), mcnemar(b, c)


def contrasts(runs: list[Run], task: str) -> list[Contrast]:
    known, found = by_arm_and_seed(runs), []
    for name, (first, second) in paper.CONTRASTS.items():
        seeds = {}
        for seed in seeds_of(runs):
            if (first, seed) not in known or (second, seed) not in known:
                continue
            one, other = known[first, seed], known[second, seed]
            names = [f"{task}-{n}" for n in past_training([one, other], task)]
            both = [x for x in names if x in one.results and x in other.results]
            pairs = distinct((one.results[x], other.results[x]) for x in both)
            if pairs:
                seeds[seed] = points([(x[0], x[1]) for x in pairs])
        overall = across_seeds([x[0] for x in seeds.values()]) if seeds else None
        found.append(Contrast(name=name, first=first, second=second, seeds=seeds, overall=overall))
    return found


def contrast_table(runs: list[Run]) -> Table:
    seeds, rows = seeds_of(runs), []
    tasks = [task for task in NEEDLES if needle_lengths(runs, task)] or [main_task(runs)]
    for task, x in [(name, x) for name in tasks for x in contrasts(runs, name)]:
        row: list[str | None] = [TITLES[task], x.name, f"{name_of(x.first)} − {name_of(x.second)}"]
        for seed in seeds:
            row.append(None if seed not in x.seeds else f"{x.seeds[seed][0]:+.1f} {brackets(x.seeds[seed][1])}")
        many = x.overall is not None and len(x.seeds) > 1
        row.append(f"{x.overall[0]:+.1f} {brackets(x.overall[1])}" if many and x.overall is not None else None)
        rows.append(row)
    return Table(
        name="figure2_contrasts",
        title="Contrasts: points of accuracy, all lengths past the training length together",
        columns=["task", "contrast", "arms", *(f"seed {seed}" for seed in seeds), "across seeds"],
        rows=rows,
        note="By seed: Tango's paired 95 % interval on the same examples. Across seeds: Student's, over trainings. "
        f"{PAST_TRAINING.capitalize()}.",
    )


def transitions(runs: list[Run]) -> Table:
    """When retrieval at the training length appeared, in tokens trained on."""

    def first(run: Run, share: float) -> str | None:
        found = next((row["tokens"] for row in run.metrics if row.get("retrieval", 0.0) >= share), None)
        return None if found is None else f"{found:,}"

    watched = [run for run in runs if any("retrieval" in row for row in run.metrics)]
    rows: list[list[str | None]] = [
        [name_of(run.arm), str(run.seed), *(first(run, x) for x in (0.1, 0.5, 0.9))] for run in watched
    ]
    return Table(
        name="retrieval_over_training",
        title="Training tokens after which so many answers at the training length are found",
        columns=["arm", "seed", "10 %", "50 %", "90 %"],
        rows=rows,
        note="Of 32 prompts, looked at whenever a run is validated; an answer counts if all of it is likeliest.",
    )


def eigenvalue_table(runs: list[Run]) -> Table:
    rows: list[list[str | None]] = []
    for run in runs:
        if run.eigenvalues is None:
            continue
        found = run.eigenvalues["all"]
        e = found["eigenvalue"]
        change = found.get("change")
        rows.append(
            [
                *(name_of(run.arm), str(run.seed), f"{e['samples']:,}"),
                *(f"{e['quantiles'][q]:.3f}" for q in ("0.0", "0.01", "0.5", "0.99", "1.0")),
                None if change is None else f"{change['quantiles']['1.0']:.2g}",
                f"{found['rho']['mean']:.3f}",
                None if "correction" not in found else f"{found['correction']['mean']:.3f}",
                f"{found['outside']['mean']:.3f}",
            ]
        )
    columns = ["arm", "seed", "samples", "least e", "1 %", "median", "99 %", "most e", "most change by projecting"]
    columns += ["mean ρ", "correction ÷ a", "read outside the key"]
    x = paper.EIGENVALUES
    note = (
        f"The paper, for {name_of(str(x['rule']))}: e in [{x['least']}, {x['most']}] over {x['samples']:,} samples, "
        f"changed by less than {x['change']} by projecting."
    )
    return Table(
        name="eigenvalues", title="Eigenvalues e = 1 − aᵀk over held-out text", columns=columns, rows=rows, note=note
    )


def positions_table(runs: list[Run]) -> Table:
    rows: list[list[str | None]] = []
    edges: list[tuple[int, int]] = []
    for run in runs:
        for name, result in run.results.items():
            if name.startswith("positions-"):
                edges = edges or [(x["from"], x["to"]) for x in result.result["bins"]]
                found = {(x["from"], x["to"]): x["loss"] for x in result.result["bins"]}
                rows.append(
                    [name_of(run.arm), str(run.seed), *(f"{found[x]:.4f}" if x in found else None for x in edges)]
                )
    columns = ["arm", "seed", *(f"{a}–{b}" for a, b in edges)]
    return Table(name="loss_by_position", title="Loss by position (nats)", columns=columns, rows=rows)


def brackets(x: Interval) -> str:
    return f"[{x.low:+.1f}, {x.high:+.1f}]"


def length_title(n: int) -> str:
    return f"{n // 1024}K" if n % 1024 == 0 else str(n)


def recall_title(name: str, results: list[Result]) -> str:
    """A data set's own name only where a result says that it was read from there: a user's file is in its style."""
    task, _, variant = name.partition("-")
    if {x.about.get("dataset") for x in results} == {RECALL[task].dataset}:
        return f"{TITLES[task]} ({variant})"
    forms = {form for x in results for form in x.about.get("forms", ())}
    return f"{TITLES[task]} questions ({variant})" if forms == {"question"} else f"{TITLES[task]}-style ({variant})"


def results_of(runs: list[Run], name: str) -> list[Result]:
    return [run.results[name] for run in runs if name in run.results]


def _title(name: str, results: list[Result]) -> str:
    task, _, rest = name.partition("-")
    return f"{TITLES[task]} {length_title(int(rest))}" if task in NEEDLES else recall_title(name, results)


def _by_length(name: str) -> tuple[str, int, str]:
    task, _, rest = name.partition("-")
    return (task, int(rest), "") if task in NEEDLES else ("~" + task, 0, rest)
