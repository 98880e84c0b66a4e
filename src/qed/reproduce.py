"""`qed reproduce`: for now a demonstration of the recurrence, not yet of the paper's experiments.

Nothing is trained. On random inputs it shows that the chunk form is the loop (to float32's rounding, at any length),
what each costs, and what the strength of QED's correction does to a read: exactly linear for one token with a fixed
incoming state (the paper's eq. 12), not over a whole sequence, where every earlier update used the strength too.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from . import __version__
from .ops import erase_write
from .rules import l2_normalize, orthogonal, qed_attention
from .testing import Case, relative_error

LENGTHS = (64, 256, 1024, 4096)
SCALES = (-1.0, 0.0, 0.5, 1.0, 1.5, 2.0)  # the paper's s
STRENGTH = 0.25  # the paper's λ_max


def demonstrate(out: Path, console: Console) -> dict[str, Any]:
    """Run, print two tables, and write `demonstration.json` and `demonstration.png` into `out`."""
    plot = _plotter()
    console.print("A demonstration of the recurrence on random inputs. Nothing is trained, no table is reproduced.\n")
    with Progress(console=console) as progress:
        task = progress.add_task("running", total=len(LENGTHS) + len(SCALES))
        forms = []
        for tokens in LENGTHS:
            forms.append(_loop_and_chunk(tokens))
            progress.advance(task)
        reads = []
        for row in _strength_sweep():
            reads.append(row)
            progress.advance(task)

    table = Table("T", "loop, error", "chunk, error", "loop, µs/token", "chunk, µs/token", title="forward, float32")
    for form in forms:
        table.add_row(f"{form['tokens']:.0f}", *(f"{form[key]:.3g}" for key in form if key != "tokens"))
    console.print(table)
    table = Table(
        "s", "one token", "its line, eq. 12", "whole sequence", title="‖o(s) − o(0)‖ / ‖o(0)‖ of the last read"
    )
    for read in reads:
        table.add_row(*(f"{read[key]:.4g}" for key in read))
    console.print(table)

    result = {
        "what": "demonstration of the recurrence on random inputs; nothing is trained",
        "environment": {"qed": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "forms": forms,
        "strength": reads,
    }
    out.mkdir(parents=True, exist_ok=True)
    plot(result, out / "demonstration.png")
    (out / "demonstration.json").write_text(json.dumps(result, indent=2) + "\n")
    console.print(f"Figure and numbers: {out / 'demonstration.png'}, {out / 'demonstration.json'}")
    return result


def _loop_and_chunk(tokens: int) -> dict[str, float]:
    """Errors of both forms in float32 against the float64 loop, and their times."""
    case = Case(batch=2, tokens=tokens, heads=2, key_width=32, value_width=32, state=False)
    truth, _ = erase_write(**case.inputs(torch.float64), impl="reference")
    row: dict[str, float] = {"tokens": tokens}
    times = {}
    for impl in ("reference", "chunkwise"):
        inputs = case.inputs(torch.float32)
        erase_write(**inputs, impl=impl)
        start = time.perf_counter()
        o, _ = erase_write(**inputs, impl=impl)
        times[f"{impl}_us_per_token"] = (time.perf_counter() - start) / (2 * tokens) * 1e6
        row[f"{impl}_error"] = relative_error(o, truth)
    return row | times


def _strength_sweep(tokens: int = 512) -> Iterator[dict[str, float]]:
    """How far the last read moves when λ is scaled by s: in its own token only, and in every token."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, tokens, 4, *shape, dtype=torch.float64, generator=random)

    q, k, v, b, w, g = normal(32), normal(32), normal(32), normal(32), normal(32), normal(32)
    given: dict[str, Any] = {"q": q, "k": q + k, "v": v, "g": -0.02 * g.abs(), "b": b.sigmoid(), "w": w.sigmoid()}

    def last_read(past: float, last: float) -> tuple[Tensor, Tensor]:
        """The last token's output, and the state it found."""
        before = {name: x[:, :-1] for name, x in given.items()}
        _, state = qed_attention(**before, strength=past * STRENGTH)
        now = {name: x[:, -1:] for name, x in given.items()}
        return qed_attention(**now, strength=last * STRENGTH, initial_state=state)[0], state

    without, _ = last_read(0.0, 0.0)
    fixed, state = last_read(1.0, 0.0)
    for s in SCALES:
        difference = s * _eq_12({name: x[:, -1] for name, x in given.items()}, state)
        yield {
            "s": s,
            "one_token": relative_error(last_read(1.0, s)[0], fixed),
            "line": relative_error(fixed[:, 0] + difference, fixed[:, 0]),
            "whole_sequence": relative_error(last_read(s, s)[0], without),
        }


def _eq_12(token: dict[str, Tensor], state: Tensor) -> Tensor:
    """o_QED − o_GDN2 = −λ ρ S̄ᵀ d, straight from the paper."""
    q, k = l2_normalize(token["q"]), l2_normalize(token["k"])
    rho, d = (q * k).sum(-1, keepdim=True), orthogonal(token["b"] * q, k)
    decayed = token["g"].exp().unsqueeze(-1) * state
    return -STRENGTH * rho * (d.unsqueeze(-2) @ decayed).squeeze(-2)


def _plotter() -> Callable[[dict[str, Any], Path], None]:
    """The figure's function; asked for first, so that a missing package is known before the work is done."""
    try:
        import matplotlib
    except ImportError as error:
        raise RuntimeError("qed reproduce draws a figure: pip install 'qed-attention[analysis]'") from error
    matplotlib.use("Agg")
    return _plot


@contextmanager
def _figure(path: Path) -> Iterator[Any]:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    yield figure, axes
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _plot(result: dict[str, Any], path: Path) -> None:
    forms, reads = result["forms"], result["strength"]
    tokens = [row["tokens"] for row in forms]
    with _figure(path) as (figure, (errors, times, strength)):
        figure.suptitle("The recurrence on random inputs (nothing is trained)")
        for impl, label in (("reference", "loop"), ("chunkwise", "chunk form")):
            errors.loglog(tokens, [row[f"{impl}_error"] for row in forms], "o-", label=label)
            times.loglog(tokens, [row[f"{impl}_us_per_token"] for row in forms], "o-", label=label)
        errors.set(title="error against the float64 loop", xlabel="tokens", ylabel="relative error", ylim=(1e-8, 1e-5))
        times.set(title="time, forward, float32", xlabel="tokens", ylabel="µs per token")
        for formatter in (times.yaxis.set_major_formatter, times.yaxis.set_minor_formatter):
            formatter("{x:g}")
        s = [row["s"] for row in reads]
        strength.plot(s, [row["line"] for row in reads], color="lightgray", linewidth=5, label="eq. 12")
        strength.plot(s, [row["one_token"] for row in reads], "o-", label="in the last token only")
        strength.plot(s, [row["whole_sequence"] for row in reads], "s-", label="in every token")
        strength.set(title="the last read moves with s", xlabel="strength scale s", ylabel="‖o(s) − o(0)‖ / ‖o(0)‖")
        for axes in (errors, times, strength):
            axes.legend(frameon=False)
            axes.grid(alpha=0.3)
