"""The look inside one of a reproduction's models, which the report links to."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from ..eval.prompts import FrozenPrompts
from ..eval.records import lines
from ..eval.run import matching_tokenizer
from ..eval.task import NeedleTask
from ..eval.tasks import named
from ..report.look import write_look
from .plan import Plan
from .unit import options

ARM = "qed"


def look_inside_one(plan: Plan, out: Path, device: str, console: Console) -> Path | None:
    """Write report/look.html, on which the first finished QED model reads the first and shortest prompt of the first
    needle task; return its path, or None if there is no such model or its page cannot show the prompt.

    Args:
        plan: the reproduction.
        out: its folder.
        device: where the model runs.
        console: where progress is shown, and why there is no page is said.
    """
    exports = [out / "runs" / unit.name / "export" for unit in plan.units if unit.arm == ARM]
    model = next((path for path in exports if path.is_dir()), None)
    if model is None:
        return None
    task = named(plan.needles[0], NeedleTask)
    tokenizer = matching_tokenizer(model, None)
    prompts = FrozenPrompts(task, min(plan.lengths), options(plan, out), tokenizer, out)
    text = next(iter(lines(prompts.path)))["prompt"]
    try:
        return write_look(model, text, out / "report" / "look.html", tokenizer=None, device=device, console=console)
    except ValueError as error:  # a prompt that is too long for a page of a large model is no reason to have no report
        console.print(f"no look inside {model.parent.name}: {error}", style="yellow", soft_wrap=True, highlight=False)
        return None
