"""The demonstration: fixed-K GRPO and NGU from the same policy, with the same number of completions. Layer 4.

One policy is warm-started for a seed, trained twice, and both are measured exactly on prompts that neither saw. Writes
comparison.json and curves.png into the folder; each run keeps its own run folder below it.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from nevergiveup import build
from nevergiveup.evaluate import BUCKETS
from nevergiveup.recipes import RECIPES
from nevergiveup.report.live import make_view
from nevergiveup.settings import Settings
from nevergiveup.strategies import FixedK, NeverGiveUp
from nevergiveup.train import train, write_json

SPLITS = ("heldout", "train")
LABELS = {"fixed": "fixed-K", "ngu": "NGU"}
"""fixed: GRPO with a fixed K."""


def arms(settings: Settings) -> dict[str, Settings]:
    """The two runs that are compared. They differ in the strategy and in how batches are cut: a fixed-K batch of 64 groups
    is 256 completions whether or not they teach anything; an NGU batch holds groups with contrast only, and 8 of them come
    from about as many completions, so that both make about as many optimizer steps. Learning rate and all else are equal.
    """
    assert isinstance(settings.strategy, NeverGiveUp)
    fixed = replace(
        settings, strategy=FixedK(k=settings.strategy.k), batch=replace(settings.batch, n_groups=64, max_pending=128)
    )
    return {"fixed": fixed, "ngu": settings}


def main(
    seeds: Sequence[int], out: Path, console: Console | None = None, settings: Settings | None = None
) -> dict[str, Any]:
    """Runs the comparison for every seed and prints it; returns what comparison.json holds. settings: of the NGU run."""
    console = console or Console()
    recipe = settings or RECIPES["demo"].settings
    per_seed: dict[str, Any] = {}
    summaries: dict[str, list[dict[str, Any]]] = {name: [] for name in LABELS}
    for seed in seeds:
        began = time.perf_counter()
        settings = replace(recipe, seed=seed)
        folder = out / f"seed-{seed}"
        if folder.exists():
            shutil.rmtree(folder)  # of an earlier demonstration
        start = folder / "start"
        console.print(f"Seed {seed}: warm-starting the policy both runs begin with")
        build.warm_start(settings, start, lambda text: console.print(f"  {text}"))
        for name, arm in arms(settings).items():
            console.print(f"Seed {seed}: {LABELS[name]}")
            run = replace(arm, model=replace(arm.model, path=str(start)))
            summary = train(run, folder / name, make_view(console))
            if summary["stopped"]:
                raise KeyboardInterrupt
            summaries[name].append(summary)
        per_seed[str(seed)] = _of_seed({name: runs[-1] for name, runs in summaries.items()})
        console.print(f"Seed {seed} took {time.perf_counter() - began:.0f} s")
    comparison = {"seeds": list(seeds), **_mean(list(per_seed.values())), "per_seed": per_seed}
    write_json(out / "comparison.json", comparison)
    _plot(summaries, out / "curves.png")
    _print(comparison, summaries, console)
    console.print(f"Curves: {out / 'curves.png'}   figures: {out / 'comparison.json'}")
    return comparison


def _of_seed(summaries: dict[str, dict[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {split: {} for split in SPLITS}
    for split in SPLITS:
        for name, summary in summaries.items():
            rates = [row["pass_rates"] for row in summary["evaluations"] if row["split"] == split]
            result[split][name] = {"before": rates[0], "after": rates[-1], "completions": summary["completions"]}
    return result


def _mean(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The same nested structure with every number averaged; a bucket that some seed lacks is averaged over the others."""
    out: dict[str, Any] = {}
    for key in {key: None for result in results for key in result}:
        values = [result[key] for result in results if key in result]
        out[key] = _mean(values) if isinstance(values[0], dict) else sum(values) / len(values)
    return out


def _spent(summary: dict[str, Any], fate: str) -> dict[str, float]:
    return {bucket: summary["totals"].get(f"completions/{bucket}/{fate}", 0.0) for bucket in BUCKETS}


def _plot(summaries: dict[str, list[dict[str, Any]]], path: Path) -> None:
    from nevergiveup.report.plots import Curve, pass_rates_by_bucket

    groups = {
        LABELS[name]: [
            Curve(
                LABELS[name],
                [
                    (row["completions"], row["pass_rates"])
                    for row in summary["evaluations"]
                    if row["split"] == "heldout"
                ],
                _spent(summary, "drawn"),
            )
            for summary in runs
        ]
        for name, runs in summaries.items()
    }
    n_seeds = len(next(iter(summaries.values())))
    title = f"Same start, same number of completions ({n_seeds} seed{'s' if n_seeds > 1 else ''})"
    pass_rates_by_bucket(groups, BUCKETS, title, path)


def _print(comparison: dict[str, Any], summaries: dict[str, list[dict[str, Any]]], console: Console) -> None:
    heldout = comparison["heldout"]
    table = Table(
        title="pass@1 on held-out prompts, by difficulty at the start; completions drawn", title_justify="left"
    )
    table.add_column("difficulty", no_wrap=True)
    table.add_column("before", justify="right")
    for label in LABELS.values():
        table.add_column(label, justify="right")
    table.add_column("gain", justify="right")
    for label in LABELS.values():
        table.add_column(f"drawn,\n{label}", justify="right")
    drawn = {
        name: {b: sum(_spent(summary, "drawn")[b] for summary in runs) / len(runs) for b in BUCKETS}
        for name, runs in summaries.items()
    }
    for bucket in (*BUCKETS, "all"):
        if bucket not in heldout["ngu"]["after"]:
            continue
        after = {name: heldout[name]["after"][bucket] for name in LABELS}
        spent = {name: drawn[name].get(bucket, heldout[name]["completions"]) for name in LABELS}
        table.add_row(
            bucket.replace("_", " "),
            f"{heldout['ngu']['before'][bucket]:.3f}",
            *(f"{rate:.3f}" for rate in after.values()),
            f"{after['ngu'] - after['fixed']:+.3f}",
            *(f"{count:,.0f}" for count in spent.values()),
        )
    console.print(table)
