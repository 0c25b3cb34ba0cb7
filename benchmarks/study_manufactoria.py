"""Per-test against all-tests rewards, NGU against fixed K, on the task `manufactoria-tiny`.

Writes docs/results/manufactoria.md.

    python benchmarks/study_manufactoria.py [--seeds 0 1 2] [--out runs/study-manufactoria]

One process a core, one torch thread each. All arms of a seed begin with the same warm-started policy and draw the same
number of completions. What counts is the share of held-out problems' completions that pass all tests, hidden ones included,
whatever the reward was. A run whose summary is in the folder already is not run again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import mean

from rich.console import Console

from nevergiveup import build
from nevergiveup.evaluate import BUCKETS, assign_buckets, mean_by_bucket
from nevergiveup.events import Dispatched, read_events
from nevergiveup.loop import TaskGrader
from nevergiveup.recipes import RECIPES
from nevergiveup.report.live import PlainView
from nevergiveup.settings import EvalSettings, Settings
from nevergiveup.strategies import FixedK, NeverGiveUp
from nevergiveup.task_settings import PerTest
from nevergiveup.train import train

N_EVAL = 32
"""Completions a problem, in each of the evaluations."""


@dataclass(frozen=True)
class Arm:
    label: str
    strategy: FixedK | NeverGiveUp
    score: PerTest


SCORES: tuple[PerTest, ...] = ("per-test", "all-tests")
ARMS: dict[str, Arm] = {
    f"{name}{k}-{score}": Arm(f"{label}, K={k}, {score}", strategy, score)
    for score in SCORES
    for name, label, k, strategy in (
        ("fixed", "GRPO", 4, FixedK(k=4)),
        ("ngu", "NGU p=.95", 4, NeverGiveUp(k=4, p=0.95)),
    )
}
START = "ngu4-all-tests"
"""Whose settings make the policy that all arms begin with."""


def settings_of(arm: Arm, seed: int, start: str) -> Settings:
    recipe = RECIPES["manufactoria-tiny"].settings
    # 256 completions a batch of GRPO, which holds all that is drawn; a batch of groups with contrast takes about as many, if it
    # is the smaller, the rarer contrast is.
    n_groups = 256 // arm.strategy.k
    if not isinstance(arm.strategy, FixedK):
        n_groups //= 2 if arm.score == "per-test" else 4
    return replace(
        recipe,
        task=replace(recipe.task, score=arm.score),
        model=replace(recipe.model, path=start),
        strategy=arm.strategy,
        batch=replace(recipe.batch, n_groups=n_groups, max_pending=512 // arm.strategy.k),
        eval=EvalSettings(n_prompts=0),
        checkpoint_every=10**9,
        keep_checkpoints=1,
        runtime="here",
        seed=seed,
    )


def pass_rates(folder: Path, seed: int, draw: int) -> dict[str, dict[str, float]]:
    """Split -> problem -> share of N_EVAL completions of the policy in `folder` that pass all tests. draw: which samples."""
    settings = replace(settings_of(ARMS[START], seed, str(folder)), eval=EvalSettings(n=N_EVAL))
    task, tokenizer, model = (
        build.make_task(settings),
        build.load_tokenizer(folder),
        build.load_model(folder, "float32"),
    )
    out = {}
    for n, split in enumerate(("test", "train")):
        data = build.Data(task, [], list(task.prompts(split)))
        sampling = build.sampled_counts(settings, model, tokenizer, data, TaskGrader(task), 1000 * draw + n)
        counts = asyncio.run(sampling)
        out[split] = {name: right / drawn for name, (drawn, right) in counts.items()}
    return out


def warm_start(seed: int, out: Path) -> None:
    """The policy that all arms of a seed begin with; its pass rates from two sets of samples: for buckets, and to compare."""
    folder = out / f"seed-{seed}" / "start"
    if (folder / "rates.json").exists():
        return
    build.warm_start(settings_of(ARMS[START], seed, ""), folder, lambda text: None)
    rates = {"buckets": pass_rates(folder, seed, 1), "before": pass_rates(folder, seed, 2)}
    (folder / "rates.json").write_text(json.dumps(rates))


def run(name: str, seed: int, out: Path) -> float:
    """One arm of one seed, unless it has been run; returns the seconds it took."""
    folder = out / f"seed-{seed}" / name
    if (folder / "rates.json").exists():
        return 0.0
    began = time.perf_counter()
    settings = settings_of(ARMS[name], seed, str(out / f"seed-{seed}" / "start"))
    train(settings, folder, PlainView(Console(quiet=True)), resume=folder.exists())
    (folder / "rates.json").write_text(json.dumps(pass_rates(folder / "model", seed, 3)))
    return time.perf_counter() - began


def run_all(seeds: Sequence[int], out: Path) -> None:
    n_workers = min(len(os.sched_getaffinity(0)), 8)
    with ProcessPoolExecutor(n_workers, mp_context=get_context("spawn")) as pool:
        for future in [pool.submit(warm_start, seed, out) for seed in seeds]:
            future.result()
        futures = {pool.submit(run, name, seed, out): (name, seed) for seed in seeds for name in ARMS}
        for n, future in enumerate(as_completed(futures), 1):
            name, seed = futures[future]
            print(f"{n:3} of {len(futures)}  seed {seed}  {name:16} {future.result():5.0f} s", flush=True)


# ---------------------------------------------------------------------------------------------- page

HEAD = """# Per-test and all-tests rewards on `manufactoria-tiny`

Written by `make study-manufactoria`; do not edit. Seeds {seeds}; nothing was left out or chosen by its outcome.

Programs for the robot of Manufactoria, without text: a tiny Llama that a noisy teacher warm-started, {budget:,} completions for
every arm, the same start and the same learner (clipped loss, AdamW at a constant {lr:g}). What is given is the share of
completions that pass **all** tests of a held-out problem, hidden tests included, whatever the reward was: {n_eval} samples a
problem, mean of {n} seeds, in brackets the least and the greatest. Buckets by initial pass rate (easy above .7, medium .3-.7,
hard .02-.3, extra hard below .02), from samples that are used for nothing else.
"""


def page(seeds: Sequence[int], out: Path) -> str:
    recipe = RECIPES["manufactoria-tiny"].settings
    start = {seed: json.loads((out / f"seed-{seed}" / "start" / "rates.json").read_text()) for seed in seeds}
    buckets = {seed: assign_buckets(start[seed]["buckets"]["test"]) for seed in seeds}
    columns = (*BUCKETS, "all")

    def row(label: str, rates: dict[int, dict[str, float]], end: str) -> str:
        by_seed = [mean_by_bucket(rates[seed], buckets[seed]) for seed in seeds]
        return f"| {label} | {' | '.join(_spread([r[c] for r in by_seed if c in r]) for c in columns)} | {end} |"

    lines = [
        HEAD.format(
            seeds=", ".join(map(str, seeds)), budget=recipe.max_completions, lr=recipe.learner.lr, n_eval=N_EVAL,
            n=len(seeds),
        ),
        f"| arm | {' | '.join(b.replace('_', ' ') for b in columns)} | steps |",
        f"|---{'|---' * len(columns)}|---|",
        row("*at the start*", {seed: start[seed]["before"]["test"] for seed in seeds}, "0"),
    ]  # fmt: skip
    for name, arm in ARMS.items():
        after = {s: json.loads((out / f"seed-{s}" / name / "rates.json").read_text())["test"] for s in seeds}
        steps = mean(json.loads((out / f"seed-{s}" / name / "summary.json").read_text())["steps"] for s in seeds)
        lines.append(row(arm.label, after, f"{steps:.0f}"))
    sizes = [[sum(b == c for b in buckets[s].values()) for c in BUCKETS] for s in seeds]
    lines += [
        "",
        "Held-out problems by bucket, seed by seed: "
        + "; ".join(", ".join(f"{n} {b.replace('_', ' ')}" for n, b in zip(row_, BUCKETS, strict=True)) for row_ in sizes)
        + ".",
        "", "## Where the completions went", "",
        "Share of all completions drawn, by the initial difficulty of the training problem (mean of the seeds).", "",
        f"| arm | {' | '.join(b.replace('_', ' ') for b in BUCKETS)} |", f"|---{'|---' * len(BUCKETS)}|",
    ]  # fmt: skip
    for name, arm in ARMS.items():
        shares = [_drawn(out / f"seed-{s}" / name, assign_buckets(start[s]["buckets"]["train"])) for s in seeds]
        lines.append(f"| {arm.label} | {' | '.join(f'{100 * mean(s[b] for s in shares):.0f} %' for b in BUCKETS)} |")
    return "\n".join(lines) + "\n"


def _drawn(folder: Path, buckets: dict[str, str]) -> dict[str, float]:
    n = dict.fromkeys(BUCKETS, 0)
    for _, event in read_events(folder / "events.jsonl"):
        if isinstance(event, Dispatched):
            n[buckets[event.prompt]] += event.n
    return {bucket: count / sum(n.values()) for bucket, count in n.items()}


def _spread(values: list[float]) -> str:
    return f"{mean(values):.3f} [{min(values):.3f}, {max(values):.3f}]" if values else ""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/study-manufactoria"))
    parser.add_argument("--page", type=Path, default=Path("docs/results/manufactoria.md"))
    options = parser.parse_args()
    began = time.perf_counter()
    run_all(options.seeds, options.out)
    options.page.write_text(page(options.seeds, options.out))
    print(f"{options.page} written after {time.perf_counter() - began:.0f} s")
