"""The tables of lm-eval's suites: zero-shot tasks side by side, and RULER by length."""

from __future__ import annotations

from ..analysis.names import length_title, name_of
from ..analysis.results import Run
from ..analysis.selection import not_comparable
from ..analysis.stats import clopper_pearson
from ..analysis.suites import Scored, asked_otherwise
from ..eval.harness.suites import SUITES, Member
from .markup import Place, Table

SHARES = ("acc", "acc_norm")  # measures that are shares of examples, each right or wrong
NAMES = {
    "acc": "%",
    "acc_norm": "% by length",
    "perplexity": "perplexity",
    "word_perplexity": "perplexity a word",
    "byte_perplexity": "perplexity a byte",
    "bits_per_byte": "bits a byte",
}
NOTE = (
    "Prompts, scores and versions are lm-eval's own. In brackets are exact (Clopper–Pearson) 95 % intervals over "
    "examples. They do not cover other training runs. “% by length” chooses the answer whose logarithm of probability "
    "is largest for its number of characters. The mean is over all columns in per cent, and needs all of them."
)
RULER_NOTE = (
    "Prompts are drawn by lm-eval's own code. Each number is the mean over prompts of the share of answers that stand "
    "in what was generated; for QA-SQuAD and QA-HotpotQA as lm-eval counts them. The mean needs all 13 tasks."
)


def suite_tables(runs: list[Run]) -> list[Table]:
    """A table for each suite of which there are results."""
    tables = []
    for suite, members in SUITES.items():
        lengths = sorted({x.about["length"] for run in runs for x in _of(run, members) if "length" in x.about})
        if any(member.lengths for member in members.values()):
            tables += [_by_length(runs, suite, members, lengths)] if lengths else []
        elif any(_of(run, members) for run in runs):
            tables.append(_side_by_side(runs, suite, members))
    return tables


def _of(run: Run, members: dict[str, Member]) -> list[Scored]:
    return [x for x in run.harness.values() if x.about["task"] in members]


def _cell(result: Scored, measure: str) -> str | None:
    if measure not in result.measures:
        return None
    value = result.measures[measure]
    if measure not in SHARES:
        return f"{value:.3f}"
    low, high = clopper_pearson(round(value * result.samples), result.samples)
    return f"{100 * value:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def _side_by_side(runs: list[Run], suite: str, members: dict[str, Member]) -> Table:
    """A row for each run, a column for each measure that the suite shows, and the mean of those in per cent."""
    wanted = [(task, measure) for task, member in members.items() for measure in member.shown]
    shares = [(task, measure) for task, measure in wanted if measure in SHARES]
    unlike = {task: asked_otherwise([run.harness[task] for run in runs if task in run.harness]) for task in members}
    rows: list[list[str | None]] = []
    why: dict[Place, str] = {}
    for run in (run for run in runs if _of(run, members)):
        row: list[str | None] = [name_of(run.arm), str(run.seed)]
        alike = {task: x for task, x in run.harness.items() if task in members and x.path not in unlike[task]}
        for task, measure in wanted:
            if task in run.harness and task not in alike:
                why[len(rows), len(row)] = unlike[task][run.harness[task].path]
            row.append(_cell(alike[task], measure) if task in alike else None)
        values = [alike[task].measures.get(measure) for task, measure in shares if task in alike]
        row.append(_mean(values, len(shares)))
        rows.append(row)
    columns = ["arm", "seed", *(f"{members[task].title} ({NAMES[measure]})" for task, measure in wanted), "mean (%)"]
    marked = _marked([run for run in runs if _of(run, members)], runs)
    title = f"lm-eval's tasks of the suite “{suite}”, without examples in the prompt"
    return Table(name=f"suite_{suite}", title=title, columns=columns, rows=rows, why=why, note=NOTE, unlike=marked)


def _by_length(runs: list[Run], suite: str, members: dict[str, Member], lengths: list[int]) -> Table:
    """A row for each run and length, a column for each task, and the mean of all."""
    rows: list[list[str | None]] = []
    why: dict[Place, str] = {}
    kept: list[Run] = []
    for run in runs:
        for length in lengths:
            names = [f"{task}-{length}" for task in members]
            if not any(name in run.harness for name in names):
                continue
            row: list[str | None] = [name_of(run.arm), str(run.seed), length_title(length)]
            values = []
            for name in names:
                result = run.harness.get(name)
                unlike = asked_otherwise([x.harness[name] for x in runs if name in x.harness])
                if result is not None and result.path in unlike:
                    why[len(rows), len(row)] = unlike[result.path]
                    result = None
                value = None if result is None else result.measures.get(str(length))
                values.append(value)
                row.append(None if value is None else f"{100 * value:.1f}")
            row.append(_mean(values, len(members)))
            rows.append(row)
            kept.append(run)
    columns = ["arm", "seed", "length", *(member.title for member in members.values()), "mean"]
    return Table(
        name=f"suite_{suite}",
        title="RULER (%), all tasks by length",
        columns=columns,
        rows=rows,
        why=why,
        note=RULER_NOTE,
        unlike=_marked(kept, runs),
    )


def _mean(values: list[float | None], count: int) -> str | None:
    """The mean in per cent; None unless all of so many values are there."""
    there = [x for x in values if x is not None]
    return f"{100 * sum(there) / count:.1f}" if len(there) == count else None


def _marked(kept: list[Run], runs: list[Run]) -> dict[Place, str]:
    """The arms of rows whose training is not comparable with the others'."""
    reasons = not_comparable(runs)
    return {(row, 0): reasons[run.path] for row, run in enumerate(kept) if run.path in reasons}
