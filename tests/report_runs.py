"""Run folders for the tests of the report: the real scheduler and event writer, a policy that is a table of pass rates.

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
from nevergiveup.scheduler import Scheduler
from nevergiveup.strategies import NeverGiveUp, Strategy
from nevergiveup.types import Attempt, Prompt, Request

START = (0.97, 0.9, 0.5, 0.2, 0.1, 0.04, 0.01, 0.0)
"""Pass rates at the start, by the number of the prompt."""
N_PROMPTS = 160
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
    """Writes a finished run and returns its summary. rename: other ids for some prompts. text, reason: of completions."""
    strategy = strategy or NeverGiveUp(k=4, p=0.8, window=4)
    names = {f"p{i}": f"p{i}" for i in range(N_PROMPTS)} | (rename or {})
    prompts = [Prompt(names[f"p{i}"]) for i in range(N_PROMPTS)]
    rates = {prompt.id: START[i % len(START)] for i, prompt in enumerate(prompts)}
    initial = rates | {f"h{i}": rate for i, rate in enumerate(rates.values())}
    buckets = assign_buckets(initial)
    folder.mkdir(parents=True)
    clock = count()
    writer = EventWriter(folder / "events.jsonl", lambda: next(clock) / 1000)
    tally = Tally(buckets)
    lines: dict[str, list[Row]] = {"metrics": [], "rates": [], "samples": []}

    def on_event(event: Any) -> None:
        writer.write(event)
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

    kept = {prompt.id for prompt in prompts[:12]}
    known: set[str] = set()

    def deliver(request: Request) -> None:
        attempts = [
            Attempt(int(Random(s).random() < rates[request.prompt.id]), scheduler.version) for s in request.seeds
        ]
        if request.prompt.id in kept:
            if request.prompt.id not in known:
                known.add(request.prompt.id)
                lines["samples"].append(
                    {
                        "kind": "prompt",
                        "prompt": request.prompt.id,
                        "text": f"solve {request.prompt.id}",
                        "answer": "42",
                    }
                )
            for i, attempt in enumerate(attempts):
                lines["samples"].append(
                    {"kind": "sample", "prompt": request.prompt.id, "epoch": request.visit, "round": request.round,
                     "request": request.id, "key": f"{request.id}-{i}", "version": attempt.version, "finish": "stop",
                     "n_tokens": 3, "reward": float(attempt.reward), "reason": reason, "text": f"{text} {attempt.reward}",
                     "t": request.id / 10}
                )  # fmt: skip
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
            weight = max(weight or 0.0 for weight in group.weights)
            rates[group.prompt.id] += RATE * weight * (1 - rates[group.prompt.id])
        scheduler.publish(scheduler.version + 1)
        lines["metrics"].append(
            {"step": scheduler.version, "t": float(scheduler.version), "completions": scheduler.ledger.drawn,
             "engine_idle": 0.25, "learner_idle": 0.5}
        )  # fmt: skip
        if scheduler.version % 10 == 0:
            evaluate()
    evaluate()
    writer.close()
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
