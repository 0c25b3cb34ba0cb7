"""`ngu compare`: several strategies from the same start, with the same number of completions, on several seeds. Layer 4.

    compare(base, arms, seeds, out)   trains every arm of every seed, and returns what comparison.json holds
    main(words)                       the command; `ngu demo` uses `compare` too

What is equal for all arms of a seed: the policy at the start, the prompts, the completions drawn, the learner. What counts is
the policy when the budget is spent, never the best of several checkpoints. Difficulty comes from exact pass rates where a task
has them, else from a probe whose samples serve for nothing else. A run whose summary is in the folder is not run again, one
that was stopped goes on.

out/seed-S/start, probe-*.json   what the arms of a seed share          out/comparison.json, .md   figures
out/seed-S/ARM                   a run folder each (`ngu report` reads them)      out/curves.png   pass rates over completions
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import mean
from typing import TYPE_CHECKING, Any

from nevergiveup import build
from nevergiveup.checkpoints import write_json
from nevergiveup.config import changed, resolve, strategies_named
from nevergiveup.evaluate import BUCKETS, bootstrap_interval
from nevergiveup.measure import Asked, probe
from nevergiveup.report.live import make_view
from nevergiveup.scheduler import Scheduler
from nevergiveup.settings import BatchSettings, Settings
from nevergiveup.strategies import AnyStrategy
from nevergiveup.task_settings import TINY
from nevergiveup.tasks.chains import Chains
from nevergiveup.train import train
from nevergiveup.types import Attempt, Prompt

if TYPE_CHECKING:
    from rich.console import Console

PER_STEP = 256
"""Completions that a batch of each arm costs at the start, about."""

N_RESAMPLES = 1000


@dataclass(frozen=True, slots=True)
class Arm:
    """batch: None for as many groups as PER_STEP completions buy at the start (see `groups_per_batch`)."""

    label: str
    strategy: AnyStrategy
    batch: BatchSettings | None = None

    @property
    def folder(self) -> str:
        return re.sub(r"[^A-Za-z0-9.=-]+", "-", self.label).strip("-")


def groups_per_batch(strategy: AnyStrategy, rates: Mapping[str, float], seed: int, per_step: int = PER_STEP) -> int:
    """As many groups as per_step completions buy at the start: the strategy's own scheduler on the initial pass rates, without
    learning, for two passes over the data (the first, in which some only get to know the prompts, is left out)."""
    prompts = [Prompt(name) for name in rates]
    scheduler = Scheduler(strategy, prompts, n_groups=64, max_pending=128, max_epochs=2, seed=seed)
    rng = Random(seed)
    n_trained, seen = 0, (0, 0)
    while scheduler.finished is None:
        if scheduler.epoch == 0:
            seen = (scheduler.ledger.drawn, n_trained + scheduler.n_ready)
        while (request := scheduler.next()) is not None:
            rate = rates[request.prompt.id]
            scheduler.deliver(request.id, [Attempt(int(rng.random() < rate), 0) for _ in range(request.n)])
        if (batch := scheduler.take()) is not None:
            n_trained += len(batch.groups)
            scheduler.publish(0)
    drawn, trained = scheduler.ledger.drawn - seen[0], n_trained - seen[1]
    return max(1, round(per_step * trained / max(drawn, 1)))


def batch_of(arm: Arm, base: Settings, rates: Mapping[str, float]) -> BatchSettings:
    """Who trains on every group needs no more open groups than two batches; who filters, enough to keep the engine full."""
    if arm.batch is not None:
        return arm.batch
    n_groups = groups_per_batch(arm.strategy, rates, base.seed)
    first = arm.strategy.open(Prompt("")) or 8
    trains_all = n_groups * first >= PER_STEP
    max_pending = 2 * n_groups if trains_all else max(2 * n_groups, base.sampling.n_slots // first, 32)
    return replace(base.batch, n_groups=n_groups, n_completions=None, max_pending=max_pending)


def compare(
    base: Settings, arms: Sequence[Arm], seeds: Sequence[int], out: Path, console: Console, *, probe_n: int = 32
) -> dict[str, Any]:
    """base: settings of all arms but strategy and batch, with max_completions as the budget. The first arm is the reference.

    Raises ValueError for bad input, KeyboardInterrupt when a run was stopped.
    """
    if base.max_completions is None:
        raise ValueError("a comparison needs a budget: give --budget, the completions that each run may draw")
    if base.eval.n_prompts == 0:
        raise ValueError("a comparison needs held-out prompts: give --eval.n-prompts, how many of them")
    if len(arms) < 2 or len({arm.folder for arm in arms}) < len(arms):
        raise ValueError("a comparison needs at least two strategies that differ")
    per_seed: dict[str, dict[str, Any]] = {}
    for seed in seeds:
        settings, rates = _prepare(replace(base, seed=seed), out / f"seed-{seed}", console, probe_n)
        per_seed[str(seed)] = {}
        for arm in arms:
            console.print(f"Seed {seed}: {arm.label}", highlight=False)
            folder = out / f"seed-{seed}" / arm.folder
            run = replace(settings, strategy=arm.strategy, batch=batch_of(arm, settings, rates))
            per_seed[str(seed)][arm.label] = _result(_run(run, folder, console), folder)
    comparison = _compared([arm.label for arm in arms], per_seed)
    write_json(out / "comparison.json", comparison)
    (out / "comparison.md").write_text(markdown(comparison), encoding="utf-8")
    _plot(comparison, out / "curves.png")
    return comparison


def _prepare(settings: Settings, folder: Path, console: Console, probe_n: int) -> tuple[Settings, dict[str, float]]:
    """The settings with the policy that all arms of a seed begin with and with the difficulty of the prompts, and the pass
    rates of the training prompts."""

    def note(text: str) -> None:
        console.print(f"  {text}", highlight=False, markup=False)

    if isinstance(settings.task, TINY) and not settings.model.path:
        start = folder / "start"
        if not start.is_dir():
            console.print(f"Seed {settings.seed}: warm-starting the policy that all arms begin with", highlight=False)
            half_made = start.with_name(".start.new")
            build.warm_start(settings, half_made, note)
            half_made.rename(start)
        settings = replace(settings, model=replace(settings.model, path=str(start)))
    task = build.make_task(settings)
    if isinstance(task, Chains):
        model = build.load_model(build.model_folder(settings), "float32")
        return settings, build.exact_rates(model, task, task.prompts("train"), settings.sampling.temperature)
    if not settings.eval.buckets:
        files = []
        choices = {"train": build.TRAIN_CHOICE, "test": build.EVAL_CHOICE}
        for split, choice in choices.items():
            if task.prompts(split):
                console.print(
                    f"Seed {settings.seed}: probing the {split} prompts, {probe_n} completions each", highlight=False
                )
                file = folder / f"probe-{split}.json"
                limit = settings.task.n_prompts if split == "train" else settings.eval.n_prompts
                asked = Asked(settings, "probe", split, limit, probe_n, settings.sampling.temperature, choice)
                probe(asked, file.with_suffix(".jsonl"), file, note)
                files.append(str(file))
        settings = replace(settings, eval=replace(settings.eval, buckets=",".join(files)))
    return settings, build.probed_rates(settings)


def _run(settings: Settings, folder: Path, console: Console) -> dict[str, Any]:
    done = folder / "summary.json"
    if done.exists() and not (summary := json.loads(done.read_text()))["stopped"]:
        return dict(summary)
    summary = train(settings, folder, make_view(console), resume=(folder / "config.json").exists())
    if summary["stopped"]:
        raise KeyboardInterrupt
    return summary


# ------------------------------------------------------------------------------------------------------------ figures


def _result(summary: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """before, after: pass rate by bucket. rates: prompt by prompt. spent: completions drawn, by bucket of training prompts."""
    rows = [json.loads(line) for line in (folder / "rates.jsonl").read_text().splitlines()]
    heldout = [row for row in rows if row["split"] == "heldout"]
    if len(heldout) < 2:
        raise ValueError(
            f"{folder} has no evaluations to compare: the task needs held-out prompts, and eval.n_prompts not 0"
        )
    buckets = json.loads((folder / "buckets.json").read_text())["buckets"]
    evaluations = [row for row in summary["evaluations"] if row["split"] == "heldout"]
    return {
        "before": _known(evaluations[0]["pass_rates"]),
        "after": _known(evaluations[-1]["pass_rates"]),
        "completions": summary["completions"],
        "steps": summary["steps"],
        "seconds": summary["seconds"],
        "spent": {b: summary["totals"].get(f"completions/{b}/drawn", 0) for b in BUCKETS},
        "curve": [[row["completions"], _known(row["pass_rates"])] for row in evaluations],
        "rates": heldout[-1]["rates"],
        "buckets": {prompt_id: buckets[prompt_id] for prompt_id in heldout[-1]["rates"] if prompt_id in buckets},
    }


def _known(rates: Mapping[str, float]) -> dict[str, float]:
    """By bucket and over all; pass@1 where a task has no buckets."""
    named = {name: rates[name] for name in (*BUCKETS, "all") if name in rates}
    return named if "all" in named else {**named, "all": rates["pass@1"]}


def _compared(labels: Sequence[str], per_seed: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    reference = labels[0]
    differences: dict[str, dict[str, Any]] = {}
    for label in labels[1:]:
        by_bucket = {}
        for bucket in (*BUCKETS, "all"):
            found = [_differences(arms[label], arms[reference], bucket) for arms in per_seed.values()]
            found = [values for values in found if values]
            if found:
                by_bucket[bucket] = {
                    "mean": mean(map(mean, found)),
                    "interval": _interval(found),
                    "by_seed": [mean(values) for values in found],
                }
        differences[label] = by_bucket
    return {
        "seeds": list(per_seed),
        "labels": list(labels),
        "mean": {label: _mean([arms[label] for arms in per_seed.values()]) for label in labels},
        "differences": differences,
        "per_seed": {
            seed: {
                label: {key: value for key, value in arm.items() if key not in ("rates", "buckets")}
                for label, arm in arms.items()
            }
            for seed, arms in per_seed.items()
        },
    }


def _differences(arm: Mapping[str, Any], reference: Mapping[str, Any], bucket: str) -> list[float]:
    """Prompt by prompt: the two have seen the same ones."""
    return [
        rate - reference["rates"][prompt_id]
        for prompt_id, rate in arm["rates"].items()
        if prompt_id in reference["rates"] and bucket in ("all", arm["buckets"].get(prompt_id))
    ]


def _interval(per_seed: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """95 %: with several seeds, seeds are drawn and then prompts of each; with one, prompts alone."""
    if len(per_seed) == 1:
        return bootstrap_interval(per_seed[0])
    rng = Random(0)
    means = sorted(
        mean(mean(rng.choices(values, k=len(values))) for values in rng.choices(per_seed, k=len(per_seed)))
        for _ in range(N_RESAMPLES)
    )
    return means[round(0.025 * (N_RESAMPLES - 1))], means[round(0.975 * (N_RESAMPLES - 1))]


def _mean(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A bucket that some seed lacks is averaged over the others."""
    out: dict[str, Any] = {key: mean(result[key] for result in results) for key in ("completions", "steps", "seconds")}
    for key in ("before", "after", "spent"):
        names = dict.fromkeys(name for result in results for name in result[key])
        out[key] = {name: mean(result[key][name] for result in results if name in result[key]) for name in names}
    return out


# -------------------------------------------------------------------------------------------------------------- output


def table_rows(comparison: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: pass rates by difficulty, differences from the first arm, completions drawn."""
    labels: list[str] = comparison["labels"]
    means = comparison["mean"]
    header = ["difficulty", "start", *labels]
    header += [f"{label} - {labels[0]}" for label in labels[1:]]
    header += [f"drawn, {label}" for label in labels]
    rows = []
    for bucket in (*BUCKETS, "all"):
        if not all(bucket in means[label]["after"] for label in labels):
            continue
        row = [bucket.replace("_", " "), f"{means[labels[0]]['before'][bucket]:.3f}"]
        row += [f"{means[label]['after'][bucket]:.3f}" for label in labels]
        for label in labels[1:]:
            found = comparison["differences"][label][bucket]
            interval = "" if found["interval"] is None else " [{}, {}]".format(*map(_signed, found["interval"]))
            row.append(f"{_signed(found['mean'])}{interval}")
        row += [f"{means[label]['spent'].get(bucket, means[label]['completions']):,.0f}" for label in labels]
        rows.append(row)
    return header, rows


def _signed(difference: float) -> str:
    """+.062: narrow enough for a terminal."""
    return f"{difference:+.3f}".replace("0.", ".", 1)


def what_it_is(comparison: Mapping[str, Any]) -> str:
    seeds = comparison["seeds"]
    drawn = "seeds and prompts" if len(seeds) > 1 else "prompts, not over seeds: more --seeds would tell"
    return (
        f"pass@1 on held-out prompts when the budget is spent, mean of {len(seeds)} seed{'s' if len(seeds) > 1 else ''} "
        f"({', '.join(seeds)}); differences prompt by prompt, with 95 % intervals over {drawn}; completions drawn by "
        "difficulty of the training prompts"
    )


def markdown(comparison: Mapping[str, Any]) -> str:
    header, rows = table_rows(comparison)
    lines = [
        f"# {' against '.join(comparison['labels'])}",
        "",
        what_it_is(comparison)[0].upper() + what_it_is(comparison)[1:] + ".",
        "",
        f"| {' | '.join(header)} |",
        "|" + "---|" * len(header),
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
        "| run | steps | completions | seconds |",
        "|---|---|---|---|",
    ]
    for label in comparison["labels"]:
        m = comparison["mean"][label]
        lines.append(f"| {label} | {m['steps']:,.0f} | {m['completions']:,.0f} | {m['seconds']:,.0f} |")
    return "\n".join(lines) + "\n"


def print_comparison(comparison: Mapping[str, Any], console: Console) -> None:
    from rich.table import Table

    header, rows = table_rows(comparison)
    table = Table(box=None, padding=(0, 2, 0, 0), title=what_it_is(comparison), title_justify="left")
    for i, name in enumerate(header):
        table.add_column(name.replace("drawn, ", "drawn,\n"), justify="right" if i else "left", no_wrap=not i)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _plot(comparison: Mapping[str, Any], path: Path) -> None:
    from nevergiveup.report.plots import Curve, pass_rates_by_bucket

    groups = {
        label: [
            Curve(label, [(completions, rates) for completions, rates in arms[label]["curve"]], arms[label]["spent"])
            for arms in comparison["per_seed"].values()
        ]
        for label in comparison["labels"]
    }
    shown = [bucket for bucket in BUCKETS if all(bucket in comparison["mean"][label]["after"] for label in groups)]
    n_seeds = len(comparison["seeds"])
    title = f"Same start, same number of completions ({n_seeds} seed{'s' if n_seeds > 1 else ''})"
    pass_rates_by_bucket(groups, shown or ["all"], title, path)


# ------------------------------------------------------------------------------------------------------------- command


def main(words: Sequence[str]) -> int:
    """`ngu compare`; returns the exit status. Raises ValueError for bad input."""
    from rich.console import Console

    parser = argparse.ArgumentParser(
        prog="ngu compare",
        allow_abbrev=False,
        description="Trains several strategies from the same start with the same number of completions, and compares them by "
        "difficulty. Every setting of ngu train can be given, too.",
    )
    parser.add_argument(
        "recipe", nargs="?", help="settings of all runs (`ngu recipes`); or --config, --task and --model.path"
    )
    parser.add_argument(
        "--strategies",
        default="fixed,dapo,ngu",
        metavar="LIST",
        help="the first is the reference; options with colons: fixed:k=16,ngu:p=0.9 (default: fixed,dapo,ngu)",
    )
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="seeds 0 to N-1 (default: 3)")
    parser.add_argument("--budget", type=int, metavar="N", help="completions of each run (default: max_completions)")
    parser.add_argument(
        "--probe-n", type=int, default=32, metavar="N", help="completions a prompt to tell difficulty (default: 32)"
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="a TOML file, as for ngu train")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: runs/compare-RECIPE")
    has_recipe = bool(words) and (not words[0].startswith("-") or words[0] in ("-h", "--help"))
    options, rest = parser.parse_known_args(
        [*([] if has_recipe else [""]), *words]
    )  # else a setting's value would pass for it
    if options.seeds < 1:
        raise ValueError(f"--seeds {options.seeds} must be at least 1")
    settings = resolve(options.recipe or None, options.config, rest)
    budget = settings.max_completions if options.budget is None else options.budget
    if budget is None:
        raise ValueError("a comparison needs a budget: give --budget, the completions that each run may draw")
    settings = changed(settings, [f"--max_completions={budget}", "--steps=none"])
    arms = [Arm(label, strategy) for label, strategy in strategies_named(options.strategies).items()]
    for arm in arms:
        build.check(replace(settings, strategy=arm.strategy))
    out: Path = options.out or Path("runs") / f"compare-{options.recipe or settings.task.name}"
    console = Console()
    comparison = compare(settings, arms, range(options.seeds), out, console, probe_n=options.probe_n)
    print_comparison(comparison, console)
    folders = " ".join(str(out / "seed-0" / arm.folder) for arm in arms)
    console.print(
        f"figures: {out / 'comparison.json'}, {out / 'comparison.md'}   curves: {out / 'curves.png'}", highlight=False
    )
    console.print(f"a page on the runs of one seed: ngu report {folders}", highlight=False)
    return 0
