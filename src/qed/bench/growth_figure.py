"""What `qed bench growth` found, as the cells of tables and as a figure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..analysis.names import length_title
from ..report.charts import Axis, Chart, Panel, Series, lengths_axis

MODELS = {"qed": "QED", "softmax": "Transformer", "fla": "GDN-2, fla"}
# What is shown of every work: the key of its cells, what that is, and the digits behind the point.
WORKS = {
    "training": ("tokens_per_s", "training, tokens/s, by the tokens of a row", 0),
    "memory": ("peak_gib", "training, peak memory in GiB, by the tokens of a row", 1),
    "prefill": ("us_per_token", "prefill, µs a token, by the tokens of the text", 2),
    "decoding": ("ms_per_token", "decoding, ms a token, by the tokens before it", 3),
}


def cells_of(report: dict[str, Any], work: str, model: str) -> dict[int, Any]:
    """Return by length what was measured: a number, or the reason why there is none.

    Args:
        report: What `qed bench growth` wrote.
        work: A work of WORKS.
        model: A model of MODELS.
    """
    key = WORKS[work][0]
    cells = report["cells"]["training" if work == "memory" else work][model]
    return {int(n): cell.get(key, cell.get("skipped")) for n, cell in cells.items()}


def table(report: dict[str, Any], work: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the rows of a work's table: a length, and what each model takes; nothing where it was not measured."""
    digits = WORKS[work][2]
    for length in report["settings"]["lengths"]:
        row = []
        for model in MODELS:
            value = cells_of(report, work, model).get(length)
            row.append("" if value is None else value if isinstance(value, str) else f"{value:,.{digits}f}")
        yield length_title(length), row


def chart(report: dict[str, Any]) -> Chart:
    """Return the figure, before it is drawn: a panel for every work."""
    panels = []
    for work, (_, unit, _) in WORKS.items():
        title, x_label = unit.rsplit(", by the ", 1)
        series = []
        for i, (model, name) in enumerate(MODELS.items()):
            known = {n: y for n, y in sorted(cells_of(report, work, model).items()) if isinstance(y, float)}
            if known:
                series.append(Series(name=name, colour=i, x=[*map(float, known)], y=[*known.values()]))
        if series:
            x, values = lengths_axis(x_label, report["settings"]["lengths"]), [y for one in series for y in one.y]
            panels.append(Panel(title=title, x=x, y=_axis(title, values, linear=work == "memory"), series=series))
    caption = "Each point is a median of calls in one run. All axes are logarithmic but that of memory."
    title = "How cost grows with the length of a text"
    return Chart(title=title, caption=caption, panels=list(panels), width=3.6, height=3.2, in_a_row=2, same_y=False)


def _axis(label: str, values: list[float], *, linear: bool) -> Axis:
    """Return a vertical axis from 0 on, or a logarithmic one with plain numbers from the tick below the least value to
    the one above the largest."""
    if linear:
        return Axis(label=label, ends=(0.0, 1.1 * max(values)))
    places = [first * 10.0**i for i in range(-6, 10) for first in (1, 2, 5)]
    low, high = max(x for x in places if x <= min(values)), min(x for x in places if x >= max(values))
    low, high = (low, high) if low < high else (low, places[places.index(high) + 1])
    ticks = {x: f"{x:,.10g}" for x in places if low <= x <= high}
    return Axis(label=label, scale="log10", ticks=ticks, ends=(low, high))


def figure(report: dict[str, Any]) -> bytes:
    """Return the figure as SVG; it needs matplotlib."""
    from ..report.drawing import drawn

    return drawn(chart(report), ["svg"])["svg"]
