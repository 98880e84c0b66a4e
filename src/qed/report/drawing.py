"""How figures look: colours and lines of arms and runs, light and dark pages, and the files of a figure.

This module needs matplotlib.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from ..analysis.names import length_title, name_of
from ..analysis.results import Result, Run
from ..analysis.selection import arms_of

# People who see colours differently can tell these apart (Okabe and Ito).
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999"]
MARKERS = "os^Dv<>"
GREY = "#888888"  # of lines that only help to read a figure
MOST_LABELS = 12  # runs that a legend names one by one
LIGHT: dict[str, Any] = {"svg.hashsalt": "qed", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
INK = "#e6e6e6"
DARK: dict[str, Any] = LIGHT | {
    **{"figure.facecolor": "#16181c", "axes.facecolor": "#16181c", "savefig.facecolor": "#16181c", "text.color": INK},
    **{
        "axes.edgecolor": INK,
        "axes.labelcolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "legend.facecolor": "#16181c",
    },
}

Drawings = dict[str, tuple[str, Callable[[], Figure]]]  # by file name: a title, and how to draw the figure


def style(runs: list[Run], arm: str) -> dict[str, Any]:
    """The colour and marker of an arm among the arms of these runs."""
    i = arms_of(runs).index(arm)
    return {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}


def line(runs: list[Run], run: Run) -> dict[str, Any]:
    """The line of one run: its arm's colour and its seed's dashes. Among many runs, only arms are told apart."""
    colour = style(runs, run.arm)["color"]
    if len(runs) > MOST_LABELS:
        first = next(x for x in runs if x.arm == run.arm) is run
        return {"color": colour, "alpha": 0.5, "label": name_of(run.arm) if first else None}
    dashes = ["-", "--", ":", "-."][run.seed % 4]
    return {"color": colour, "linestyle": dashes, "label": f"{name_of(run.arm)}, seed {run.seed}"}


def median_tokens(result: Result) -> int:
    """The median length of a result's prompts in tokens."""
    return result.tokens[len(result.tokens) // 2]


def length_axis(panel: Any, ticks: list[int]) -> None:
    """A logarithmic horizontal axis of lengths in tokens, with these ticks."""
    panel.set_xscale("log", base=2)
    panel.set_xticks(ticks, [length_title(n) for n in ticks])
    panel.minorticks_off()


def mark_training_length(panel: Any, tokens: int, height: float) -> None:
    """A dashed vertical line at the training length, with its name beside it.

    Args:
        panel: the axes to draw on.
        tokens: the training length.
        height: where on the vertical axis the name begins.
    """
    panel.axvline(tokens, linestyle="--", linewidth=1, color=GREY)
    panel.annotate("training length", (tokens, height), rotation=90, fontsize=7, ha="right", color=GREY)


def drawn(draw: Callable[[], Figure], kinds: Iterable[str], dark: bool = False) -> dict[str, bytes]:
    """A figure as files, drawn once.

    Args:
        draw: draws the figure.
        kinds: of files, such as "svg" and "png".
        dark: for a dark page.
    """
    files = {}
    with mpl.rc_context(DARK if dark else LIGHT):
        figure = draw()
        for kind in kinds:
            file = io.BytesIO()
            metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
            figure.savefig(file, format=kind, dpi=150, metadata=metadata)
            files[kind] = file.getvalue()
        plt.close(figure)
    return files
