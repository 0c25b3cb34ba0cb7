"""Pictures of runs, as PNG files. Layer 3; matplotlib without a display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = ("#6b7280", "#d9480f", "#1971c2", "#2b8a3e", "#862e9c")
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
