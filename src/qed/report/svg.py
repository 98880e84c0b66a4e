"""A chart's panels as SVG inside a page: every value is there for the pointer, and text follows the page's colours.

A panel is drawn for the width of a phone. Its classes c0 … c6 are the palette of the style sheet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from markupsafe import Markup, escape

from ..analysis.names import length_title
from .charts import Axis, Panel, Series

WIDTH, HEIGHT = 360.0, 236.0
TOP, RIGHT, BOTTOM = 22.0, 12.0, 38.0
LETTER = 6.3  # the width of a letter of a label
MOST_POINTS = 150  # of a line without marks; longer ones are thinned
MOST_TICKS = 8
COLOURS = 7
DASHES = ("", "6 3", "2 3", "7 3 2 3")
# Marks around their point, so that arms differ not in colour alone.
MARKS = (
    "m-3.2 0a3.2 3.2 0 1 0 6.4 0a3.2 3.2 0 1 0-6.4 0z",
    "m-2.9-2.9h5.8v5.8h-5.8z",
    "m0-3.8l3.6 6.4h-7.2z",
    "m0-4l3.8 4l-3.8 4l-3.8-4z",
    "m0 3.8l3.6-6.4h-7.2z",
)
SHADES = ("#482878", "#3e4a89", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6dcd59", "#b4de2c")  # viridis
UNSEEN = "h0"


def shade(share: float) -> tuple[int, int, int]:
    """The colour of a value from 0 to 1, as red, green and blue."""
    place = min(max(share, 0.0), 1.0) * (len(SHADES) - 1)
    i = min(int(place), len(SHADES) - 2)
    ends = [[int(colour[j : j + 2], 16) for j in (1, 3, 5)] for colour in SHADES[i : i + 2]]
    red, green, blue = (round(a + (b - a) * (place - i)) for a, b in zip(*ends, strict=True))
    return red, green, blue


def ink_on(colour: tuple[int, int, int]) -> str:
    """Black or white, whichever is easier to read on a colour."""
    parts = [x / 255 for x in colour]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    light = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000" if (light + 0.05) / 0.05 > 1.05 / (light + 0.05) else "#fff"


def drawn(panel: Panel) -> Markup:
    """The panel as an SVG element. Values are in titles, the names of series in `data-name`."""
    plot = _Plot(panel)
    label = ". ".join(x for x in (panel.title, panel.y.label, panel.x.label) if x)
    head = f'<svg viewBox="0 0 {WIDTH:g} {plot.height:g}" role="img" tabindex="0" class="chart" aria-label="'
    head += f'{escape(label)}. Arrow keys step through the values.">'
    return Markup(head + "".join(plot.parts()) + "</svg>")  # every text in it is escaped


def sample(series: Series) -> Markup:
    """A short piece of a series for the legend."""
    line = f'<path class="line"{_dashes(series)} d="M1 7H25"/>' if series.line else ""
    mark = f'<path class="mark" d="M13 7{_mark(series)}"/>' if series.marked else ""
    return Markup(
        f'<svg viewBox="0 0 26 14" class="sample" aria-hidden="true"><g {_look(series)}>{line}{mark}</g></svg>'
    )


def _look(series: Series) -> str:
    """The attributes that give a series its colour."""
    faint = " faint" if series.faint else ""
    if isinstance(series.colour, float):
        return f'class="series shaded{faint}" style="--share:{100 * series.colour:.0f}%"'
    return f'class="series c{series.colour % COLOURS}{faint}"'


def _mark(series: Series) -> str:
    return MARKS[0 if isinstance(series.colour, float) else series.colour % len(MARKS)]


def _dashes(series: Series) -> str:
    return f' stroke-dasharray="{DASHES[series.dashes]}"' if DASHES[series.dashes] else ""


class _Plot:
    """Where everything of a panel is, and the parts of its drawing."""

    def __init__(self, panel: Panel):
        self.panel = panel
        self.x_ends, self.y_ends = _ends(panel, "x"), _ends(panel, "y")
        self.x_ticks, self.y_ticks = _ticks(panel.x, self.x_ends), _ticks(panel.y, self.y_ends)
        longest = max((len(line) for text in self.y_ticks.values() for line in text.split("\n")), default=1)
        self.left = min(16 + LETTER * longest, 150.0)
        room = (WIDTH - self.left - RIGHT) / max(1, len(self.x_ticks))
        widest = max((LETTER * len(text) for text in self.x_ticks.values()), default=0.0)
        self.slanted = panel.x.ticks is not None and panel.x.scale == "linear" and widest > room
        self.bottom = BOTTOM + (0.6 * widest - 8 if self.slanted else 0) - (0 if panel.x.label else 14)
        self.height = max(HEIGHT, 46.0 * len(self.y_ticks) + TOP + self.bottom if panel.y.flipped else 0.0)

    def at_x(self, value: float) -> float:
        """Where a value of the horizontal axis is."""
        return self.left + (WIDTH - self.left - RIGHT) * _share(value, self.panel.x, self.x_ends)

    def at_y(self, value: float) -> float:
        """Where a value of the vertical axis is."""
        share = _share(value, self.panel.y, self.y_ends)
        return TOP + (self.height - TOP - self.bottom) * (share if self.panel.y.flipped else 1 - share)

    def parts(self) -> Iterator[str]:
        """The elements of the drawing, what is behind others first."""
        panel, low = self.panel, self.height - self.bottom
        for value, text in self.y_ticks.items():
            y, lines = self.at_y(value), text.split("\n")
            yield f'<path class="grid" d="M{self.left:.1f} {y:.1f}H{WIDTH - RIGHT:g}"/>'
            for i, line in enumerate(lines):
                down = y + 3.5 + 12 * (i - (len(lines) - 1) / 2)
                yield f'<text x="{self.left - 6:.1f}" y="{down:.1f}" class="end">{escape(line)}</text>'
        for value, text in self.x_ticks.items():
            x = self.at_x(value)
            yield f'<path class="axis" d="M{x:.1f} {low:.1f}v4"/>'
            turned = f' transform="rotate(-35 {x:.1f} {low + 14:.1f})"' if self.slanted else ""
            side = "end" if self.slanted else "middle"
            yield f'<text x="{x:.1f}" y="{low + 16:.1f}" class="{side}"{turned}>{escape(text)}</text>'
        yield f'<path class="axis" d="M{self.left:.1f} {low:.1f}H{WIDTH - RIGHT:g}"/>'
        for value, text in panel.lines.items():
            if self.x_ends[0] <= value <= self.x_ends[1]:
                x = self.at_x(value)
                yield f'<path class="rule{" dashed" if text else ""}" d="M{x:.1f} {TOP:g}V{low:.1f}"/>'
                yield f'<text x="{x + 3:.1f}" y="{low - 5:.1f}" class="small">{escape(text)}</text>' if text else ""
        yield f'<text x="2" y="12">{escape(panel.y.label)}</text>'
        middle = min((self.left + WIDTH - RIGHT) / 2, WIDTH - 2 - LETTER * len(panel.x.label) / 2)
        yield f'<text x="{middle:.1f}" y="{self.height - 5:g}" class="middle">{escape(panel.x.label)}</text>'
        for series in panel.series:
            yield from self._series(series)

    def _series(self, series: Series) -> Iterator[str]:
        chosen = _thinned(series, self.panel)
        if not chosen:
            return
        yield f'<g {_look(series)} data-name="{escape(series.name)}">'
        if series.line:
            yield f'<path class="line"{_dashes(series)} d="{self._path(series, chosen)}"/>'
        for i in chosen:
            x, y = self._place(series, i)
            if series.low is not None and series.high is not None:
                low, high = series.low[i], series.high[i]
                if series.across:
                    yield f'<path class="bar" d="M{self.at_x(low):.1f} {y:.1f}H{self.at_x(high):.1f}"/>'
                else:
                    yield f'<path class="bar" d="M{x:.1f} {self.at_y(low):.1f}V{self.at_y(high):.1f}"/>'
            shape, seen = (_mark(series), "mark") if series.marked else (UNSEEN, "mark unseen")
            said = escape(_said(self.panel, series, i))
            yield f'<path class="{seen}" d="M{x:.1f} {y:.1f}{shape}"><title>{said}</title></path>'
        yield "</g>"

    def _place(self, series: Series, i: int) -> tuple[float, float]:
        x = (series.x[i] + series.x[i + 1]) / 2 if series.steps else series.x[i]
        return self.at_x(x), self.at_y(series.y[i])

    def _path(self, series: Series, chosen: list[int]) -> str:
        if not series.steps:
            places = (self._place(series, i) for i in chosen)
            return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        path, before = "", -2
        for i in chosen:
            x, y = self.at_x(series.x[i]), self.at_y(series.y[i])
            path += (f"V{y:.1f}" if before == i - 1 else f"M{x:.1f} {y:.1f}") + f"H{self.at_x(series.x[i + 1]):.1f}"
            before = i
        return path


def _said(panel: Panel, series: Series, i: int) -> str:
    """What a point says: where it is, its value, and its interval."""
    x = (series.x[i] + series.x[i + 1]) / 2 if series.steps else series.x[i]
    where, value = panel.x.shown(x), panel.y.shown(series.y[i])
    if series.across:
        where, value = value, where
    if series.low is None or series.high is None or series.low[i] == series.high[i]:
        return f"{where}: {value}"
    shown = panel.x.shown if series.across else panel.y.shown
    return f"{where}: {value} [{shown(series.low[i])}, {shown(series.high[i])}]"


def _thinned(series: Series, panel: Panel) -> list[int]:
    """The places of the values that are drawn. On a logarithmic axis those that are not above zero are left out."""
    drawn = [i for i, y in enumerate(series.y) if math.isfinite(y) and (panel.y.scale == "linear" or y > 0)]
    if series.marked or series.steps or len(drawn) <= MOST_POINTS:
        return drawn
    step = -(-len(drawn) // MOST_POINTS)
    return sorted({*drawn[::step], drawn[-1]})


def _ends(panel: Panel, side: str) -> tuple[float, float]:
    """The least and the most value that an axis shows."""
    axis: Axis = getattr(panel, side)
    if axis.ends is not None:
        return axis.ends
    values = [value for series in panel.series for value in getattr(series, side)]
    for series in panel.series:
        if series.across == (side == "x"):
            values += [*(series.low or []), *(series.high or [])]
    values += [*panel.lines] if side == "x" and axis.scale == "linear" else []
    values = [x for x in values if math.isfinite(x) and (axis.scale == "linear" or x > 0)] or [1.0]
    low, high = min(values), max(values)
    if axis.scale != "linear":
        return low / 1.08, high * 1.08
    room = 0.05 * (high - low) or abs(high) or 1.0
    return low - room, high + room


def _share(value: float, axis: Axis, ends: tuple[float, float]) -> float:
    scaled: Callable[[float], float] = (lambda x: x) if axis.scale == "linear" else math.log
    low, high = scaled(ends[0]), scaled(ends[1])
    if axis.scale != "linear":
        value = min(max(value, ends[0]), ends[1])
    return min(max((scaled(value) - low) / (high - low), -0.02), 1.02)


def _ticks(axis: Axis, ends: tuple[float, float]) -> dict[float, str]:
    """The ticks of an axis: its own, or round numbers; as many as have room."""
    low, high = ends
    if axis.ticks is not None:
        there = {value: text for value, text in axis.ticks.items() if low <= value <= high}
    elif axis.scale == "linear":
        step = 10.0 ** math.floor(math.log10((high - low) / 3))
        step *= next((x for x in (1, 2, 2.5, 5) if (high - low) / (step * x) <= 5), 10)
        first = math.ceil(low / step - 1e-9)
        there = {i * step: _short(i * step) for i in range(first, math.floor(high / step + 1e-9) + 1)}
    else:
        base = 2 if axis.scale == "log2" else 10
        powers = range(math.ceil(math.log(low, base)), math.floor(math.log(high, base)) + 1)
        there = {float(base) ** i: _short(base**i) if base == 10 else length_title(base**i) for i in powers}
    if axis.ticks is None or axis.scale != "linear":
        return dict(list(there.items())[:: -(-len(there) // MOST_TICKS) or 1])
    return there


def _short(value: float) -> str:
    """A tick's number in few characters."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 10 * size or (abs(value) >= size and value % size == 0):
            return f"{value / size:g}{letter}"
    return f"{value:.3g}" if abs(value) >= 1e-3 or value == 0 else f"{value:.0e}".replace("e-0", "e-")
