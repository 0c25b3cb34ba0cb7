"""A run that stopped learning, continued with NGU, on the task `chains`. Writes docs/results/revival.md.

    python benchmarks/study_revival.py [--seeds 0 1 2] [--out runs/study-revival] [--page docs/results/revival.md]

GRPO with K = 4 trains until its extra-hard bucket has stopped moving; `ngu train --init RUN` then begins two runs from what it
has learned, with the same budget: GRPO once more, and NGU. One process a core, one torch thread each, runtime "here". What is
in the folder already is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from study_chains import base, warm_start

from nevergiveup.cli import main as ngu
from nevergiveup.compare import groups_per_batch
from nevergiveup.evaluate import BUCKETS
from nevergiveup.report.live import PlainView
from nevergiveup.settings import BatchSettings
from nevergiveup.strategies import FixedK, NeverGiveUp
from nevergiveup.train import read_settings, train

BUDGET = 409_600
"""Completions of a continuation. What fixed K has left over is solved less than once in ten thousand tries: with a fifth of
this budget (the first choice) NGU was ahead by .051 on seed 0 and no better on seeds 1 and 2. It was set on seed 3."""
STRETCH, GAIN, LONGEST = 160, 0.01, 3200
"""The first run goes on, so many steps at a time, until the extra-hard bucket gained less than GAIN in the last stretch, or it
has made LONGEST steps."""
K, P = 4, 0.95
ARMS = {"fixed": "GRPO, K=4, continued", "ngu": "NGU, K=4, p=.95"}


def stagnate(seed: int, out: Path) -> Path:
    """Trains with fixed K until that is over; returns the run."""
    run, start = out / f"seed-{seed}" / "first", out / f"seed-{seed}" / "start"
    if (run / "stalled").exists():
        return run
    warm_start(seed, start)
    plain = base(seed)
    settings = replace(
        plain,
        model=replace(plain.model, path=str(start)),
        strategy=FixedK(k=K),
        batch=BatchSettings(n_groups=64, max_pending=128, retry_order="front"),
        max_completions=None,
    )
    steps = 0
    if (run / "config.json").exists():
        steps = read_settings(run).steps - STRETCH  # type: ignore[operator]  # of the stretch that was interrupted, or done
    while steps < LONGEST:
        steps += STRETCH
        train(
            replace(settings, steps=steps), run, PlainView(Console(quiet=True)), resume=(run / "config.json").exists()
        )
        rates = {row["step"]: row["pass_rates"]["extra_hard"] for row in heldout(run)}
        if rates[steps] - rates[steps - STRETCH] < GAIN:
            break
    (run / "stalled").write_text(f"{steps}\n")
    return run


def go_on(seed: int, out: Path) -> float:
    """Both continuations of a seed; returns the seconds that all of it took."""
    began = time.perf_counter()
    run = stagnate(seed, out)
    newest = [row for line in (run / "rates.jsonl").read_text().splitlines() if (row := json.loads(line))]
    rates = [row for row in newest if row["split"] == "train"][-1]["rates"]
    n_groups = {"fixed": 64, "ngu": groups_per_batch(NeverGiveUp(k=K, p=P), rates, seed, 64 * K)}
    for name in ARMS:
        folder = out / f"seed-{seed}" / name
        if (folder / "summary.json").exists():
            continue
        shutil.rmtree(folder, ignore_errors=True)
        words = ["train", "--init", str(run), "--strategy", name, "--strategy.k", str(K), "--out", str(folder)]
        words += ["--strategy.p", str(P)] if name == "ngu" else []
        words += ["--batch.n-groups", str(n_groups[name]), "--max-completions", str(BUDGET), "--steps", "None"]
        if status := ngu(words):
            raise RuntimeError(f"{' '.join(words)} ended with {status}")
    return time.perf_counter() - began


def heldout(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    return [row for row in rows if row["split"] == "heldout"]


def page(seeds: Sequence[int], out: Path) -> str:
    first = {seed: heldout(out / f"seed-{seed}" / "first") for seed in seeds}
    steps = [rows[-1]["step"] for rows in first.values()]
    ends = {name: {seed: heldout(out / f"seed-{seed}" / name)[-1] for seed in seeds} for name in ARMS}

    def figures(rows: Sequence[dict[str, Any]]) -> str:
        values = {bucket: [row["pass_rates"][bucket] for row in rows] for bucket in (*BUCKETS, "all")}
        return " | ".join(f"**{mean(v):.3f}** ({min(v):.3f}-{max(v):.3f})" for v in values.values())

    table = {
        "*at the very beginning*": [rows[0] for rows in first.values()],
        f"*{STRETCH} steps before the first run ends*": [
            _at(rows, rows[-1]["step"] - STRETCH) for rows in first.values()
        ],
        "*where the first run ends*": [rows[-1] for rows in first.values()],
        **{label: list(ends[name].values()) for name, label in ARMS.items()},
    }
    lines = [
        "# Revival: a run that stopped learning, continued with NGU", "",
        f"Written by `make study-revival`; do not edit. Seeds {', '.join(map(str, seeds))}; nothing was left out or chosen by "
        "its outcome.", "",
        f"The task `chains` (preset \"study\"). GRPO with K = {K} trains, {64 * K} completions a step, until the extra-hard "
        f"bucket (held out, exact) gained less than {GAIN} in {STRETCH} steps: after {', '.join(map(str, steps))} steps. From "
        f"what it has learned, `ngu train --init RUN --strategy ...` begins two runs of {BUDGET:,} completions each, with a "
        "fresh optimizer: GRPO once more, and NGU. The buckets stay those of the very beginning. Groups per batch of NGU: as "
        f"many as {64 * K} completions buy when it takes over. The budget was chosen on seed 3, which is not in the "
        "table: with a fifth of it, NGU was ahead of GRPO by .051 on seed 0 and not on the others. What is left after GRPO "
        "is solved less than once in ten thousand tries, and to meet that takes tries.", "",
        "| pass@1, held out | easy | medium | hard | extra hard | all |", "|---|---|---|---|---|---|",
        *(f"| {label} | {figures(rows)} |" for label, rows in table.items()), "",
        "![pass@1 over completions](revival.png)", "", "## Seed by seed: extra hard", "",
        "| seed | first run, before and at its end | GRPO continued | NGU | NGU gained more by |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for seed in seeds:
        rows = first[seed]
        before, at = (row["pass_rates"]["extra_hard"] for row in (_at(rows, rows[-1]["step"] - STRETCH), rows[-1]))
        after = {name: ends[name][seed]["pass_rates"]["extra_hard"] for name in ARMS}
        lines.append(
            f"| {seed} | {before:.3f}, {at:.3f} | {after['fixed']:.3f} ({after['fixed'] - at:+.3f}) | {after['ngu']:.3f} "
            f"({after['ngu'] - at:+.3f}) | {after['ngu'] - after['fixed']:+.3f} |"
        )
    return "\n".join(lines) + "\n"


def _at(rows: Sequence[dict[str, Any]], step: int) -> dict[str, Any]:
    return next(row for row in rows if row["step"] == step)


def plot(seeds: Sequence[int], out: Path, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(seeds), figsize=(4.2 * len(seeds), 3.4), sharey=True, layout="constrained")
    for axis, seed in zip(list(axes) if len(seeds) > 1 else [axes], seeds, strict=True):
        first = heldout(out / f"seed-{seed}" / "first")
        axis.plot(*_curve(first, 0), color="#777777", label="GRPO, K=4")
        for (name, label), colour in zip(ARMS.items(), ("#d1495b", "#00798c"), strict=True):
            rows = heldout(out / f"seed-{seed}" / name)
            axis.plot(*_curve(rows, first[-1]["completions"]), color=colour, label=label)
        axis.axvline(first[-1]["completions"] / 1000, color="#bbbbbb", linewidth=0.8)
        axis.set(title=f"extra hard, seed {seed}", xlabel="thousand completions drawn", ylim=(0, 1))
        axis.grid(alpha=0.25)
    figure.axes[0].set_ylabel("pass@1, held out")
    figure.axes[0].legend(fontsize=8, loc="upper left")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _curve(rows: Sequence[dict[str, Any]], offset: int) -> tuple[list[float], list[float]]:
    return [(offset + row["completions"]) / 1000 for row in rows], [row["pass_rates"]["extra_hard"] for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/study-revival"))
    parser.add_argument("--page", type=Path, default=Path("docs/results/revival.md"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    n_workers = min(len(os.sched_getaffinity(0)), len(options.seeds))
    with ProcessPoolExecutor(n_workers, mp_context=get_context("spawn")) as pool:
        for future in [pool.submit(go_on, seed, options.out) for seed in options.seeds]:
            print(f"a seed took {future.result():.0f} s", flush=True)
    plot(options.seeds, options.out, options.page.with_suffix(".png"))
    options.page.write_text(page(options.seeds, options.out))


if __name__ == "__main__":
    main()
