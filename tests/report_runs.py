"""Run folders for the tests of the report: real scheduler, event writer and sample log; the policy is a table of pass rates.

A prompt's pass rate rises with every batch that trains on it, by the weight of its best attempts; held-out prompt h7 is as
likely solved as training prompt p7. Rates are exact, so that every figure on the page can be computed a second time.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from nevergiveup.evaluate import assign_buckets, mean_by_bucket
from nevergiveup.events import EventWriter
from nevergiveup.metrics import Tally
from nevergiveup.samples import SampleLog
from nevergiveup.scheduler import Scheduler
from nevergiveup.strategies import NeverGiveUp, Strategy
from nevergiveup.types import Attempt, Completion, Prompt, Request, Score

START = (0.97, 0.9, 0.5, 0.2, 0.1, 0.04, 0.01, 0.0)
"""Pass rates at the start, by the number of the prompt."""
N_PROMPTS = 160
N_SAMPLED = 12
"""Prompts whose texts are kept, besides those that are given up."""
RATE = 0.5
"""How much of what is missing to 1 a batch adds, for an advantage of 1."""

Row = dict[str, Any]


def write_run(
    folder: Path,
    strategy: Strategy | None = None,
    *,
    n_completions: int = 6000,
    seed: int = 0,
    rename: dict[str, str] | None = None,
    text: str = "the answer is",
    reason: str = "",
) -> Row:
    """Writes a finished run and returns its summary; advantages.jsonl holds every weight that was trained with.

    rename: other ids for some prompts. text, reason: of completions.
    """
    strategy = strategy or NeverGiveUp(k=4, p=0.8, window=4)
    names = {f"p{i}": f"p{i}" for i in range(N_PROMPTS)} | (rename or {})
    prompts = [
        Prompt(names[f"p{i}"], ({"role": "user", "content": f"solve p{i}"},), answer=42) for i in range(N_PROMPTS)
    ]
    rates = {prompt.id: START[i % len(START)] for i, prompt in enumerate(prompts)}
    initial = rates | {f"h{i}": rate for i, rate in enumerate(rates.values())}
    buckets = assign_buckets(initial)
    folder.mkdir(parents=True)
    clock = count()
    writer = EventWriter(folder / "events.jsonl", lambda: next(clock) / 1000)
    tally = Tally(buckets)
    lines: dict[str, list[Row]] = {"metrics": [], "rates": [], "advantages": []}
    samples = SampleLog(
        folder / "samples.jsonl",
        prompts,
        n_prompts=N_SAMPLED,
        seed=0,
        clock=lambda: 0.5,
        read=lambda tokens: str(tokens),
    )

    def on_event(event: Any) -> None:
        writer.write(event)
        samples.event(event)
        tally.add(event)

    scheduler = Scheduler(
        strategy, prompts, n_groups=8, max_pending=32, max_completions=n_completions, seed=seed, on_event=on_event
    )
    evaluations: list[Row] = []

    def evaluate() -> None:
        drawn = scheduler.ledger.drawn
        held_out = {f"h{i}": rate for i, rate in enumerate(rates.values())}
        for split, these in (("heldout", held_out), ("train", dict(rates))):
            row = {"split": split, "step": scheduler.version, "completions": drawn}
            lines["rates"].append({**row, "n": None, "rates": these})
            evaluations.append({**row, "pass_rates": mean_by_bucket(these, buckets)})

    def deliver(request: Request) -> None:
        version = scheduler.version
        rewards = [int(Random(s).random() < rates[request.prompt.id]) for s in request.seeds]
        completions = [
            Completion((request.id, i), (0.0, 0.0), f"{text} {reward}", "stop", version, version)
            for i, reward in enumerate(rewards)
        ]
        samples.graded(request, completions, [Score(reward, reason) for reward in rewards], rewards)
        attempts = [Attempt(r, version, completion) for r, completion in zip(rewards, completions, strict=True)]
        scheduler.deliver(request.id, attempts)

    evaluate()
    while scheduler.finished is None:
        request = scheduler.next()
        if request is not None:
            deliver(request)
            continue
        batch = scheduler.take()
        if batch is None:
            break
        for group in batch.groups:
            best = max(weight or 0.0 for weight in group.weights)
            rates[group.prompt.id] += RATE * best * (1 - rates[group.prompt.id])
            lines["advantages"] += [
                {"prompt": group.prompt.id, "step": scheduler.version + 1, "reward": attempt.reward, "weight": weight}
                for attempt, weight in zip(group.attempts, group.weights, strict=True)
            ]
        scheduler.publish(scheduler.version + 1)
        samples.trained(batch, scheduler.version)
        lines["metrics"].append(
            {"step": scheduler.version, "t": float(scheduler.version), "completions": scheduler.ledger.drawn,
             "engine_idle": 0.25, "learner_idle": 0.5}
        )  # fmt: skip
        if scheduler.version % 10 == 0:
            evaluate()
    evaluate()
    writer.close()
    samples.close()
    for name, rows in lines.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    summary = {
        "reason": scheduler.finished or "",
        "stopped": False,
        "steps": scheduler.version,
        "seconds": 12.5,
        "completions": scheduler.ledger.drawn,
        "ledger": scheduler.ledger.as_dict() | {"held": scheduler.held},
        "idle": {"engine": 0.25, "learner": 0.5},
        "evaluations": evaluations,
        "n_by_bucket": {},
        "totals": tally.figures(),
    }
    settings = {"seed": seed, "strategy": {"name": strategy.name, **asdict(strategy)}, "batch": {"n_groups": 8}}  # type: ignore[attr-defined, call-overload]
    for name, row in (
        ("summary", summary),
        ("config", settings),
        ("buckets", {"rates": initial, "buckets": buckets, "source": "exact"}),
    ):
        (folder / f"{name}.json").write_text(json.dumps(row))
    return summary
