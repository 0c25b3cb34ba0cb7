"""Charts as data, and as SVG. Layer 3. Standard library only; `plots` draws the same data as PNG files.

A chart is 340 units wide, so that its text stays readable on a phone; wider pages put charts side by side. Colours are the
page's: a run's own (`r0`, `r1`, ...), the same everywhere. What a part of a bar means is its texture, not another colour:
solid taught something, pale was right already, hatched was wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from math import ceil, floor, log10, sqrt
from typing import Literal, TypeAlias

Unit: TypeAlias = Literal["count", "share", "points"]
"""Of the values on an axis: counts, shares of 1 shown in percent, differences of shares shown in percentage points."""
Texture: TypeAlias = Literal["solid", "mid", "pale", "faint", "none", "hatch", "dots", "grey"]

WIDTH = 340
LEFT, RIGHT, TOP, BOTTOM = 42, 10, 24, 36

DASHES = ("", "6 3", "2 2.5", "9 3 2 3", "1 3", "12 4", "4 4 1 4", "7 2 1 2")
"""Of the lines of runs: told apart without colour, too."""


@dataclass(frozen=True, slots=True)
class Axis:
    """From `low` to `high`, with (value, words) at the ticks. root: on a square-root scale, which spreads what is near 0."""

    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    label: str
    unit: Unit = "count"
    root: bool = False

    def place(self, value: float) -> float:
        """In [0, 1] for a value within the axis."""
        if self.root:
            return (sqrt(max(value, 0)) - sqrt(self.low)) / ((sqrt(self.high) - sqrt(self.low)) or 1.0)
        return (value - self.low) / ((self.high - self.low) or 1.0)


@dataclass(frozen=True, slots=True)
class Line:
    """points: (x, y). intervals: (x, low, high), drawn as bars. run: whose colour; None for a faint reference line."""

    name: str
    run: int | None
    points: Sequence[tuple[float, float]]
    intervals: Sequence[tuple[float, float, float]] = ()
    has_marks: bool = False


@dataclass(frozen=True, slots=True)
class Lines:
    title: str
    x: Axis
    y: Axis
    lines: Sequence[Line]


@dataclass(frozen=True, slots=True)
class Areas:
    """Shares of 1 stacked over x. edges: one more than there are bins; bands: (name, texture, a share for each bin)."""

    title: str
    run: int
    x: Axis
    edges: Sequence[float]
    bands: Sequence[tuple[str, Texture, Sequence[float]]]
    y_label: str


@dataclass(frozen=True, slots=True)
class Column:
    """One bar of each category. values: None for no bar. intervals: None for none."""

    name: str
    run: int
    texture: Texture
    values: Sequence[float | None]
    intervals: Sequence[tuple[float, float] | None] = ()


@dataclass(frozen=True, slots=True)
class Columns:
    """Bars side by side over named categories. show: value -> words, for what appears on touch or hover. is_log: powers of
    ten, from below 1; values are counts then."""

    title: str
    categories: Sequence[str]
    columns: Sequence[Column]
    x_label: str
    y: Axis
    show: Callable[[float], str]
    is_log: bool = False


@dataclass(frozen=True, slots=True)
class Rows:
    """A horizontal bar each row, cut into (name, texture, count)."""

    title: str
    run: int
    rows: Sequence[tuple[str, Sequence[tuple[str, Texture, float]]]]
    x: Axis
    unit: str


Chart: TypeAlias = Lines | Areas | Columns | Rows


@dataclass(frozen=True, slots=True)
class Figure:
    """Charts that belong together. caption: one sentence on how to read them. legend: (words, run or None, texture); a run
    stands for its line or bars, None for a texture in whatever colour."""

    name: str
    caption: str
    charts: Sequence[Chart]
    legend: Sequence[tuple[str, int | None, Texture]] = ()


def share_axis(label: str, high: float = 1.0) -> Axis:
    """Shares from 0 to `high` (1, .5, ...), in percent."""
    ticks = [(high * i / 4, f"{100 * high * i / 4:g} %") for i in range(5)]
    return Axis(0, high, ticks, label, "share")


def count_axis(high: float, label: str, low: float = 0.0) -> Axis:
    """From `low` to a round number at or above `high`, with 3 to 5 ticks."""
    high = max(high, low + 1)
    step = _round_step((high - low) / 4)
    ticks = [(step * k, short(step * k)) for k in range(ceil(low / step), floor(high / step + 1e-9) + 1)]
    return Axis(low, high, ticks, label)


def difference_axis(low: float, high: float, label: str) -> Axis:
    """Differences of shares, in percentage points; 0 is always on it."""
    low, high = min(low, 0.0), max(high, 0.01)
    step = _round_step((high - low) / 4)
    first, last = floor(low / step + 1e-9), ceil(high / step - 1e-9)
    ticks = [(step * k, f"{'−' if k < 0 else ''}{abs(100 * step * k):g}") for k in range(first, last + 1)]
    return Axis(step * first, step * last, ticks, label, "points")


def _round_step(least: float) -> float:
    power = 10.0 ** floor(log10(least))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= least * 0.999)


def short(n: float) -> str:
    """A count in few characters: 12,500 is 12.5k."""
    for size, unit in ((1_000_000_000, "G"), (1_000_000, "M"), (1000, "k")):
        if abs(n) >= size:
            return f"{n / size:.3g}{unit}"
    return f"{n:g}"


# -------------------------------------------------------------------------- SVG


def svg(chart: Chart) -> str:
    """A chart as an <svg> element that fills the width it is given. Text in it is escaped."""
    match chart:
        case Lines():
            height, body = 220, _lines(chart, 220)
        case Areas():
            height, body = 180, _areas(chart, 180)
        case Columns():
            height, body = 220, _columns(chart, 220)
        case Rows():
            height = TOP + BOTTOM + 30 * len(chart.rows)
            body = _rows(chart, height)
    title = escape(chart.title)
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{title}">'
        f'<text class="name" x="0" y="12">{title}</text>{body}</svg>'
    )


@dataclass(frozen=True, slots=True)
class _Plane:
    """Where values lie on the picture."""

    x: Axis
    y: Axis
    height: float
    left: float = LEFT
    base: float = 0.0  # the value of y where bars begin

    def at_x(self, value: float) -> float:
        return self.left + self.x.place(value) * (WIDTH - self.left - RIGHT)

    def at_y(self, value: float) -> float:
        return self.height - BOTTOM - self.y.place(value) * (self.height - TOP - BOTTOM)

    def point(self, x: float, y: float) -> str:
        return f"{self.at_x(x):.1f},{self.at_y(min(max(y, self.y.low), self.y.high)):.1f}"


def _frame(plane: _Plane, *, x_ticks: bool = True) -> str:
    """Grid, ticks and the words on both axes."""
    right, bottom = WIDTH - RIGHT, plane.height - BOTTOM
    parts = []
    for value, words in plane.y.ticks:
        y = plane.at_y(value)
        kind = "zero" if value == plane.base else "grid"
        parts.append(f'<line class="{kind}" x1="{plane.left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{plane.left - 5}" y="{y + 3.5:.1f}" text-anchor="end">{escape(words)}</text>'
        )
    if x_ticks:
        for value, words in plane.x.ticks:
            x = plane.at_x(value)
            parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 3}"/>')
            anchor = "end" if x + 3.2 * len(words) > right + 8 else "middle"
            x = min(x, right + 6) if anchor == "end" else x
            parts.append(
                f'<text class="tick" x="{x:.1f}" y="{bottom + 14}" text-anchor="{anchor}">{escape(words)}</text>'
            )
    parts.append(
        f'<text class="axis" x="{right}" y="{plane.height - 5}" text-anchor="end">{escape(plane.x.label)}</text>'
    )
    parts.append(f'<text class="axis" x="{right}" y="12" text-anchor="end">{escape(plane.y.label)}</text>')
    return "".join(parts)


def _lines(chart: Lines, height: float) -> str:
    plane = _Plane(chart.x, chart.y, height)
    parts = [_frame(plane)]
    for line in chart.lines:
        if not line.points:
            continue
        kind = "reference" if line.run is None else f"line r{line.run}"
        dash = "3 3" if line.run is None else DASHES[line.run % len(DASHES)]
        drawn = " ".join(plane.point(x, y) for x, y in line.points)
        name = escape(line.name)
        for x, low, high in line.intervals:
            at = plane.at_x(x)
            ends = [plane.at_y(min(max(value, chart.y.low), chart.y.high)) for value in (low, high)]
            parts.append(
                f'<line class="interval {kind}" x1="{at:.1f}" x2="{at:.1f}" y1="{ends[0]:.1f}" y2="{ends[1]:.1f}"/>'
            )
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        parts.append(f'<polyline class="{kind}" points="{drawn}"{dashes}><title>{name}</title></polyline>')
        marks = line.points if line.has_marks else line.points[-1:] if line.run is not None else ()
        for x, y in marks:
            cx, cy = plane.point(x, y).split(",")
            parts.append(
                f'<circle class="mark r{line.run}" cx="{cx}" cy="{cy}" r="3">'
                f"<title>{name}: {_value(chart.y, y)} at {_value(chart.x, x)}</title></circle>"
            )
    return "".join(parts)


def _value(axis: Axis, value: float) -> str:
    """A value with its unit."""
    if axis.unit == "share":
        return f"{100 * value:.1f} %"
    if axis.unit == "points":
        return f"{'−' if value < 0 else '+'}{abs(100 * value):.1f} points"
    return f"{value:,.0f}"


def _areas(chart: Areas, height: float) -> str:
    plane = _Plane(chart.x, share_axis(chart.y_label), height)
    parts = []
    floors = [0.0] * (len(chart.edges) - 1)
    for name, texture, shares in chart.bands:
        if not any(shares):
            continue
        tops = [low + share for low, share in zip(floors, shares, strict=True)]
        outline = [
            *(plane.point(x, y) for i, y in enumerate(tops) for x in chart.edges[i : i + 2]),
            *(plane.point(x, y) for i, y in reversed(list(enumerate(floors))) for x in chart.edges[i : i + 2][::-1]),
        ]
        parts.append(
            f'<polygon class="{texture} r{chart.run}" points="{" ".join(outline)}"><title>{escape(name)}</title></polygon>'
        )
        floors = tops
    return "".join(parts) + _frame(plane)


def _columns(chart: Columns, height: float) -> str:
    n = len(chart.categories)
    x = Axis(0, n, [(i + 0.5, words) for i, words in enumerate(chart.categories)], chart.x_label)
    y = _logged(chart.y) if chart.is_log else chart.y
    plane = _Plane(x, y, height, base=y.low if chart.is_log else 0.0)
    step = max(1, ceil(n / 13))
    shown = Axis(0, n, list(x.ticks)[::step], chart.x_label)
    parts = [_frame(replace(plane, x=shown))]
    width = (WIDTH - LEFT - RIGHT) / max(n, 1)
    slots = [(column.run, column.texture) for column in chart.columns]
    bar = min(0.76 * width / max(len(slots), 1), 26)
    for k, column in enumerate(chart.columns):
        for i, value in enumerate(column.values):
            if not value or (chart.is_log and value < 0):
                continue
            left = plane.at_x(i + 0.5) + (k - len(slots) / 2) * bar
            level = log10(value) if chart.is_log else value
            ends = sorted((plane.at_y(plane.base), plane.at_y(level)))
            words = f"{column.name}, {chart.categories[i]}: {chart.show(value)}"
            interval = column.intervals[i] if column.intervals else None
            if interval:
                words += f" ({chart.show(interval[0])} to {chart.show(interval[1])})"
            parts.append(
                f'<rect class="{column.texture} r{column.run}" x="{left + bar * 0.06:.1f}" y="{ends[0]:.1f}" '
                f'width="{bar * 0.88:.1f}" height="{max(ends[1] - ends[0], 0.6):.1f}"><title>{escape(words)}</title></rect>'
            )
            if interval:
                at = left + bar / 2
                parts.append(
                    f'<line class="whisker" x1="{at:.1f}" x2="{at:.1f}" '
                    f'y1="{plane.at_y(interval[0]):.1f}" y2="{plane.at_y(interval[1]):.1f}"/>'
                )
    return "".join(parts)


def log_axis(highest: float, label: str) -> Axis:
    """For `Columns.is_log`: from a little below 1 to a power of ten."""
    top = max(ceil(log10(max(highest, 1)) - 1e-9), 1)
    return Axis(0, 10.0**top, [(10.0**k, short(10**k)) for k in range(top + 1)], label)


def _logged(axis: Axis) -> Axis:
    ticks = [(-0.3, ""), *((log10(value), words) for value, words in axis.ticks)]
    return Axis(-0.3, log10(axis.high), ticks, axis.label)


def _rows(chart: Rows, height: float) -> str:
    left = 66
    plane = _Plane(chart.x, Axis(0, len(chart.rows), [], ""), height, left)
    bottom = height - BOTTOM
    parts = []
    for value, words in chart.x.ticks:
        x = plane.at_x(value)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>')
        anchor = "end" if x > WIDTH - RIGHT - 8 else "middle"
        parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 14}" text-anchor="{anchor}">{escape(words)}</text>')
    for i, (label, pieces) in enumerate(chart.rows):
        top = TOP + 30 * i + 6
        parts.append(f'<text class="tick" x="{left - 6}" y="{top + 13}" text-anchor="end">{escape(label)}</text>')
        at = 0.0
        for name, texture, count in pieces:
            if count <= 0:
                continue
            x0, x1 = plane.at_x(at), plane.at_x(at + count)
            words = f"{label}, {name}: {count:,.0f} {chart.unit}"
            parts.append(
                f'<rect class="{texture} r{chart.run}" x="{x0:.1f}" y="{top}" width="{max(x1 - x0, 0.4):.1f}" height="18">'
                f"<title>{escape(words)}</title></rect>"
            )
            at += count
        parts.append(
            f'<rect class="frame r{chart.run}" x="{left}" y="{top}" width="{max(plane.at_x(at) - left, 0.4):.1f}" height="18"/>'
        )
    parts.append(
        f'<text class="axis" x="{WIDTH - RIGHT}" y="{height - 5}" text-anchor="end">{escape(chart.x.label)}</text>'
    )
    return "".join(parts)


def swatch(run: int | None, texture: Texture) -> str:
    """A small sample for a legend: a run's line, or a texture in the colour of the text."""
    if run is not None:
        dash = DASHES[run % len(DASHES)]
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        return (
            f'<svg class="swatch" viewBox="0 0 26 10"><line class="line r{run}" x1="0" x2="26" y1="5" y2="5"{dashes}/>'
            f'<circle class="mark r{run}" cx="13" cy="5" r="3.4"/></svg>'
        )
    return f'<svg class="swatch" viewBox="0 0 26 10"><rect class="{texture} ink" width="26" height="10"/></svg>'
