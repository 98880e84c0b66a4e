"""`qed report`: one page that opens by itself, and every part of it as files. From result files alone."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

import torch
from rich.console import Console

from ..data.shards import TokenShards
from ..eval.options import Options
from ..eval.run import Evaluation
from ..files import write_json, write_text
from ..provenance import provenance
from . import breakdown, eigenvalues, figures, registered_figures, registered_report, tables
from .conclusions import conclusions
from .registered import outcomes
from .results import Run, survey
from .units import SHOWN, counting, read_registration, several

STYLE = """
:root { color-scheme: light dark;
  --ink: #1b1d21; --page: #ffffff; --line: #d5d8de; --soft: #f3f4f7; --theirs: #7a5c00; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e6e6; --page: #16181c; --line: #3a3f47; --soft: #20242a; --theirs: #e0b84a; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page);
  margin: 0 auto; max-width: 68rem; padding: 1rem; }
h1 { line-height: 1.2; } h2 { margin-top: 2.2rem; border-bottom: 1px solid var(--line); } h3 { margin-bottom: .4rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .85rem; white-space: nowrap; }
th, td { border: 1px solid var(--line); padding: .25rem .5rem; text-align: right; } th { background: var(--soft); }
.paper { color: var(--theirs); font-style: italic; } .missing { opacity: .55; }
.note { font-size: .85rem; opacity: .8; }
img { max-width: 100%; height: auto; } li { margin: .35rem 0; }
"""


def all_tables(found: list[Run]) -> list[tables.Table]:
    made = [tables.validation(found)]
    made += [tables.retrieval(found, task) for task in tables.NEEDLES if tables.needle_lengths(found, task)]
    main = tables.main_task(found)
    if tables.recall_names(found) and not tables.needle_lengths(found, main):
        made.append(tables.retrieval(found, main))
    made.append(tables.contrast_table(found))
    made += [table for table in (breakdown.first_answers(found), breakdown.split_table(found)) if table.rows]
    made += [tables.strength_sweep(found)] if any(run.strengths for run in found) else []
    made += [tables.eigenvalue_table(found)] if any(run.eigenvalues for run in found) else []
    more = [tables.positions_table(found), tables.transitions(found)]
    return made + [table for table in more if table.rows]


def absent(found: list[Run], made: list[tables.Table], drawn: dict[str, object]) -> list[str]:
    """Parts of the paper for which there is nothing."""
    parts = {
        "Table 3 and Figure 1 (S-NIAH-1)": "figure1_niah_single_1" in drawn,
        "S-NIAH-2": "figure1_niah_single_2" in drawn,
        "S-NIAH-3": "figure1_niah_single_3" in drawn,
        "Figure 3 (recall)": "figure3_recall" in drawn,
        "Table 4 (strength sweep)": any(x.name == "table4_strength" for x in made),
        "eigenvalues": "eigenvalues" in drawn,
        "loss by position": "loss_by_position" in drawn,
        "λ over training": "strength_over_training" in drawn,
    }
    return [name for name, there in parts.items() if not there]


def write(
    base: Path, out: Path, console: Console | None = None, *, more: Sequence[Path] = (), plan: Path | None = None
) -> Path:
    """report.html, report.md, and tables/*.csv, figures/*.png and *.pdf beside them, of the runs in `base` and in the
    folders of `more` together. What is there but cannot be used is named on the page, and on `console`. With a
    registered plan, only its trainings are on the page, and the others are named."""
    registration = None if plan is None else read_registration(plan)
    found, problems = survey(base, *more)
    left_out: list[str] = []
    if registration is not None:
        found, left_out = counting(found, registration)
        if not found:
            raise ValueError(f"--plan: expected trainings of this plan, got none; {left_out[0]}")
    for said in (*(f"shown as missing: {x}" for x in problems), *(f"left out: {x}" for x in left_out)):
        if console is not None:
            console.print(said, style="yellow", soft_wrap=True, markup=False)
    for folder in (base, *more):  # the page is about the runs, wherever they lie
        problems = [problem.replace(f"{folder}/", "") for problem in problems]
    tables.all_comparable(found)
    judged = outcomes(found, registered=registration is not None)
    answers = registered_report.sentences(judged, left_out) + (several(found) if registration is None else [])
    first = registered_report.answer_tables(judged)
    made, concluded = registered_report.other_tables(judged, found) + all_tables(found), conclusions(found)
    drawn = registered_figures.all_figures(found) | figures.all_figures(found)
    missing = absent(found, made, dict(drawn))
    pictures = {
        name: figures.drawn(draw, ("svg", "png", "pdf")) | {"dark": figures.drawn(draw, ("svg",), dark=True)["svg"]}
        for name, (_, draw) in drawn.items()
    }
    for part in ("tables", "figures"):
        (out / part).mkdir(parents=True, exist_ok=True)
    for table in (*first, *made):
        (out / "tables" / f"{table.name}.csv").write_text(table.csv())
    for name, kinds in pictures.items():
        for kind in ("png", "pdf"):
            (out / "figures" / f"{name}.{kind}").write_bytes(kinds[kind])
    heading = "Over trainings: " + (
        "exploratory, no plan was given" if registration is None else f"the registered plan {registration.plan[:SHOWN]}"
    )
    by_seed = "What this run can and cannot conclude" if registration is None else "Seed by seed: exploratory"
    sections = [f"<h2>{escape(heading)}</h2>", _list(answers), *(table.html() for table in first)]
    sections += [f"<h2>{by_seed}</h2>", _list(concluded)]
    sections += [f"<p class='missing'>No results for: {escape(', '.join(missing))}.</p>"] if missing else []
    if problems:
        sections += ["<h2>Not finished or damaged, and so shown as missing</h2>", _list(problems)]
    sections += ["<h2>Figures</h2>"]
    for name, (title, _) in drawn.items():
        light, dark = (base64.b64encode(pictures[name][kind]).decode() for kind in ("svg", "dark"))
        sections.append(
            f"<h3>{escape(title)}</h3><picture>"
            f"<source media='(prefers-color-scheme: dark)' srcset='data:image/svg+xml;base64,{dark}'>"
            f"<img alt='{escape(title)}' src='data:image/svg+xml;base64,{light}'></picture>"
        )
    sections += ["<h2>Tables</h2>", *(table.html() for table in made)]
    abouts = []
    for run in found:
        about = f"{run.path.name}: {tables.name_of(run.arm)}, seed {run.seed}, {run.config['total_tokens']:,} tokens"
        abouts.append(about + f", rows of {run.train_length}" + ("" if run.complete else ", not finished"))
    sections += ["<h2>Runs</h2>", _list(abouts)]
    page = (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<link rel='icon' href='data:,'><title>QED: results</title><style>{STYLE}</style></head>"
        "<body><h1>The Query Knows What to Forget: results</h1>"
        "<p>The paper's own figures are in columns <span class='paper'>like this</span>.</p>"
        f"{chr(10).join(sections)}</body></html>\n"
    )
    text = ["# Results", "", f"## {heading}", "", *(f"- {x}" for x in answers), ""]
    text += [table.markdown() for table in first]
    text += [f"## {by_seed}", "", *(f"- {x}" for x in concluded), ""]
    text += [f"No results for: {', '.join(missing)}.", ""] if missing else []
    if problems:
        text += ["## Not finished or damaged, and so shown as missing", "", *(f"- {x}" for x in problems), ""]
    text += [f"![{title}](figures/{name}.png)\n" for name, (title, _) in drawn.items()]
    text += [table.markdown() for table in made]
    write_text(out / "report.md", "\n".join(text))
    write_text(out / "report.html", page)
    return out / "report.html"


def _list(items: list[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(x)}</li>' for x in items)}</ul>"


def write_eigenvalues(checkpoint: Path, data: Path, *, samples: int, out: Path, device: str, console: Console) -> None:
    """`qed eigenvalues`."""
    shards = TokenShards(data)
    run = Evaluation(
        checkpoint,
        None if (checkpoint / "tokenizer.json").exists() else str(data / "tokenizer.json"),
        Options(),
        device,
        console,
    )
    if shards.index["tokenizer_sha256"] != run.about["tokenizer"]:
        raise ValueError(f"--data: expected tokens of the checkpoint's tokenizer, got another's in {data}")
    run.model = run.model.to(torch.float32)  # e is a difference from 1
    with console.status("reading text") as status:
        found = eigenvalues.measure(
            run.model, shards, samples=samples, done=lambda n: status.update(f"{n:,} tokens read")
        )
    about = {"checkpoint": run.about["checkpoint"], "tokenizer": run.about["tokenizer"], "samples": samples}
    came_from = provenance(device) | {"data": str(data)}
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, {"about": about, "provenance": came_from} | found)
    e = found["all"]["eigenvalue"]
    console.print(
        f"e = 1 − aᵀk over {e['samples']:,} samples: from {e['quantiles']['0.0']:.4f} to {e['quantiles']['1.0']:.4f}"
    )
    for name, x in found["all"].items():
        if name != "eigenvalue":
            console.print(f"{name}: mean {x['mean']:.4f}, most {x['quantiles']['1.0']:.4g}")
    console.print(f"written to {out}", markup=False)
