"""Draws `mechanism.svg`: the erase vectors of GDN-2 and QED in the plane of a key and a query, and one step.

    python docs/figures/mechanism.py

The erase gate b is drawn as one number for all channels, so that b⊙k lies along k.
"""

from math import cos, radians, sin
from pathlib import Path

WIDTH, HEIGHT, UNIT = 840, 440, 186  # the drawing, and the length of a unit vector, in pixels
ANGLE, GATE, STRENGTH = radians(58), 0.8, 0.6  # between k and q; b; λ, which the paper bounds by 0.25
LIGHT = {"ink": "#1f2328", "soft": "#59636e", "card": "#ffffff", "box": "#f3f5f8", "line": "#c4ccd6"}
LIGHT |= {"key": "#1457b8", "query": "#0f7040", "erase": "#b3261e", "correction": "#7a3db8"}
DARK = {"ink": "#e6edf3", "soft": "#a3b0bd", "card": "#12171e", "box": "#1e2630", "line": "#465260"}
DARK |= {"key": "#86b7ff", "query": "#62d39c", "erase": "#ff9186", "correction": "#d3adff"}
STEPS = (
    ("decay", "Diag(exp g) S", "channels fade", "soft"),
    ("erase", "S − k (aᵀS)", "what a measures", "erase"),
    ("write", "S + k (w⊙v)ᵀ", "new value at k", "key"),
    ("read", "o = Sᵀq", "seen by the query", "query"),
)


def colours(table: dict[str, str]) -> str:
    """The rules of a style sheet: a class fills text with its colour, and with `s` draws lines in it."""
    return " ".join(f".{name}{{fill:{code}}} .s.{name}{{stroke:{code};fill:none}}" for name, code in table.items())


def text(
    x: float, y: float, words: str, kind: str = "ink", size: int = 16, anchor: str = "start", bold: str = ""
) -> str:
    """A line of text."""
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" class="{kind}" font-size="{size}" text-anchor="{anchor}"{weight}>{words}</text>'
    )


def line(start: tuple[float, float], end: tuple[float, float], kind: str, width: float = 2, dashes: str = "") -> str:
    """A straight line."""
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    ends = f'x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}"'
    return f'<line {ends} class="s {kind}" stroke-width="{width}"{dashed}/>'


def arrow(start: tuple[float, float], end: tuple[float, float], kind: str, width: float = 2.5) -> str:
    """A line with a head, whose tip is at `end`."""
    dx, dy = end[0] - start[0], end[1] - start[1]
    length = (dx * dx + dy * dy) ** 0.5
    dx, dy, head, half = dx / length, dy / length, 6 + 2.2 * width, 2.5 + width
    back = (end[0] - head * dx, end[1] - head * dy)
    corners = (end, (back[0] - half * dy, back[1] + half * dx), (back[0] + half * dy, back[1] - half * dx))
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
    return line(start, back, kind, width) + f'<polygon points="{points}" class="{kind}"/>'


def panel(left: float, strength: float, title: str, said: tuple[str, str]) -> list[str]:
    """The plane of k and q, with the erase vector for a strength λ."""
    origin = (left + 34, 246)

    def at(x: float, y: float) -> tuple[float, float]:
        return origin[0] + UNIT * x, origin[1] - UNIT * y

    rho, rest = cos(ANGLE), sin(ANGLE)  # q = ρ k + q⊥
    correction = strength * GATE * rest  # λ·P⊥ₖ(b⊙q) = λ·b·q⊥ where b is one number
    parts = [
        text(left + 16, 36, title, size=19, bold="y"),
        line(at(rho, 0), at(rho, rest), "query", 2, "5 4"),
        line(at(rho - 0.06, 0), at(rho - 0.06, 0.06), "soft", 1.2),
        line(at(rho - 0.06, 0.06), at(rho, 0.06), "soft", 1.2),
        arrow(at(0, 0), at(1, 0), "key"),
        arrow(at(0, 0), at(rho, rest), "query"),
        text(at(1, 0)[0] + 9, at(1, 0)[1] + 5, "k", "key", 19, bold="y"),
        text(at(rho, rest)[0] + 3, at(rho, rest)[1] - 9, "q", "query", 19, bold="y"),
        text(at(rho, rest)[0] + 9, at(0, 0.66)[1], "q⊥, the part of q", "query", 15),
        text(at(rho, rest)[0] + 9, at(0, 0.66)[1] + 19, "orthogonal to k", "query", 15),
    ]
    if strength:
        parts += [
            arrow(at(GATE, 0), at(GATE, correction), "correction", 3.5),
            arrow(at(0, 0), at(GATE, correction), "erase", 4.5),
            text(at(GATE, correction)[0] + 9, at(0, correction)[1] + 5, "a", "erase", 20, bold="y"),
            text(at(GATE, correction)[0] + 9, at(0, 0.17)[1], "λ·P⊥ₖ(b⊙q)", "correction", 16),
            text(at(0, 0)[0], at(0, 0)[1] + 26, "a = b⊙k + λ·P⊥ₖ(b⊙q)", "erase", 17, bold="y"),
        ]
    else:
        parts += [
            arrow(at(0, 0), at(GATE, 0), "erase", 4.5),
            text(at(0, 0)[0], at(0, 0)[1] + 26, "a = b⊙k", "erase", 17, bold="y"),
        ]
    return [*parts, *(text(left + 16, 300 + 21 * i, words, "soft", 15) for i, words in enumerate(said))]


def step() -> list[str]:
    """One token: what happens to the state, from left to right."""
    parts, width, gap, left, top = [], 154, 22, 70, 348
    parts.append(text(18, top + 41, "Sₜ₋₁", size=18, bold="y"))
    for i, (name, formula, said, kind) in enumerate(STEPS):
        x = left + i * (width + gap) + 10
        parts.append(arrow((x - gap + (8 if i == 0 else 2), top + 36), (x - 2, top + 36), "soft", 1.5))
        parts.append(f'<rect x="{x}" y="{top}" width="{width}" height="76" rx="8" class="box"/>')
        parts.append(text(x + 10, top + 21, name, kind, 15, bold="y"))
        parts.append(text(x + 10, top + 43, formula, size=16))
        parts.append(text(x + 10, top + 64, said, "soft", 14))
    parts.append(text(left + 4 * (width + gap) - 2, top + 41, "Sₜ, oₜ", size=18, bold="y"))
    return parts


def drawing() -> str:
    """The whole file."""
    about = (
        "Two drawings of a key k and a query q. In GDN-2 the erase vector a lies along k. In QED it has a second part, "
        "orthogonal to k, made of the query's part that is orthogonal to k. Below, one step of the state: decay, "
        "erase, write, read."
    )
    left = panel(
        16,
        0,
        "GDN-2 erases along the key",
        ("What the state holds along q⊥ disturbs the", "read, and the erase does not measure it."),
    )
    said = ("It is measured too, gated by b and weighted", "by λ, and subtracted at the key.")
    right = panel(428, STRENGTH, "QED also along the query", said)
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{about}">'
    fonts = "font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,'DejaVu Sans',sans-serif"
    style = f"<style>text{{{fonts}}} {colours(LIGHT)} @media (prefers-color-scheme: dark){{{colours(DARK)}}}</style>"
    card = f'<rect width="{WIDTH}" height="{HEIGHT}" rx="12" class="card"/>'
    middle = line((420, 20), (420, 326), "line", 1)
    return "\n".join([head, style, card, middle, *left, *right, *step(), "</svg>"]) + "\n"


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(drawing(), encoding="utf-8")
