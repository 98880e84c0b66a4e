"""What a figure shows, before it is drawn: panels of lines, points and cells, each value once.

`drawing.py` draws a chart for PNG and PDF, `svg.py` for the page. Both read the same values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..analysis.names import length_title, name_of
from ..analysis.results import Result, Run
from ..analysis.selection import arms_of

MOST_LABELS = 12  # runs that a legend names one by one


def number(value: float) -> str:
    """A number with as many digits as are worth reading."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def tokens(value: float) -> str:
    """A number of tokens in words."""
    return f"{value:,.0f} tokens"


def per_cent(value: float) -> str:
    """Per cent with one digit after the decimal point."""
    return f"{value:.1f} %"


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis of a panel."""

    label: str
    scale: str = "linear"  # or "log2" or "log10"
    ticks: dict[float, str] | None = None  # None: round numbers
    ends: tuple[float, float] | None = None  # None: as the values need
    shown: Callable[[float], str] = number  # how a value is written for a reader who points at it
    flipped: bool = False  # the least at the top


@dataclass(frozen=True, kw_only=True)
class Series:
    """Values that belong together: a line, or points with or without intervals."""

    name: str
    colour: int | float  # a place in the palette, or a shade from 0.0 to 1.0
    x: list[float]  # with steps, the edges of bins, one more than y has values
    y: list[float]
    low: list[float] | None = None  # ends of the intervals: of y, or of x where they lie across
    high: list[float] | None = None
    across: bool = False
    line: bool = True
    marked: bool = True
    steps: bool = False
    faint: bool = False
    dashes: int = 0
    listed: bool = True  # in the legend


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Series on a pair of axes. Values on the horizontal axis may be marked by a line across the panel."""

    title: str = ""
    x: Axis
    y: Axis
    series: list[Series]
    lines: dict[float, str] = field(default_factory=dict)  # vertical ones, each with its name


@dataclass(frozen=True, kw_only=True)
class Heat:
    """A table of values, each with a colour. None is a value that is not there."""

    title: str
    columns: list[str]
    rows: list[str]
    values: list[list[float | None]]
    said: list[list[str]]  # what a reader who points at the value is told
    column_label: str
    row_label: str
    value_label: str
    most: float  # the value of the last colour; the first is 0
    digits: int = 0


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A figure: its title, what it says, and its panels."""

    title: str
    caption: str
    panels: list[Panel | Heat]
    width: float = 6.0  # of a panel, in inches, where it is drawn for print
    height: float = 3.4
    in_a_row: int = 4  # panels
    same_y: bool = True  # whether the panels have the same vertical axis
    key: str = ""  # the title of the legend


Charts = dict[str, Chart]  # by the name of its files


def palette(runs: list[Run], arm: str) -> int:
    """The place in the palette of an arm among the arms of these runs."""
    return arms_of(runs).index(arm)


def line_of(
    runs: list[Run], run: Run, x: list[float], y: list[float], *, marked: bool = True, steps: bool = False
) -> Series:
    """The line of one run: its arm's colour and its seed's dashes. Among many runs, only arms are told apart.

    Args:
        runs: all that are drawn.
        run: whose line it is.
        x: where its values are.
        y: the values.
        marked: whether each value has a mark.
        steps: whether x has the edges of bins.
    """
    many = len(runs) > MOST_LABELS
    first = next(other for other in runs if other.arm == run.arm) is run
    return Series(
        name=name_of(run.arm) if many else f"{name_of(run.arm)}, seed {run.seed}",
        colour=palette(runs, run.arm),
        x=x,
        y=y,
        faint=many,
        dashes=0 if many else run.seed % 4,
        listed=first or not many,
        marked=marked,
        steps=steps,
    )


def median_tokens(result: Result) -> int:
    """The median length of a result's prompts in tokens."""
    return result.tokens[len(result.tokens) // 2]


def lengths_axis(label: str, ticks: list[int]) -> Axis:
    """A logarithmic axis of lengths in tokens, with these ticks."""
    return Axis(label=label, scale="log2", ticks={n: length_title(n) for n in ticks}, shown=tokens)
