"""Pictures of runs, and the charts of a report, as PNG files. Layer 3; matplotlib without a display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from nevergiveup.report.charts import Areas, Axis, Chart, Columns, Figure, Lines, Rows, Texture

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

COLOURS = (
    "#6b7280", "#d9480f", "#1971c2", "#2b8a3e", "#862e9c", "#e6a700", "#0b7285", "#c2255c", "#5c940d", "#4c2f00",
)  # fmt: skip
"""One a run, in the order given: the baseline is grey."""

TITLES = {
    "easy": "easy (> .7)",
    "medium": "medium (.3-.7)",
    "hard": "hard (.02-.3)",
    "extra_hard": "extra hard (< .02)",
}


@dataclass(frozen=True, slots=True)
class Curve:
    """One run. points: completions drawn so far, and pass@1 by bucket; spent: completions drawn for each bucket."""

    label: str
    points: Sequence[tuple[int, Mapping[str, float]]]
    spent: Mapping[str, float]


def pass_rates_by_bucket(groups: Mapping[str, Sequence[Curve]], buckets: Sequence[str], title: str, path: Path) -> None:
    """A panel a bucket: pass@1 over completions drawn, one thin line a run and a thick one for the mean of its group;
    and a last panel of where the completions went. groups: name -> its runs (seeds), in the order of `COLOURS`."""
    figure, axes = plt.subplots(1, len(buckets) + 1, figsize=(3.0 * (len(buckets) + 1), 3.2), layout="constrained")
    for axis, bucket in zip(axes, buckets, strict=False):
        for colour, (name, curves) in zip(COLOURS, groups.items(), strict=False):
            _lines(axis, curves, bucket, colour, name)
        axis.set_title(TITLES.get(bucket, bucket), fontsize=10)
        axis.set_ylim(0, 1.02)
        axis.set_xlabel("completions drawn", fontsize=8)
        axis.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k")
        axis.grid(alpha=0.25)
        axis.tick_params(labelsize=8)
    axes[0].set_ylabel("pass@1, held out", fontsize=9)
    axes[len(buckets) - 1].legend(fontsize=9, loc="lower right")
    _spent(axes[-1], groups, buckets)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _lines(axis: Any, curves: Sequence[Curve], bucket: str, colour: str, name: str) -> None:
    series = [[(x, rates[bucket]) for x, rates in curve.points if bucket in rates] for curve in curves]
    series = [points for points in series if points]
    if len(series) > 1:
        for points in series:
            axis.plot(*zip(*points, strict=True), color=colour, linewidth=0.8, alpha=0.35)
    if (
        series
    ):  # runs are evaluated every so many steps, at different numbers of completions: the mean is over a common grid
        last = min(points[-1][0] for points in series)
        grid = np.linspace(0, last, 100)
        mean = np.mean([np.interp(grid, [x for x, _ in points], [y for _, y in points]) for points in series], axis=0)
        axis.plot(grid, mean, color=colour, linewidth=2.2, label=name)


def _spent(axis: Any, groups: Mapping[str, Sequence[Curve]], buckets: Sequence[str]) -> None:
    width = 0.8 / len(groups)
    for i, (colour, (name, curves)) in enumerate(zip(COLOURS, groups.items(), strict=False)):
        drawn = [sum(curve.spent.get(bucket, 0.0) for curve in curves) for bucket in buckets]
        whole = sum(drawn) or 1.0
        places = [j + (i - (len(groups) - 1) / 2) * width for j in range(len(buckets))]
        axis.bar(places, [100 * value / whole for value in drawn], width, color=colour, label=name)
    axis.set_xticks(range(len(buckets)), [bucket.replace("_", "\n") for bucket in buckets], fontsize=8)
    axis.set_title("completions spent, %", fontsize=10)
    axis.tick_params(axis="y", labelsize=8)
    axis.grid(axis="y", alpha=0.25)


# -------------------------------------------------------------------------- the charts of a report

RUN_COLOURS = ("#0072b2", "#c84e00", "#00875f", "#a8518a", "#8a6d00", "#3a86b8", "#5b5b5b", "#7a3b1d")
"""Those of the page."""
_DASHES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (1, 3)), (0, (6, 3)), (0, (3, 2, 1, 2)), (0, (5, 1, 1, 1)))
_ALPHA: Mapping[Texture, float] = {"solid": 1.0, "mid": 0.55, "pale": 0.26, "faint": 0.1, "none": 0.0}
_HATCHES: Mapping[Texture, str] = {"hatch": "////", "dots": "...."}


def draw(figure: Figure, labels: Sequence[str], path: Path) -> None:
    """A figure of a report as a PNG file. labels: names of the runs, by number."""
    n_columns = min(len(figure.charts), 3)
    n_rows = -(-len(figure.charts) // n_columns)
    canvas, axes = plt.subplots(
        n_rows, n_columns, figsize=(4.4 * n_columns, 3.0 * n_rows + 0.7), layout="constrained", squeeze=False
    )
    places = list(axes.flat)
    for axis, chart in zip(places, figure.charts, strict=False):
        _draw(axis, chart)
    for axis in places[len(figure.charts) :]:
        axis.set_axis_off()
    keys = [
        Line2D([], [], color=RUN_COLOURS[run], linestyle=_DASHES[run], linewidth=2, marker="o", markersize=4)
        if run is not None
        else Rectangle((0, 0), 1, 1, **_filled("#333333", texture))
        for _, run, texture in figure.legend
    ]
    canvas.legend(
        keys, [name for name, _, _ in figure.legend], loc="outside upper left", ncols=4, fontsize=8, frameon=False
    )
    canvas.savefig(path, dpi=130)
    plt.close(canvas)


def _filled(colour: str, texture: Texture) -> dict[str, Any]:
    """How matplotlib fills a shape with a texture."""
    if texture == "grey":
        return {"facecolor": "#8a8d93", "edgecolor": "none"}
    if texture in _HATCHES:
        return {"facecolor": "none", "edgecolor": colour, "hatch": _HATCHES[texture], "linewidth": 0.0}
    outline = colour if texture == "none" else "none"
    return {"facecolor": (colour, _ALPHA[texture]), "edgecolor": outline, "linewidth": 0.6}


def _draw(axis: Any, chart: Chart) -> None:
    axis.set_title(chart.title, fontsize=10, loc="left")
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.25, axis="x" if isinstance(chart, Rows) else "y")
    axis.set_axisbelow(True)
    match chart:
        case Lines():
            for line in chart.lines:
                colour = "#8a8d93" if line.run is None else RUN_COLOURS[line.run]
                style = "--" if line.run is None else _DASHES[line.run]
                mark = "o" if line.has_marks else None
                if line.points:
                    axis.plot(*zip(*line.points, strict=True), color=colour, linestyle=style, marker=mark, markersize=3)
                for x, low, high in line.intervals:
                    axis.plot([x, x], [low, high], color=colour, linewidth=1, alpha=0.6)
            _scale(axis, chart.x, chart.y)
        case Areas():
            floors = np.zeros(len(chart.edges) - 1)
            for _, texture, shares in chart.bands:
                tops = floors + np.asarray(shares)
                fill = _filled(RUN_COLOURS[chart.run], texture)
                axis.fill_between(chart.edges, [*floors, *floors[-1:]], [*tops, *tops[-1:]], step="post", **fill)
                floors = tops
            ticks = [(k / 4, f"{25 * k} %") for k in range(5)]
            _scale(axis, chart.x, Axis(0, 1, ticks, chart.y_label))
        case Columns():
            n = len(chart.columns)
            for k, column in enumerate(chart.columns):
                places = [i + (k - (n - 1) / 2) * 0.8 / n for i in range(len(chart.categories))]
                heights = [value or 0.0 for value in column.values]
                axis.bar(places, heights, 0.72 / n, **_filled(RUN_COLOURS[column.run], column.texture))
                for x, interval in zip(places, column.intervals, strict=False):
                    if interval:
                        axis.plot([x, x], interval, color="#222222", linewidth=1)
            every = max(1, -(-len(chart.categories) // 13))
            ticks = [(float(i), words) for i, words in enumerate(chart.categories)][::every]
            _scale(axis, Axis(-0.6, len(chart.categories) - 0.4, ticks, chart.x_label), chart.y)
            if chart.is_log:
                axis.set_yscale("log")
                axis.set_ylim(0.5, chart.y.high)
                axis.set_yticks([value for value, _ in chart.y.ticks], [words for _, words in chart.y.ticks])
        case Rows():
            for i, (_, pieces) in enumerate(chart.rows):
                start = 0.0
                for _, texture, count in pieces:
                    axis.barh(i, count, 0.6, left=start, **_filled(RUN_COLOURS[chart.run], texture))
                    start += count
            ticks = [(float(i), label) for i, (label, _) in enumerate(chart.rows)]
            _scale(axis, chart.x, Axis(len(chart.rows) - 0.4, -0.6, ticks, ""))


def _scale(axis: Any, x: Axis, y: Axis) -> None:
    if x.root:
        axis.set_xscale("function", functions=(lambda v: np.sqrt(np.clip(v, 0, None)), np.square))
    axis.set_xlim(x.low, x.high)
    axis.set_ylim(y.low, y.high)
    axis.set_xticks([value for value, _ in x.ticks], [words for _, words in x.ticks])
    axis.set_yticks([value for value, _ in y.ticks], [words for _, words in y.ticks])
    axis.set_xlabel(x.label, fontsize=8)
    axis.set_ylabel(y.label, fontsize=8)
