"""Charts as PNG and PDF. This module needs matplotlib."""

from __future__ import annotations

import io
from collections.abc import Iterable
from math import ceil
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from .charts import MOST_LABELS, Axis, Chart, Heat, Panel, Series

# People who see colours differently can tell these apart (Okabe and Ito).
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999"]
MARKERS = "os^Dv"  # of colours and markers none is a multiple of the other, so that 35 series differ
DASHES = ("-", "--", ":", "-.")
LONG = 8  # letters of a column's name that have room beside the next one's
GREY = "#888888"  # of lines that only help to read a figure
LIGHT: dict[str, Any] = {"svg.hashsalt": "qed", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
METADATA = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}  # the same chart gives the same file


def drawn(chart: Chart, kinds: Iterable[str]) -> dict[str, bytes]:
    """A chart as files of these kinds, such as "png" and "pdf", drawn once."""
    files = {}
    with mpl.rc_context(LIGHT):
        figure = _figure(chart)
        for kind in kinds:
            file = io.BytesIO()
            figure.savefig(file, format=kind, dpi=150, metadata=METADATA.get(kind))
            files[kind] = file.getvalue()
        plt.close(figure)
    return files


def _figure(chart: Chart) -> Figure:
    count = len(chart.panels)
    wide, high = min(count, chart.in_a_row), ceil(count / chart.in_a_row)
    size = (chart.width * wide + (1.2 if count > 1 else 0), chart.height * high)
    figure, axes = plt.subplots(high, wide, figsize=size, sharey=chart.same_y, squeeze=False, layout="constrained")
    for panel in axes.flat[count:]:
        panel.set_axis_off()
    image = None
    for i, (axis, panel) in enumerate(zip(axes.flat, chart.panels, strict=False)):
        if isinstance(panel, Heat):
            image = _heat(axis, panel, first=i % wide == 0)
        else:
            _panel(axis, panel, first=i % wide == 0 and chart.same_y)
        axis.set_title(panel.title, fontsize=9)
    for panel in chart.panels[:1] if image is not None else []:
        assert isinstance(panel, Heat)
        figure.colorbar(image, ax=axes.ravel().tolist(), label=panel.value_label, shrink=0.9)
    across = any(isinstance(x, Panel) and any(series.across for series in x.series) for x in chart.panels)
    _legends(figure, list(axes.flat), across, chart.key)
    return figure


def _legends(figure: Figure, axes: list[Any], outside: bool, key: str) -> None:
    """Write every listed name once: beside the panels, or inside of those that have names which fuller ones have not.

    Args:
        figure: what is drawn on.
        axes: its panels.
        outside: whether there is no room inside of them.
        key: the legends' title.
    """
    named: dict[str, Any] = {}
    inside, most = [], 0
    # A seed may lack arms, so the fullest panel is first.
    for axis in sorted(axes, key=lambda axis: -len(axis.get_legend_handles_labels()[0])):
        handles, names = axis.get_legend_handles_labels()
        if not set(names) <= named.keys():
            inside.append(axis)
            most = max(most, len(names))
        named |= {name: handle for name, handle in zip(names, handles, strict=True) if name not in named}
    # Intervals that lie across may be anywhere in the panel, and so many names would cover it.
    if named and (outside or most > MOST_LABELS):
        figure.legend(named.values(), named.keys(), fontsize=8, loc="outside right upper")
        return
    for axis in inside:
        axis.legend(fontsize=8 if len(axes) == 1 else 7, title=key or None, title_fontsize=8)


def _panel(axis: Any, panel: Panel, first: bool) -> None:
    for i, series in enumerate(panel.series):
        _series(axis, series, above=2 + i / 1000)
    for place, name in panel.lines.items():
        axis.axvline(place, linestyle="--" if name else "-", linewidth=1, color=GREY)
        if name:
            bottom = axis.get_ylim()[0] if panel.y.ends is None else panel.y.ends[0]
            axis.annotate(name, (place, bottom), rotation=90, fontsize=7, ha="right", va="bottom", color=GREY)
    for side, line in (("x", panel.x), ("y", panel.y)):
        _axis(axis, side, line)
    if first or panel.y.flipped:
        axis.set_ylabel(panel.y.label)
    axis.set_xlabel(panel.x.label)


def _axis(axis: Any, side: str, line: Axis) -> None:
    if line.scale != "linear":
        getattr(axis, f"set_{side}scale")("log", base=2 if line.scale == "log2" else 10)
    if line.ticks is not None:
        getattr(axis, f"set_{side}ticks")(list(line.ticks), list(line.ticks.values()))
        axis.tick_params(axis=side, which="minor", bottom=False, left=False)
        axis.tick_params(axis=side, labelsize=8)
    if line.ends is not None:
        getattr(axis, f"set_{side}lim")(*(reversed(line.ends) if line.flipped else line.ends))


def _series(axis: Any, series: Series, above: float) -> None:
    shade = isinstance(series.colour, float)
    place = 0 if shade else int(series.colour)
    look: dict[str, Any] = {
        "color": plt.get_cmap("viridis")(0.05 + 0.85 * series.colour) if shade else COLOURS[place % len(COLOURS)],
        "label": series.name if series.listed else None,
        "alpha": 0.45 if series.faint else 1.0,
        "zorder": above,
    }
    if series.steps:
        axis.stairs(series.y, series.x, linestyle=DASHES[series.dashes], **look)
        return
    look["linestyle"] = DASHES[series.dashes] if series.line else ""
    look["linewidth"] = 0.7 if series.faint else 1.3
    look["marker"] = "." if shade else MARKERS[place % len(MARKERS)] if series.marked else ""
    look["markersize"] = 4
    if series.low is None or series.high is None:
        axis.plot(series.x, series.y, **look)
        return
    middle = series.x if series.across else series.y
    ends = np.abs(np.array([series.low, series.high]) - np.array(middle))
    axis.errorbar(series.x, series.y, **{"xerr" if series.across else "yerr": ends}, capsize=2, **look)


def _heat(axis: Any, panel: Heat, first: bool) -> Any:
    values = np.array([[np.nan if x is None else x for x in row] for row in panel.values], dtype=float)
    high, wide = values.shape
    image = axis.pcolormesh(np.arange(wide + 1), np.arange(high + 1), values, cmap="viridis", vmin=0, vmax=panel.most)
    turned = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"} if max(map(len, panel.columns)) > LONG else {}
    axis.set_xticks(np.arange(wide) + 0.5, panel.columns, fontsize=7, **turned)
    axis.set_yticks(np.arange(high) + 0.5, panel.rows, fontsize=7)
    axis.set_ylim(high, 0)
    axis.set_xlabel(panel.column_label, fontsize=8)
    if first:
        axis.set_ylabel(panel.row_label)
    return image
